"""Agents over the wire: the client and the service, cancelled calls, many at once, and a service that dies."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from quartet.config.agent import AgentConfig
from quartet.config.deployment import RecoveryConfig, TimeoutsConfig
from quartet.contract.agent import AgentResult, AgentRun, new_session_key
from quartet.contract.status import Role
from quartet.contract.trajectory import Outcome
from quartet.environments.agents import AgentHost
from quartet.errors import Cancelled, MismatchError, QuartetError, ServiceUnavailable
from quartet.rpc.agent_client import MAX_LOSSES, AgentClient
from quartet.rpc.clients import EnvironmentStatusClient
from quartet.rpc.environment_client import EnvironmentClient
from quartet.rpc.limits import agent_limits
from quartet.rpc.server import Server
from quartet.services.environment.agents.servicer import AgentServicer
from quartet.v1 import environment_pb2, environment_pb2_grpc
from tests.environments.policy_endpoint import PolicyEndpoint
from tests.environments.test_agents import COMMAND, FUNCTIONS, processes, run, settings, shell
from tests.fuzz.environment import config_tree, service_process
from tests.waiting import LIMIT, wait_until

TIMEOUTS = TimeoutsConfig(load_seconds=20, score_seconds=20)
RECOVERY = RecoveryConfig(backoff_seconds=0.05)
End = AgentResult | QuartetError


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def connect(stack: ExitStack) -> Callable[..., AgentClient]:
    """Factory of clients of an address."""

    def start(address: str, seconds: float = 60, timeouts: TimeoutsConfig = TIMEOUTS, **arguments: Any) -> AgentClient:
        return stack.enter_context(closing(AgentClient(address, seconds, timeouts, RECOVERY, **arguments)))

    return start


def serve(stack: ExitStack, listen: str = "127.0.0.1:0", **agent: Any) -> tuple[Server, AgentHost]:
    host = AgentHost(settings(**agent))
    limits = agent_limits(agent.get("max_concurrent", 64))
    server = Server([AgentServicer(host, 1)], listen, bind_seconds=10, limits=limits)
    stack.callback(lambda: server.stop(0))
    return server, host


def end_of(client: AgentClient, started: AgentRun) -> End:
    ends: queue.SimpleQueue[End] = queue.SimpleQueue()
    client.start(started, ends.put)
    return ends.get(timeout=LIMIT)


def test_an_agent_over_the_wire(stack: ExitStack, connect: Callable[..., AgentClient]) -> None:
    endpoint = stack.enter_context(closing(PolicyEndpoint()))
    server, _ = serve(stack, command=COMMAND)
    result = end_of(connect(server.address), run(endpoint.url, text="hi"))
    assert result == AgentResult(2.0, logged={"text": "HI", "seed": 7})


def test_a_result_without_a_reward_is_a_failure_if_nothing_else_scores(
    stack: ExitStack, connect: Callable[..., AgentClient]
) -> None:
    server, _ = serve(stack, command=shell("true"))
    assert end_of(connect(server.address), run()) == AgentResult()
    result = end_of(connect(server.address, needs_reward=True), run())
    assert isinstance(result, AgentResult)
    assert (result.outcome, result.lost) == (Outcome.ENVIRONMENT_ERROR, False)
    assert "the agent gave no reward, and reward.source none has none either" in result.detail


def test_a_cancelled_run_and_a_closed_client_end_the_agent(
    stack: ExitStack, connect: Callable[..., AgentClient]
) -> None:
    marker = f"600.{time.monotonic_ns()}"
    server, host = serve(stack, command=shell(f"sleep {marker}"))
    client, ends = connect(server.address), queue.SimpleQueue()
    cancel = client.start(run(), ends.put)
    client.start(run(session="r/1/2/3/2"), ends.put)
    wait_until(lambda: len(processes(marker)) >= 4)
    cancel()
    wait_until(lambda: len(processes(marker)) == 2)
    assert ends.empty()
    client.close()
    wait_until(lambda: processes(marker) == [])
    assert isinstance(ends.get(timeout=LIMIT), Cancelled)
    wait_until(lambda: host.ended[Outcome.CANCELLED] == 2)
    assert ends.empty()


def test_an_agent_ends_with_the_deadline_of_its_call(stack: ExitStack) -> None:
    marker = f"600.{time.monotonic_ns()}"
    server, _ = serve(stack, command=shell(f"sleep {marker}"))
    with grpc.insecure_channel(server.address) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        request = environment_pb2.RunAgentRequest(
            session="s", base_url="http://127.0.0.1:9/v1", api_key=new_session_key(), model="m"
        )
        with pytest.raises(grpc.RpcError) as error:
            stub.RunAgent(request, timeout=1)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: processes(marker) == [])


def test_two_hundred_agents_at_once_and_a_status_meanwhile(
    stack: ExitStack, connect: Callable[..., AgentClient], tmp_path: Path
) -> None:
    server, _ = serve(stack, function=f"{FUNCTIONS}:as_told", max_concurrent=200)
    proceed = tmp_path / "proceed"
    client, ends = connect(server.address), queue.SimpleQueue()
    for number in range(200):
        fields = {"until": str(proceed), "return": number}
        client.start(run(session=f"r/1/{number}/0/1", **fields), lambda end: ends.put(end))
    status = EnvironmentStatusClient(server.address, TIMEOUTS)
    stack.callback(status.close)
    wait_until(lambda: status.wait_until_ready().open_sessions == 200)
    proceed.touch()
    results = [ends.get(timeout=LIMIT) for _ in range(200)]
    assert sorted(result.reward for result in results) == list(range(200))


def test_runs_wait_for_room(stack: ExitStack, connect: Callable[..., AgentClient]) -> None:
    server, host = serve(stack, function=f"{FUNCTIONS}:as_told", max_concurrent=2)
    client, ends = connect(server.address), queue.SimpleQueue()
    for number in range(6):
        client.start(run(session=f"r/1/{number}/0/1", wait=0.2), ends.put)
    # One that waits can be cancelled, too.
    client.start(run(session="r/1/9/0/1", wait=0.2), ends.put)()
    assert [ends.get(timeout=LIMIT) for _ in range(6)] == [AgentResult()] * 6
    assert host.ended[Outcome.OK] == 6


def test_an_agent_that_ends_its_process_is_lost_and_then_fails(
    stack: ExitStack, connect: Callable[..., AgentClient]
) -> None:
    server, _ = serve(stack, function=f"{FUNCTIONS}:as_told")
    client = connect(server.address)
    for attempt in range(1, MAX_LOSSES + 1):
        result = end_of(client, run(end=3))
        assert isinstance(result, AgentResult)
        assert (result.outcome, result.lost) == (Outcome.ENVIRONMENT_ERROR, attempt < MAX_LOSSES)
        assert "ended with status 3" in result.detail
    # Other sessions are not affected.
    assert end_of(client, run(session="another", **{"return": 1})) == AgentResult(1.0)


def test_a_service_of_the_other_kind_is_an_error(stack: ExitStack, connect: Callable[..., AgentClient]) -> None:
    server, _ = serve(stack, command=shell("true"))
    client = EnvironmentClient(server.address, 5.0, TIMEOUTS, RECOVERY)
    stack.callback(client.close)
    with pytest.raises(MismatchError, match="this service has agents, and no environments"):
        client.reset("s", 1, "", np.array([1], np.int32))
    empty = Server([], "127.0.0.1:0")
    stack.callback(lambda: empty.stop(0))
    assert isinstance(end_of(connect(empty.address), run()), MismatchError)


def agent_service_config(folder: Path, redis_url: str, agent: dict[str, Any]) -> dict[str, Any]:
    config = config_tree(folder, redis_url)
    config["rollout"]["max_turns"] = 4
    config["environment"] = {"kind": "agent", "agent": agent}
    return config


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_service_leaves_no_agent_and_its_runs_are_lost(
    tmp_path: Path, redis_url: str, connect: Callable[..., AgentClient]
) -> None:
    marker = f"600.{time.monotonic_ns()}"
    # The shell, its child, and a process in another session.
    agent = {"command": shell(f"setsid sleep {marker} & sleep {marker}; true")}
    with service_process(tmp_path, agent_service_config(tmp_path, redis_url, agent), [Role.ENVIRONMENT]) as (
        pid,
        ready,
    ):
        timeouts = TimeoutsConfig(load_seconds=1, score_seconds=20)
        client, ends = connect(ready()["address"], timeouts=timeouts), queue.SimpleQueue()
        client.start(run(), ends.put)
        wait_until(lambda: len(processes(marker)) >= 3)
        os.kill(pid, signal.SIGKILL)
        lost = ends.get(timeout=LIMIT)
        assert isinstance(lost, AgentResult)
        assert (lost.outcome, lost.lost) == (Outcome.ENVIRONMENT_ERROR, True)
        wait_until(lambda: processes(marker) == [])
        # A service that stays away is a failure of the agent in the end.
        wait_until(lambda: not end_of(client, run()).lost)  # type: ignore[union-attr]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_caller_leaves_no_agent(stack: ExitStack) -> None:
    marker = f"600.{time.monotonic_ns()}"
    server, _ = serve(stack, command=shell(f"sleep {marker}"))
    program = (
        "import sys, time\n"
        "from quartet.config.deployment import RecoveryConfig, TimeoutsConfig\n"
        "from quartet.contract.agent import AgentRun\n"
        "from quartet.rpc.agent_client import AgentClient\n"
        "client = AgentClient(sys.argv[1], 60, TimeoutsConfig(), RecoveryConfig())\n"
        "client.start(AgentRun('s', 1, '', 'http://127.0.0.1:9/v1', 'k' * 20, 'm'), print)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, server.address]) as caller:
        wait_until(lambda: len(processes(marker)) >= 2)
        caller.kill()
    wait_until(lambda: processes(marker) == [])


def test_a_service_that_is_stopped_ends_its_agents(
    tmp_path: Path, redis_url: str, connect: Callable[..., AgentClient]
) -> None:
    marker = f"600.{time.monotonic_ns()}"
    config = agent_service_config(tmp_path, redis_url, {"command": shell(f"sleep {marker}")})
    config["timeouts"] = {"drain_seconds": 0.2}
    with service_process(tmp_path, config, [Role.ENVIRONMENT]) as (pid, ready):
        client, ends = connect(ready()["address"]), queue.SimpleQueue()
        client.start(run(), ends.put)
        wait_until(lambda: len(processes(marker)) >= 2)
        os.kill(pid, signal.SIGTERM)
        result = ends.get(timeout=LIMIT)
        assert isinstance(result, AgentResult)
        assert result.outcome is not Outcome.OK
        wait_until(lambda: processes(marker) == [])


def test_agents_get_an_address_that_they_can_call(connect: Callable[..., AgentClient]) -> None:
    client = connect("localhost:9")
    assert client.endpoint_url(AgentConfig(), "127.0.0.1:80", encrypted=False) == "http://127.0.0.1:80/v1"
    # The address of this machine from which the service is reached.
    assert client.endpoint_url(AgentConfig(), "0.0.0.0:80", encrypted=True) in (
        "https://127.0.0.1:80/v1",
        "https://[::1]:80/v1",
    )
    agent = AgentConfig(advertise="policy.example:443")
    assert client.endpoint_url(agent, "0.0.0.0:80", encrypted=True) == "https://policy.example:443/v1"
    with pytest.raises(ServiceUnavailable, match=r"set environment\.agent\.advertise"):
        connect("no-such-host.invalid:9").endpoint_url(AgentConfig(), "0.0.0.0:80", encrypted=False)
