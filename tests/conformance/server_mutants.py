"""Mutants of the server around a service: status, unknown methods, malformed messages, TLS and the token."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from quartet.config.deployment import SecurityConfig
from quartet.conformance.batches import batch_of, tensor
from quartet.conformance.runner import AGENT
from quartet.contract.status import Role
from quartet.rpc.security.credentials import Credentials
from quartet.rpc.server import Server, StatusServicer
from quartet.v1 import environment_pb2, reward_pb2, status_pb2
from tests.conformance.models import Service


def _unknown_method(service: Service) -> None:
    """Answer a method that the contract does not have."""

    def answer(request: bytes, context: Any) -> bytes:
        return b""

    def change(server: Server) -> None:
        handler = grpc.unary_unary_rpc_method_handler(answer)
        methods = grpc.method_handlers_generic_handler("quartet.v1.RewardService", {"NoSuchMethod": handler})
        server._server.add_generic_rpc_handlers((methods,))

    service.after_start.append(change)


def _any_bytes(name: str, method: str, valid: Any) -> Callable[[Service], None]:
    """Return a mutation that takes bytes that are no message for a ``valid`` one."""

    def parsed(content: bytes) -> Any:
        try:
            return type(valid).FromString(content)
        except DecodeError:
            return valid

    def mutate(service: Service) -> None:
        register, answer = service.servicer.register, getattr(service.servicer, method)

        def wrong(server: grpc.Server) -> None:
            handler = grpc.unary_unary_rpc_method_handler(answer, parsed, lambda message: message.SerializeToString())
            register(server)
            server.add_registered_method_handlers(name, {method: handler})  # type: ignore[attr-defined]

        service.servicer.register = wrong

    return mutate


def _other_instance(service: Service) -> None:
    """Have another id of the process in each status."""
    register = service.servicer.register

    def answer(request: Any, context: Any) -> Any:
        status = StatusServicer([service.servicer]).GetStatus(request, context)
        status.instance_id = secrets.token_hex(8)
        return status

    def wrong(server: grpc.Server) -> None:
        handler = grpc.unary_unary_rpc_method_handler(
            answer, status_pb2.GetStatusRequest.FromString, status_pb2.GetStatusResponse.SerializeToString
        )
        register(server)
        server.add_registered_method_handlers("quartet.v1.StatusService", {"GetStatus": handler})  # type: ignore[attr-defined]

    service.servicer.register = wrong


BATCH = batch_of([(np.array([1], np.int32), np.array([1], np.int32))])
RESET = environment_pb2.ResetRequest(session="a", token_ids=tensor([1]))
RUN = environment_pb2.RunAgentRequest(session="a", base_url="http://127.0.0.1:9/v1", api_key="k" * 16, model="m")
SERVER_MUTANTS: list[tuple[str, str, str, Callable[[Service], None]]] = [
    ("another id of the process each time", Role.REWARD, "status.instance", _other_instance),
    ("an unknown method that answers", Role.REWARD, "errors.unknown_method",
     _unknown_method),
    ("any bytes as a batch", Role.REWARD, "score.garbage",
     _any_bytes("quartet.v1.RewardService", "Score", reward_pb2.ScoreRequest(batch=BATCH))),
    ("any bytes as a reset", Role.ENVIRONMENT, "session.garbage",
     _any_bytes("quartet.v1.EnvironmentService", "Reset", RESET)),
    ("any bytes as a run", AGENT, "run.garbage",
     _any_bytes("quartet.v1.EnvironmentService", "RunAgent", RUN)),
]  # fmt: skip
"""Name, role, id of the check that must fail, and fault."""


class _AnyCaller(Credentials):
    """Credentials of a server that asks for no certificate."""

    def listen(self, server: grpc.Server, address: str) -> int:
        certificate, key, _ = self._files or (b"", b"", b"")
        return server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)]))

    def refusal(self, *_: Any) -> None:
        """Refuse no caller."""


def _plaintext(role: Role, security: SecurityConfig) -> Credentials:
    return Credentials(role)


def _any_caller(role: Role, security: SecurityConfig) -> Credentials:
    return _AnyCaller(role, security)


def _no_token(role: Role, security: SecurityConfig) -> Credentials:
    return Credentials(role, SecurityConfig(certificates=security.certificates))


ACCESS_MUTANTS: list[tuple[str, str, Callable[[Role, SecurityConfig], Credentials]]] = [
    ("calls without TLS", "tls.required", _plaintext),
    ("callers without a certificate", "tls.client_certificate", _any_caller),
    ("a missing token", "tls.token", _no_token),
]
"""Name, id of the check that must fail, and the credentials of the server."""
