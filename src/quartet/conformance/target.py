"""The service under test: its channel, its status, and calls whose errors are values."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import grpc
import numpy as np
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_health.v1 import health_pb2_grpc
from grpc_status import rpc_status

from quartet import errors
from quartet.conformance.outcome import Skipped, Violation, expect, name_of
from quartet.contract.status import Role
from quartet.rpc.security.credentials import LOCAL, Credentials
from quartet.rpc.status_codes import CODES, DOMAIN, MAX_TEXT
from quartet.v1 import (
    actor_pb2_grpc,
    critic_pb2_grpc,
    environment_pb2_grpc,
    generation_pb2_grpc,
    reference_pb2_grpc,
    reward_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
)

_STUBS: dict[Role, Any] = {
    Role.ACTOR: actor_pb2_grpc.ActorServiceStub,
    Role.CRITIC: critic_pb2_grpc.CriticServiceStub,
    Role.REWARD: reward_pb2_grpc.RewardServiceStub,
    Role.REFERENCE: reference_pb2_grpc.ReferenceServiceStub,
    Role.GENERATOR: generation_pb2_grpc.GenerationServiceStub,
    Role.ENVIRONMENT: environment_pb2_grpc.EnvironmentServiceStub,
}
MAX_TOKENS = 512
"""Maximum length of a long sequence, for models that take longer ones."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the checks.

    ``seconds``: time for one call. ``vocabulary_size`` and ``max_tokens`` replace those of the status. ``allow_changes``: run the
    checks that train, save or generate. ``buffer_url``: the service's Redis, for these. ``tolerance``: difference of two results
    that count as equal, relative to the larger of 1 and their size. ``fields``: those of every prompt, as a JSON object.
    ``failing_fields``: those of a prompt for which the reward or the environment fails. ``distinct_response``: token ids of a
    response whose score is not that of random responses; empty if it is unknown.
    """

    seconds: float = 30.0
    vocabulary_size: int | None = None
    max_tokens: int | None = None
    allow_changes: bool = False
    buffer_url: str | None = None
    tolerance: float = 2e-3
    fields: str | None = None
    failing_fields: str | None = None
    distinct_response: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Error of a call: its status code, its text, and the class in its details, which is empty without one."""

    code: grpc.StatusCode
    text: str
    reason: str = ""
    domain: str = ""

    @classmethod
    def of(cls, error: grpc.RpcError) -> Refusal:
        """Return the error of a call."""
        call: Any = error
        info = ErrorInfo()
        try:
            status = rpc_status.from_call(call)
            for packed in status.details if status is not None else ():
                if packed.Unpack(info):
                    break
        except ValueError as mismatch:
            raise Violation(f"the details of an error do not fit its status: {mismatch}") from None
        return cls(call.code(), call.details() or "", info.reason, info.domain)

    def __str__(self) -> str:
        return f"{self.code.name} ({self.text[:200]})"


class Target:
    """A service at an address."""

    def __init__(
        self,
        role: Role,
        address: str,
        limits: Limits = Limits(),
        credentials: Credentials = LOCAL,
        status_credentials: Credentials | None = None,
    ) -> None:
        """Connect. The service is not called yet.

        ``status_credentials`` are those for status and health. Defaults to ``credentials``: most callers may call both.
        """
        self.role, self.address, self.limits, self.credentials = role, address, limits, credentials
        self.channel = credentials.channel(role, address)
        self.stub: Any = _STUBS[role](self.channel)
        self.generation: Any = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self._status_channel = (status_credentials or credentials).channel(role, address)
        self.status_stub = status_pb2_grpc.StatusServiceStub(self._status_channel)
        self.health_stub = health_pb2_grpc.HealthStub(self._status_channel)
        self._random = np.random.default_rng(0)

    @property
    def service(self) -> str:
        """Name of the gRPC service of the role."""
        return self.role.service

    def call(self, method: Any, request: Any, seconds: float | None = None) -> Any:
        """Return the response of a call. Raises Violation if it fails."""
        try:
            return method(request, timeout=seconds or self.limits.seconds, metadata=self.credentials.metadata)
        except grpc.RpcError as error:
            raise Violation(f"a valid call failed with {Refusal.of(error)}") from None

    def start(self, method: Any, request: Any, seconds: float | None = None) -> Any:
        """Start a call of a unary method, and return its future."""
        return method.future(request, timeout=seconds or self.limits.seconds, metadata=self.credentials.metadata)

    def refusal(self, method: Any, request: Any) -> Refusal:
        """Return the error of a call. Raises Violation if it succeeds, or gets no answer in time."""
        try:
            response = method(request, timeout=self.limits.seconds, metadata=self.credentials.metadata)
            if not hasattr(response, "SerializeToString"):  # A stream: it fails with its first message.
                list(response)
        except grpc.RpcError as error:
            refusal = Refusal.of(error)
            expect(
                refusal.code is not grpc.StatusCode.DEADLINE_EXCEEDED,
                f"an invalid call had no answer within {self.limits.seconds:g} s",
            )
            return refusal
        raise Violation("an invalid call succeeded; expected an error")

    def process_status(self) -> Any:
        """Return the message with the status of the process."""
        return self.call(self.status_stub.GetStatus, status_pb2.GetStatusRequest())

    def version(self) -> str:
        """Return the version that the status of the process has, or "" without a status."""
        try:
            return str(self.process_status().version)
        except Violation:
            return ""

    def status(self) -> Any:
        """Return the message with the status of the role. Raises Violation if the process does not have the role."""
        number = status_pb2.Role.Value(f"ROLE_{self.role.upper()}")
        roles = self.process_status().roles
        for status in roles:
            if status.role == number:
                return status
        names = ", ".join(name_of(status_pb2.Role, status.role) for status in roles) or "none"
        raise Violation(f"the status names the roles {names}; expected ROLE_{self.role.upper()}")

    @cached_property
    def vocabulary_size(self) -> int:
        """Number of token ids, which stays the same. Raises Skipped if neither the status nor an option has it."""
        size = self.limits.vocabulary_size or int(self.status().vocabulary_size)
        if size < 2:
            raise Skipped("the status has no vocabulary_size; give --vocabulary-size")
        return size

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of a sequence, prompt and response together; 0 for no limit."""
        return self.limits.max_tokens or int(self.status().max_sequence_tokens)

    @property
    def long_tokens(self) -> int:
        """Tokens of a long sequence that the service must take."""
        return min(self.max_tokens or MAX_TOKENS, MAX_TOKENS)

    def tokens(self, count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return random token ids, int32 [count]. They repeat from run to run."""
        return self._random.integers(0, self.vocabulary_size, count).astype(np.int32)

    def sequences(self, lengths: Sequence[tuple[int, int]]) -> list[TokenPair]:
        """Return random sequences with these numbers of prompt and response tokens."""
        return [(self.tokens(prompt), self.tokens(response)) for prompt, response in lengths]

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Return whether the condition becomes true in this time."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def close(self) -> None:
        """Close the connections."""
        self.channel.close()
        self._status_channel.close()


TokenPair = tuple[np.ndarray[Any, np.dtype[np.int32]], np.ndarray[Any, np.dtype[np.int32]]]
"""Prompt and response, int32 each."""


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
