"""EnvironmentService of agents: converts requests and responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import grpc
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quartet.codec.environment import agent_result_to_proto, agent_run_from_proto
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.trajectory import Outcome
from quartet.environments.agents import AgentHost
from quartet.errors import MismatchError
from quartet.v1 import environment_pb2_grpc


class AgentServicer(environment_pb2_grpc.EnvironmentServiceServicer):
    """EnvironmentService for an AgentHost. A call waits on its own thread for its agent."""

    role = Role.ENVIRONMENT

    def __init__(self, host: AgentHost, threads: int) -> None:
        """``threads``: CPU threads of libraries in the worker processes."""
        self._host, self._threads = host, threads

    def register(self, server: grpc.Server) -> None:
        """Add this servicer to a server."""
        environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(self, server)

    def status(self) -> ServiceStatus:
        """Return the status of the host."""
        return replace(self._host.status(), threads=self._threads)

    def abandoned(self) -> tuple[str, float]:
        """Return no abandoned work: an agent whose caller is gone is ended."""
        return "", 0.0

    def failure(self) -> str:
        """Return no failure: a failed worker process is replaced."""
        return ""

    def close(self) -> None:
        """End the agents and their worker processes."""
        self._host.close()

    def RunAgent(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Run the agent to its end, or until the call ends."""
        running = self._host.start(agent_run_from_proto(request))
        if not context.add_callback(running.cancel):  # The call has ended already.
            running.cancel()
        return agent_result_to_proto(running.result())

    def Reset(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Refuse: this service has agents."""
        raise _other_kind("Reset")

    def Step(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Refuse: this service has agents."""
        raise _other_kind("Step")

    def RestoreSession(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Refuse: this service has agents."""
        raise _other_kind("RestoreSession")

    def CloseSession(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Refuse: this service has agents."""
        raise _other_kind("CloseSession")


class AgentMetrics(Collector):
    """Prometheus metrics of the runs of an agent."""

    def __init__(self, ended: Callable[[], Mapping[Outcome, int]]) -> None:
        """``ended`` returns the number of runs that have ended, by outcome."""
        self._ended = ended

    def collect(self) -> Iterator[Metric]:
        """Read the numbers."""
        runs = CounterMetricFamily(
            "quartet_agent_runs", "Runs of the agent that have ended, by outcome.", labels=("outcome",)
        )
        for outcome, count in self._ended().items():
            runs.add_metric((outcome,), count)
        yield runs


def _other_kind(method: str) -> MismatchError:
    return MismatchError(f"{method}: this service has agents, and no environments; set its environment.kind to class")
