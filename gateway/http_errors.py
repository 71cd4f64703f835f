"""Errors as the API tells them: application/problem+json, precise about what the caller can mend, silent about the rest."""

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
MAX_ECHO = 80
"""Characters of a wrong value that are told back."""

STATUS_OF: dict[type[errors.QuartetError], int] = {
    errors.InvalidRequest: 422,
    errors.FailedPrecondition: 409,
    # Here a ConfigError is of a file of the run that cannot be read: the request is right, what it asks for is not.
    errors.ConfigError: 409,
    errors.ServiceUnavailable: 503,
    errors.ServiceBusy: 503,
    errors.ServiceFailed: 503,
    errors.BufferFailed: 503,
    errors.Cancelled: 504,
    errors.StorageFailed: 507,
}
"""Of the library's errors; one that is not here is unforeseen. Where several apply, the nearest class counts."""


class ProblemError(Exception):
    """A request cannot be met. ``detail`` says what went wrong, what was expected, what to do."""

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
    """What was asked for is not there."""

    def __init__(self, detail: str) -> None:
        super().__init__(404, detail)


class WrongField(ProblemError):
    """One field of the request is wrong: ``query.cursor``, ``body.config.run.name``."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(422, f"{field}: {problem}", [FieldProblem(field=field, problem=problem)])


def problem_response(
    status: int, detail: str, fields: Sequence[FieldProblem] = (), headers: Mapping[str, str] | None = None
) -> Response:
    """An error's whole answer."""
    problem = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail, fields=list(fields))
    return Response(problem.model_dump_json(), status, dict(headers or {}), media_type=MEDIA_TYPE)


PROBLEM_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {
        "description": description,
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
    for status, description in {
        400: "The request is no HTTP that the gateway understands.",
        401: "The token is missing or wrong.",
        403: "The token may not do this, or the request comes from another site.",
        404: "There is no such run, step or thing.",
        409: "The run's state does not allow it now, or a file of the run cannot be read.",
        413: "The request's body is too large.",
        421: "The name by which the gateway is addressed is none of its own.",
        422: "Fields of the request are wrong; `fields` names them.",
        429: "Too many requests; `Retry-After` says when to come back.",
        500: "The gateway failed; its log says why.",
        503: "A process of the run, or the gateway itself, cannot answer now.",
        504: "A process of the run broke off its answer.",
        507: "A file of the run cannot be written.",
    }.items()
}
"""For the routes' documentation."""


def add_handlers(app: FastAPI) -> None:
    """Lets every error that the app foresees be answered as a problem; of the others see ``AnswerUnforeseen``."""
    app.add_exception_handler(ProblemError, _on_problem)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(errors.QuartetError, _on_domain)


class AnswerUnforeseen:
    """Middleware: what nobody foresaw is told to the log with its cause, and to the caller without."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Of ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def noting(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception as error:
            log.error("unforeseen", method=scope["method"], path=scope["path"], exc_info=error)
            if begun:
                # Half an answer cannot be taken back: breaking it off is what tells the caller.
                raise
            response = problem_response(500, "the gateway failed; its log says why, look there for 'unforeseen'")
            await response(scope, receive, send)


def _on_problem(_: Request, error: Exception) -> Response:
    assert isinstance(error, ProblemError)
    return problem_response(error.status, error.detail, error.fields, error.headers)


def _on_validation(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    fields = [field_problem(item) for item in error.errors()]
    return problem_response(422, "; ".join(f"{field.field}: {field.problem}" for field in fields), fields)


def field_problem(item: Mapping[str, Any]) -> FieldProblem:
    """One error of pydantic's, by the field's whole name."""
    where = list(item["loc"])
    if item["type"] == "json_invalid":
        reason = item.get("ctx", {}).get("error", "malformed")
        return FieldProblem(field="body", problem=f"not JSON ({reason}, at character {where[-1]})")
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        message = "unknown field; remove it"
    elif item["type"] == "missing":
        message = "missing; it has no default"
    elif isinstance(item.get("input"), str | int | float):
        found = repr(item["input"])
        message += f", not {found if len(found) <= MAX_ECHO else found[:MAX_ECHO] + '…'}"
    return FieldProblem(field=".".join(map(str, where)), problem=message)


def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail, headers = error.detail, dict(error.headers or {})
    if error.status_code == 405 and (methods := _methods(request)):
        # The framework names those of one of the path's routes alone.
        headers["Allow"] = ", ".join(methods)
    if detail == HTTPStatus(error.status_code).phrase:
        detail = _MEANING.get(error.status_code, detail)
    return problem_response(error.status_code, detail, headers=headers)


def _methods(request: Request) -> list[str]:
    """What the path takes, by the API's document."""
    paths: dict[str, dict[str, Any]] = request.app.openapi()["paths"]
    matching = (methods for pattern, methods in paths.items() if compile_path(pattern)[0].match(request.url.path))
    return [method.upper() for method in next(matching, {})]


_MEANING = {
    404: "there is nothing at this path; GET /api/v1/openapi.json lists every path",
    405: "this path does not take this method; GET /api/v1/openapi.json lists what each takes",
}
"""Where the framework says no more than the status."""


def _on_domain(request: Request, error: Exception) -> Response:
    status = next((STATUS_OF[kind] for kind in type(error).__mro__ if kind in STATUS_OF), None)
    if status is None:
        raise error
    log.warning("refused", method=request.method, path=request.url.path, error=str(error))
    return problem_response(status, str(error))
