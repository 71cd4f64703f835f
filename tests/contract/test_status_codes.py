"""Errors in RPC statuses: each class has a code and is sent by name, and texts of unexpected errors are not sent."""

from __future__ import annotations

import inspect
from typing import Any

import grpc
import pytest
import torch
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from quartet import errors
from quartet.rpc.status_codes import CODES, DOMAIN, INTERNAL_TEXT, MAX_RETRY_SECONDS, MAX_TEXT, error_of, status_of

CALL = "critic at 127.0.0.1:1: Values"
CLASSES: list[type[errors.QuartetError]] = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.QuartetError) and kind is not errors.QuartetError
]
NUMBERS = {code.value[0]: code for code in grpc.StatusCode}


class FailedCall(grpc.RpcError):
    """Error that a caller receives. It has ``code`` and ``text``, and optionally ``status``."""

    def __init__(self, code: grpc.StatusCode, text: str, status: Status | None = None) -> None:
        self._code, self._text = code, text
        self._metadata: Any = () if status is None else rpc_status.to_status(status).trailing_metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._text

    def trailing_metadata(self) -> Any:
        return self._metadata


def round_trip(error: BaseException) -> errors.QuartetError:
    """Return the error that the caller raises if the service raises ``error``."""
    status = status_of(error)
    return error_of(FailedCall(NUMBERS[status.code], status.message, status), CALL, 3.0)


def test_every_error_class_has_a_row_and_no_row_is_unreachable() -> None:
    problems = []
    for kind in CLASSES:
        rows = [row for row, _ in CODES if issubclass(kind, row) and row is not errors.QuartetError]
        if not rows:
            problems.append(f"{kind.__name__} falls through to the last row of CODES")
        elif status_of(kind("text")).code != dict(CODES)[rows[0]].value[0]:
            problems.append(f"{kind.__name__} does not have the code of its first row")
    for index, (kind, _) in enumerate(CODES):
        if any(issubclass(kind, earlier) for earlier, _ in CODES[:index]):
            problems.append(f"the row of {kind.__name__} is hidden by an earlier one")
    assert problems == []


def test_a_caller_raises_the_class_of_the_service_with_the_service_name() -> None:
    problems = []
    for kind in CLASSES:
        # The caller did not cancel the call, so for the caller the service has not responded.
        expected = errors.NoResponse if issubclass(kind, errors.Cancelled) else kind
        raised = round_trip(kind("the cause"))
        # The cause of a failed function comes first: its text starts with the function.
        start = "the cause" if issubclass(kind, errors.ScorerFailed) else f"{CALL}: "
        if type(raised) is not expected or not str(raised).startswith(start):
            problems.append(f"{kind.__name__} arrives as {raised!r}")
        if kind is not errors.DeadlinePassed and "the cause" not in str(raised):
            problems.append(f"{kind.__name__} loses its text: {raised}")
    assert problems == []


def test_the_time_of_a_retry_arrives() -> None:
    raised = round_trip(errors.QuotaExceeded("run a: too many calls", 2.5))
    assert isinstance(raised, errors.QuotaExceeded)
    assert (raised.retry_seconds, str(raised)) == (2.5, f"{CALL}: run a: too many calls")


@pytest.mark.parametrize(("seconds", "expected"), [(3, 3.0), (-1, 0.0), (10**9, MAX_RETRY_SECONDS)])
def test_a_service_in_another_language_may_send_the_time_of_a_retry_without_a_class(
    seconds: int, expected: float
) -> None:
    packed, retry = AnyMessage(), RetryInfo()
    retry.retry_delay.FromSeconds(seconds)
    packed.Pack(retry)
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    status = Status(code=code.value[0], message="slow down", details=[packed])
    raised = error_of(FailedCall(code, "slow down", status), CALL, 3.0)
    assert isinstance(raised, errors.QuotaExceeded)
    assert raised.retry_seconds == expected


def test_a_class_of_another_module_is_sent_as_its_nearest_base_class() -> None:
    class BrokenAdapter(errors.ModelError):
        pass

    assert type(round_trip(BrokenAdapter("no weights"))) is errors.ModelError


