"""The one table between domain exceptions and gRPC status codes, read in both directions."""

from __future__ import annotations

import grpc

from quartet import errors

# Most specific first: the first class that an exception is an instance of decides.
CODES: tuple[tuple[type[errors.QuartetError], grpc.StatusCode], ...] = (
    (errors.InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.FailedPrecondition, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.MismatchError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.ConfigError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.DeadlinePassed, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.Cancelled, grpc.StatusCode.CANCELLED),
    (errors.ServiceUnavailable, grpc.StatusCode.UNAVAILABLE),
    (errors.ComputationFailed, grpc.StatusCode.DATA_LOSS),
    (errors.BufferFailed, grpc.StatusCode.ABORTED),
    (errors.ServiceBusy, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.ServiceFailed, grpc.StatusCode.INTERNAL),
    (errors.StorageFailed, grpc.StatusCode.INTERNAL),
    (errors.TooManyFailedTrajectories, grpc.StatusCode.INTERNAL),
    (errors.QuartetError, grpc.StatusCode.INTERNAL),
)

MAX_TEXT = 512
"""Characters of a text that leaves the process. gRPC sends it as a header, at most 9 bytes each, and refuses headers of 16 KiB:
the caller would get neither text nor status."""
INTERNAL_TEXT = "internal error; the service's log has the cause"


def code_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """The status code of an exception and the text that may leave the process: unforeseen errors keep theirs inside."""
    for kind, code in CODES:
        if isinstance(error, kind):
            return code, brief(str(error))
    return grpc.StatusCode.INTERNAL, INTERNAL_TEXT


def brief(text: str) -> str:
    """The text, whatever a caller had put into it: its beginning, in one line."""
    shown = text[:MAX_TEXT]
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in shown)[:MAX_TEXT]
    return shown if len(text) <= MAX_TEXT else f"{shown}... ({len(text)} characters)"


def error_of(code: grpc.StatusCode, text: str, where: str, timeout: float) -> errors.QuartetError:
    """The exception that a caller raises for an answer. ``where`` names service and method; ``timeout`` is in seconds."""
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return errors.InvalidRequest(f"{where}: {text}")
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        return errors.FailedPrecondition(f"{where}: {text}")
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return errors.AccessRefused(
            f"{where}: refused ({text}); check security.token_file and security.certificates on both sides"
        )
    if code is grpc.StatusCode.CANCELLED:
        # What the caller itself cancels never gets here: the service gave up, and nobody asked it to.
        return errors.NoResponse(f"{where}: cancelled by the service ({text})")
    if code is grpc.StatusCode.UNAVAILABLE:
        return errors.ServiceUnavailable(f"{where}: unavailable ({text})")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return errors.MismatchError(f"{where}: the process there does not offer this method; check the address")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.NoResponse(
            f"{where}: no answer within {timeout:g} s; raise its limit in the timeouts section if the work takes longer"
        )
    if code is grpc.StatusCode.DATA_LOSS:
        return errors.ComputationFailed(f"{where}: {text}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "message larger than max" in text:
        # gRPC's own, from either end: it would be as large the next time.
        return errors.InvalidRequest(f"{where}: {text}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.ServiceBusy(f"{where}: {text}")
    if code is grpc.StatusCode.ABORTED:
        return errors.BufferFailed(f"{where}: {text}")
    return errors.ServiceFailed(f"{where}: {text} ({code.name})")
