"""EnvironmentService: converts requests and responses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc

from quartet.codec.environment import (
    checked_session,
    environment_reply_to_proto,
    environment_reset_from_proto,
    environment_restore_from_proto,
    environment_step_from_proto,
)
from quartet.contract.status import Role, ServiceStatus
from quartet.environments.host import EnvironmentHost
from quartet.errors import MismatchError
from quartet.v1 import environment_pb2, environment_pb2_grpc


class EnvironmentServicer(environment_pb2_grpc.EnvironmentServiceServicer):
    """EnvironmentService for an EnvironmentHost. A call waits on its own thread for the environment."""

    role = Role.ENVIRONMENT

    def __init__(self, host: EnvironmentHost, threads: int) -> None:
        """``threads``: CPU threads of libraries in the worker processes."""
        self._host, self._threads = host, threads

    def register(self, server: grpc.Server) -> None:
        """Add this servicer to a server."""
        environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(self, server)

    def status(self) -> ServiceStatus:
        """Return the status of the host."""
        return replace(self._host.status(), threads=self._threads)

    def abandoned(self) -> tuple[str, float]:
        """Return no abandoned work: every call of an environment has a time limit."""
        return "", 0.0

    def failure(self) -> str:
        """Return no failure: a failed worker process is replaced."""
        return ""

    def close(self) -> None:
        """End the worker processes."""
        self._host.close()

    def Reset(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Start an episode, or start it again."""
        reset = environment_reset_from_proto(request)
        reply = self._host.reset(reset.session, reset.seed, reset.fields, reset.token_ids)
        return environment_reply_to_proto(environment_pb2.ResetResponse, reply)

    def Step(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Give the policy's turn to the environment."""
        step = environment_step_from_proto(request)
        reply = self._host.step(step.session, step.turn, step.token_ids)
        return environment_reply_to_proto(environment_pb2.StepResponse, reply)

    def RestoreSession(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Continue an episode after a turn, from the state that its environment had then."""
        restore = environment_restore_from_proto(request)
        reply = self._host.restore(
            restore.session, restore.seed, restore.fields, restore.token_ids, restore.turn, restore.state
        )
        return environment_reply_to_proto(environment_pb2.RestoreSessionResponse, reply)

    def CloseSession(self, request: Any, context: grpc.ServicerContext) -> Any:
        """End a session."""
        self._host.close_session(checked_session(request.session))
        return environment_pb2.CloseSessionResponse()

    def RunAgent(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Refuse: this service has environments."""
        raise MismatchError("RunAgent: this service has environments, and no agents; set its environment.kind to agent")