def test_gpu_memory_exhaustion_is_permanent_and_the_text_of_torch_is_not_sent() -> None:
    raised = round_trip(torch.OutOfMemoryError("process 4711 has 3 GiB"))
    assert type(raised) is errors.OutOfMemory
    assert not isinstance(raised, errors.ServiceFailed | errors.FailedPrecondition)
    assert "4711" not in str(raised)
    assert "micro_batch_tokens" in str(raised)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `x`"),
        torch.distributed.DistBackendError("ncclUnhandledCudaError: ...\nLast error:\nCuda failure 2 'out of memory'"),
        torch.distributed.DistBackendError("ncclUnhandledCudaError: ...\nLast error:\nCuda failure 'out of memory'"),
    ],
)
def test_a_failed_allocation_of_a_cuda_library_is_permanent(error: Exception) -> None:
    assert type(round_trip(error)) is errors.OutOfMemory


def test_another_error_of_nccl_is_not_permanent() -> None:
    error = torch.distributed.DistBackendError(
        "ncclUnhandledCudaError: ...\nLast error:\nCuda failure 999 'unknown error'"
    )
    assert type(round_trip(error)) is errors.ServiceFailed


def test_an_unexpected_error_is_sent_without_text_and_class() -> None:
    for error in (RuntimeError("/secret/path"), KeyError("x"), ValueError("y")):
        status = status_of(error)
        assert (status.code, status.message, list(status.details)) == (13, INTERNAL_TEXT, [])
        assert type(round_trip(error)) is errors.ServiceFailed


@pytest.mark.parametrize(
    ("domain", "reason"), [("quartet", "ErrorOfALaterVersion"), ("quartet", "QuartetError"), ("example", "ConfigError")]
)
def test_an_unknown_class_falls_back_to_the_status_code(domain: str, reason: str) -> None:
    details = AnyMessage()
    details.Pack(ErrorInfo(domain=domain, reason=reason))
    status = Status(code=grpc.StatusCode.ABORTED.value[0], message="text", details=[details])
    raised = error_of(FailedCall(grpc.StatusCode.ABORTED, "text", status), CALL, 3.0)
    assert type(raised) is errors.BufferFailed


def test_details_of_another_status_are_ignored() -> None:
    status = status_of(errors.ConfigError("text"))
    raised = error_of(FailedCall(grpc.StatusCode.UNAVAILABLE, "replaced by a proxy", status), CALL, 3.0)
    assert type(raised) is errors.ServiceUnavailable


def test_damaged_details_are_ignored() -> None:
    failed = FailedCall(grpc.StatusCode.ABORTED, "text")
    failed._metadata = (("grpc-status-details-bin", b"\xff\xff"),)
    assert type(error_of(failed, CALL, 3.0)) is errors.BufferFailed


def test_every_status_code_without_details_becomes_a_domain_error() -> None:
    problems = []
    for code in grpc.StatusCode:
        raised = error_of(FailedCall(code, "text"), CALL, 2.5)
        if type(raised) is errors.QuartetError or not str(raised).startswith(f"{CALL}: "):
            problems.append(f"{code.name} becomes {raised!r}")
    assert problems == []


def test_a_passed_deadline_names_the_seconds() -> None:
    raised = error_of(FailedCall(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"), CALL, 2.5)
    assert type(raised) is errors.NoResponse
    assert str(raised) == (
        f"{CALL}: no response within 2.5 s; if the work takes longer, raise its limit in the timeouts section"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("short", "short"),
        ("x" * MAX_TEXT, "x" * MAX_TEXT),
        ("é" * 600, "é" * MAX_TEXT + "... (600 characters)"),
        ("two\nlines\x1b[31m\u202e", "two\\nlines\\x1b[31m\\u202e"),
    ],
)
def test_a_sent_text_is_short_and_has_one_line(text: str, expected: str) -> None:
    assert status_of(errors.InvalidRequest(text)).message == expected


def test_all_details_contain_the_domain_of_quartet() -> None:
    info = ErrorInfo()
    assert status_of(errors.DataError("text")).details[0].Unpack(info)
    assert (info.domain, info.reason, dict(info.metadata)) == (DOMAIN, "DataError", {})
