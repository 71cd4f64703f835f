"""Limits on HTTP bodies: a maximum request size, and no response body for HEAD requests."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Send

from quartet.gateway.http.http_errors import ProblemError

MAX_BODY_BYTES = 1024 * 1024
"""Size of a request's body."""
_TOO_LARGE = f"body: larger than {MAX_BODY_BYTES} bytes; send a smaller one"


def check_content_length(headers: Mapping[str, str]) -> None:
    """Raise ProblemError (413) if the declared length of the body is above the limit."""
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise ProblemError(413, _TOO_LARGE)


def limit_body(receive: Receive) -> Receive:
    """Wrap ``receive`` to raise HTTPException (413) above the size limit, regardless of the declared length."""
    received = 0

    async def limited() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > MAX_BODY_BYTES:
            raise HTTPException(413, _TOO_LARGE)
        return message

    return limited


def omit_body(send: Send) -> Send:
    """Wrap ``send`` to end the response after its headers."""
    ended = False

    async def headers_only(message: Message) -> None:
        nonlocal ended
        if not ended:
            await send(message)
        if message["type"] == "http.response.start":
            ended = True
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return headers_only
