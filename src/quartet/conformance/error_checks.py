"""Requirements of every error, and of requests that are no message."""

from __future__ import annotations

import grpc

from quartet import errors
from quartet.conformance.outcome import Skipped, expect
from quartet.conformance.target import Refusal, Target
from quartet.rpc.status_codes import CODES, DOMAIN, MAX_TEXT

ERRORS = "docs/adr/0028-errors-cross-the-wire-with-their-class.md"


def require_class(refusal: Refusal) -> None:
    """Raise Violation if the class in an error's details is not one of its status code. Raises Skipped without a class."""
    if not refusal.domain and not refusal.reason:
        raise Skipped("its errors have no google.rpc.ErrorInfo, which is optional")
    expect(refusal.domain == DOMAIN, f"ErrorInfo.domain is {refusal.domain!r}; expected {DOMAIN!r}")
    expect(_fits(refusal), f"ErrorInfo.reason is {refusal.reason!r}; expected a class of the code {refusal.code.name}")


def require_text(refusal: Refusal) -> None:
    """Raise Violation unless the text of an error is one line that is not too long."""
    text = refusal.text
    expect(text.strip(), "an error has no text; expected one that says what was wrong")
    expect(len(text) <= MAX_TEXT + 100, f"the text of an error has {len(text)} characters; expected at most {MAX_TEXT}")
    expect("\n" not in text, f"the text of an error has several lines; expected one: {text[:100]!r}")


def require_garbage_refused(target: Target, rpc: str) -> None:
    """Raise Violation unless a method refuses bytes that are no message."""
    call = target.channel.unary_unary(f"/{target.service}/{rpc}", request_serializer=bytes, response_deserializer=bytes)
    refusal = target.refusal(call, b"\x0a\xff\xff\xff\xff\x0fthis is no message")
    expect(
        refusal.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL),
        f"bytes that are no message are refused with {refusal}; expected INVALID_ARGUMENT or INTERNAL",
    )


def _fits(refusal: Refusal) -> bool:
    kind = getattr(errors, refusal.reason, None)
    if not isinstance(kind, type) or not issubclass(kind, errors.QuartetError):
        return False
    return next(code for base, code in CODES if issubclass(kind, base)) is refusal.code
