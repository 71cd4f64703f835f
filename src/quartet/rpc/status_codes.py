"""Domain exceptions on the wire: the gRPC status code for any client, and the exception's class for Quartet's own clients.

The class travels as ``google.rpc.ErrorInfo`` in the ``grpc-status-details-bin`` trailer: domain ``quartet``, reason = class name.
The time after which a caller over its quota should try again travels there as ``google.rpc.RetryInfo``.
"""

from __future__ import annotations

from typing import cast

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from quartet import errors
from quartet.contract.domain_errors import domain_error

DOMAIN = "quartet"
"""``ErrorInfo.domain`` of every error that Quartet sends."""

# Most specific class first: the first class that an exception is an instance of gives the code.
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
    (errors.OutOfMemory, grpc.StatusCode.INTERNAL),
    (errors.TooManyFailedTrajectories, grpc.StatusCode.INTERNAL),
    (errors.TooManyEqualGroups, grpc.StatusCode.INTERNAL),
    (errors.QuartetError, grpc.StatusCode.INTERNAL),
)

MAX_TEXT = 512
"""Maximum characters of an error text on the wire."""
MAX_TEXT_BYTES = 1024
"""Maximum bytes of such a text in UTF-8.

gRPC sends the text as a header, with three bytes for each byte of a character beyond ASCII, and once more inside the details. It
may drop headers over 8 KiB: the caller would then get neither text nor status.
"""
MAX_RETRY_SECONDS = 60.0
"""Maximum time that a caller waits before it tries again, whatever the service says."""
INTERNAL_TEXT = "internal error; the service's log has the cause"

_BY_NAME = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.QuartetError) and kind is not errors.QuartetError
}
"""Every domain class by its name on the wire."""


def status_of(error: BaseException) -> Status:
    """Return the status of a failed call: code, text and class of the error. The text of an unforeseen error is not sent."""
    known = domain_error(error)
    if known is None:
        return Status(code=_number(grpc.StatusCode.INTERNAL), message=INTERNAL_TEXT)
    code = next(code for kind, code in CODES if isinstance(known, kind))
    details = [_packed(ErrorInfo(domain=DOMAIN, reason=_wire_name(type(known))))]
    if isinstance(known, errors.QuotaExceeded):
        retry = RetryInfo()
        retry.retry_delay.FromMilliseconds(round(1000 * known.retry_seconds))
        details.append(_packed(retry))
    return Status(code=_number(code), message=shorten(str(known)), details=details)


def _packed(message: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed


def shorten(text: str) -> str:
    """Return ``text`` as one printable line of at most MAX_TEXT characters. A longer text is cut, and its length is added."""
    shown = text[:MAX_TEXT]
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in shown)[:MAX_TEXT]
    shown = shown.encode()[:MAX_TEXT_BYTES].decode(errors="ignore")
    return shown if len(text) <= MAX_TEXT else f"{shown}... ({len(text)} characters)"


def error_of(call: grpc.RpcError, where: str, timeout: float) -> errors.QuartetError:
    """Return the exception for the caller of a failed call: of the class that the service raised, otherwise by the status code.

    ``where`` names service, address and method. ``timeout`` is the timeout of the call in seconds.
    """
    code, text = call.code(), call.details() or "no details"
    kind, retry_seconds = _details_on_wire(call)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and retry_seconds is not None:
        # Also from a service in another language, which sends no class.
        return errors.QuotaExceeded(f"{where}: {text}", retry_seconds)
    # The caller did not cancel: a service that stopped at its own limit or deadline has not responded.
    if kind is None or issubclass(kind, errors.Cancelled):
        return _error_by_code(code, text, where, timeout)
    # The message already names the config key of the function. Its cause comes first.
    return kind(text if issubclass(kind, errors.ScorerFailed) else f"{where}: {text}")


def _details_on_wire(call: grpc.RpcError) -> tuple[type[errors.QuartetError] | None, float | None]:
    """Return the domain class in the details of a failed call, and the seconds until a retry.

    None for a class that is missing or that this version does not know, and for a missing time.
    """
    kind, seconds = None, None
    try:
        status = rpc_status.from_call(cast("grpc.Call", call))
        for packed in status.details if status is not None else ():
            info, retry = ErrorInfo(), RetryInfo()
            if packed.Unpack(info) and info.domain == DOMAIN and kind is None:
                kind = _BY_NAME.get(info.reason)
            elif packed.Unpack(retry):
                seconds = min(max(0.0, retry.retry_delay.ToMilliseconds() / 1000), MAX_RETRY_SECONDS)
    except (ValueError, DecodeError):
        # A proxy replaced the status or the trailer, or the trailer is damaged. The status code remains.
        return None, None
    return kind, seconds


def _wire_name(kind: type[errors.QuartetError]) -> str:
    """Return the name of the nearest class in ``quartet.errors``: a caller does not know classes of other modules."""
    return next((base.__name__ for base in kind.__mro__ if _BY_NAME.get(base.__name__) is base), "")


def _number(code: grpc.StatusCode) -> int:
    number: int = code.value[0]
    return number


def _error_by_code(code: grpc.StatusCode, text: str, where: str, timeout: float) -> errors.QuartetError:
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return errors.InvalidRequest(f"{where}: {text}")
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        return errors.FailedPrecondition(f"{where}: {text}")
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return errors.AccessRefused(
            f"{where}: refused ({text}); check security.token_file and security.certificates on both sides"
        )
    if code is grpc.StatusCode.CANCELLED:
        return errors.NoResponse(f"{where}: cancelled by the service ({text})")
    if code is grpc.StatusCode.UNAVAILABLE:
        return errors.ServiceUnavailable(f"{where}: unavailable ({text})")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return errors.MismatchError(f"{where}: the process there does not offer this method; check the address")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.NoResponse(
            f"{where}: no response within {timeout:g} s; if the work takes longer, raise its limit in the timeouts section"
        )
    if code is grpc.StatusCode.DATA_LOSS:
        return errors.ComputationFailed(f"{where}: {text}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "message larger than max" in text:
        # gRPC itself refused the message, on either side. The same message would be too large again.
        return errors.InvalidRequest(f"{where}: {text}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.ServiceBusy(f"{where}: {text}")
    if code is grpc.StatusCode.ABORTED:
        return errors.BufferFailed(f"{where}: {text}")
    return errors.ServiceFailed(f"{where}: {text} ({code.name})")
