"""The caller of a request, and the route dependencies that require one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer

from quartet.gateway.http.http_errors import ProblemError
from quartet.gateway.schemas import Access

CALLER_KEY = "quartet.caller"
"""Key of the caller in a request's ASGI scope; set by ``AccessControl``."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: the access of its token and its network address."""

    access: Access
    address: str

    @property
    def user(self) -> str:
        """Name in the audit log, such as ``operator 127.0.0.1``."""
        return f"{self.access} {self.address}"


def unauthorized(detail: str) -> ProblemError:
    """Return a 401 error that asks for a bearer token."""
    return ProblemError(401, detail, headers={"www-authenticate": "Bearer"})


def operator_required() -> ProblemError:
    """Return the 403 error for a command sent with a viewer's token."""
    return ProblemError(403, "this token is read-only; send commands with the operator's token")


_bearer = HTTPBearer(
    auto_error=False, description="The token that the gateway printed at its start, or was configured with."
)


async def viewer(request: Request, _: Annotated[object, Security(_bearer)]) -> Caller:
    """Return the caller. Every authenticated caller may read. Raises ProblemError without a caller."""
    caller: Caller | None = request.scope.get(CALLER_KEY)
    if caller is None:
        # Reached only if a path is public by mistake.
        raise unauthorized("Authorization: missing")
    return caller


async def operator(caller: Annotated[Caller, Depends(viewer)]) -> Caller:
    """Return the caller of a command. Raises ProblemError unless it has the operator's token."""
    if caller.access is not Access.OPERATOR:
        raise operator_required()
    return caller


Viewer = Annotated[Caller, Depends(viewer)]
Operator = Annotated[Caller, Depends(operator)]
