"""Errors of the API as application/problem+json. They name what the caller can fix and reveal no internals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quartet import errors
from quartet.gateway.schemas import FieldProblem, Problem

log = structlog.get_logger()

MEDIA_TYPE = "application/problem+json"
MAX_VALUE_LENGTH = 80
"""Characters of an invalid value that an error message repeats."""

STATUS_OF: dict[type[errors.QuartetError], int] = {
    errors.InvalidRequest: 422,
    errors.FailedPrecondition: 409,
    # In the gateway, a ConfigError means that a file of the run cannot be read; the request itself is valid.
    errors.ConfigError: 409,
    errors.ServiceUnavailable: 503,
    errors.ServiceBusy: 503,
    errors.ServiceFailed: 503,
    errors.BufferFailed: 503,
    errors.Cancelled: 504,
    errors.StorageFailed: 507,
}
"""HTTP status by exception class; the nearest base class counts. An exception without a status is an internal error."""


class ProblemError(Exception):
    """An error response. ``detail`` says what went wrong, what was expected, and what to do."""

    def __init__(
        self,
        status: int,
        detail: str,
        fields: Sequence[FieldProblem] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.fields, self.headers = status, detail, list(fields), dict(headers or {})


class NotFound(ProblemError):
    """The requested resource does not exist (404)."""

    def __init__(self, detail: str) -> None:
        super().__init__(404, detail)


class WrongField(ProblemError):
    """One field of the request is invalid (422). Fields are named like ``query.cursor`` or ``body.config.run.name``."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(422, f"{field}: {problem}", [FieldProblem(field=field, problem=problem)])


def problem_response(
    status: int, detail: str, fields: Sequence[FieldProblem] = (), headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error response."""
    problem = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail, fields=list(fields))
    return Response(problem.model_dump_json(), status, dict(headers or {}), media_type=MEDIA_TYPE)


PROBLEM_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {
        "description": description,
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
    for status, description in {
        400: "The request is malformed.",
        401: "The token is missing or wrong.",
        403: "The token does not permit this, or the request comes from a page of another site.",
        404: "The run, step or other resource does not exist.",
        409: "The run's state does not allow this now, or a file of the run cannot be read.",
        413: "The request body is too large.",
        421: "The Host header is not a name of this gateway.",
        422: "Fields of the request are invalid; `fields` names them.",
        429: "Too many requests; retry after the time in `Retry-After`.",
        500: "Internal error; the gateway's log has the cause.",
        503: "A process of the run, or the gateway itself, is unavailable.",
        504: "A process of the run cancelled its response, or a run is still checking its inputs.",
        507: "A file of the run cannot be written.",
    }.items()
}
"""Error responses in the OpenAPI document."""


def add_handlers(app: FastAPI) -> None:
    """Register handlers that answer expected exceptions as problems. See ``UnexpectedErrors`` for all others."""
    app.add_exception_handler(ProblemError, _on_problem)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(errors.QuartetError, _on_domain)


class UnexpectedErrors:
    """Middleware that logs an unexpected exception with its traceback, and answers 500 without details."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def track_start(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, track_start)
        except Exception as error:
            log.error("internal error", method=scope["method"], path=scope["path"], exc_info=error)
            if started:
                # The response has started; only a closed connection can tell the caller.
                raise
            response = problem_response(500, "internal error; see 'internal error' in the gateway's log")
            await response(scope, receive, send)


def _on_problem(_: Request, error: Exception) -> Response:
    assert isinstance(error, ProblemError)
    return problem_response(error.status, error.detail, error.fields, error.headers)


def _on_validation(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    fields = [field_problem(item) for item in error.errors()]
    return problem_response(422, "; ".join(f"{field.field}: {field.problem}" for field in fields), fields)


def field_problem(item: Mapping[str, Any]) -> FieldProblem:
    """Return a pydantic error with the full name of its field."""
    # Pydantic marks an error of a key, not of its value.
    location = [part for part in item["loc"] if part != "[key]"]
    if item["type"] == "json_invalid":
        reason = item.get("ctx", {}).get("error", "malformed")
        return FieldProblem(field="body", problem=f"not JSON ({reason}, at character {location[-1]})")
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        message = "unknown field; remove it"
    elif item["type"] == "missing":
        message = "missing; it has no default"
    elif isinstance(item.get("input"), str | int | float):
        value = repr(item["input"])
        message += f", not {value if len(value) <= MAX_VALUE_LENGTH else value[:MAX_VALUE_LENGTH] + '…'}"
    return FieldProblem(field=".".join(map(str, location)), problem=message)


def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail, headers = error.detail, dict(error.headers or {})
    if error.status_code == 405 and (methods := _methods(request)):
        # Starlette lists the methods of only one of the path's routes.
        headers["Allow"] = ", ".join(methods)
    if detail == HTTPStatus(error.status_code).phrase:
        detail = _DETAIL_OF_STATUS.get(error.status_code, detail)
    return problem_response(error.status_code, detail, headers=headers)


def _methods(request: Request) -> list[str]:
    """Return the methods of a path by the OpenAPI document."""
    paths: dict[str, dict[str, Any]] = request.app.openapi()["paths"]
    matching = (methods for pattern, methods in paths.items() if compile_path(pattern)[0].match(request.url.path))
    return [method.upper() for method in next(matching, {})]


_DETAIL_OF_STATUS = {
    404: "this path does not exist; GET /api/v1/openapi.json lists all paths",
    405: "this path does not support this method; GET /api/v1/openapi.json lists the methods of each path",
}
"""Details for errors that Starlette describes by their status only."""


def _on_domain(request: Request, error: Exception) -> Response:
    status = next((STATUS_OF[kind] for kind in type(error).__mro__ if kind in STATUS_OF), None)
    if status is None:
        raise error
    log.warning("request refused", method=request.method, path=request.url.path, error=str(error))
    return problem_response(status, str(error))
