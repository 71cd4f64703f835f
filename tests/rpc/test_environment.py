"""The environment service and its client: lost connections and sessions, faults of foreign services, limits."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from quartet.config.deployment import RecoveryConfig, TimeoutsConfig
from quartet.contract.status import Role
from quartet.contract.trajectory import EnvironmentReply, Outcome
from quartet.contract.turn_record import EpisodeDiffers
from quartet.environments.host import EnvironmentHost
from quartet.errors import Cancelled, FailedPrecondition, MismatchError
from quartet.rpc.clients import EnvironmentStatusClient
from quartet.rpc.environment_client import EnvironmentClient
from quartet.rpc.server import Server
from quartet.services.environment.servicer import EnvironmentServicer
from quartet.v1 import environment_pb2, environment_pb2_grpc
from tests.contract.tensors import tensor_message
from tests.environments.test_host import PROMPT, events, ids, text
from tests.waiting import LIMIT, wait_until

TIMEOUTS = TimeoutsConfig(load_seconds=20, score_seconds=20)
RECOVERY = RecoveryConfig(backoff_seconds=0.05)
Connect = Callable[..., EnvironmentClient]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def connect(stack: ExitStack) -> Connect:
    """Factory of clients of an address."""

    def start(address: str, timeouts: TimeoutsConfig = TIMEOUTS, **arguments: Any) -> EnvironmentClient:
        client = EnvironmentClient(address, 5.0, timeouts, RECOVERY, **arguments)
        stack.callback(client.close)
        return client

    return start


def serve(stack: ExitStack, played: EnvironmentHost, listen: str = "127.0.0.1:0") -> Server:
    server = Server([EnvironmentServicer(played, 1)], listen, bind_seconds=10)
    stack.callback(lambda: server.stop(0))
    return server


def test_an_episode_over_the_wire(host: Callable[..., EnvironmentHost], connect: Connect, stack: ExitStack) -> None:
    client = connect(serve(stack, host(arguments={"turns": 2})).address)
    draw = random.Random(7)
    assert text(client.reset("r/1/2/3/1", 7, '{"word": "cat"}', PROMPT)) == f"cat {draw.randrange(10**6)}"
    second = client.step("r/1/2/3/1", 1, ids("hello"))
    assert (text(second), second.reward, second.done) == (f"hello {draw.randrange(10**6)}", 0.25, False)
    assert client.step("r/1/2/3/1", 1, ids("hello")) is second
    third = client.step("r/1/2/3/1", 2, ids("bye"))
    assert (len(third.observation), third.reward, third.done, third.outcome) == (0, 0.5, True, Outcome.OK)


def test_a_failure_keeps_its_outcome_and_cause_over_the_wire(
    host: Callable[..., EnvironmentHost], connect: Connect, stack: ExitStack
) -> None:
    client = connect(serve(stack, host()).address)
    client.reset("s", 1, "", PROMPT)
    reply = client.step("s", 1, ids("refuse"))
    assert (reply.outcome, reply.done) == (Outcome.REFUSED, True)
    assert math.isnan(reply.reward)
    assert reply.detail == "worlds:Echo: declined"


def test_an_episode_continues_when_its_service_is_replaced(
    host: Callable[..., EnvironmentHost],
    connect: Connect,
    stack: ExitStack,
    folder: Path,
) -> None:
    expected = host()
    first = serve(ExitStack(), host())
    client = connect(first.address)
    for played in (expected, client):
        played.reset("s", 5, "", PROMPT)
        played.step("s", 1, ids("a"))
    first.stop(0)
    replies: list[EnvironmentReply] = []
    waiting = threading.Thread(target=lambda: replies.append(client.step("s", 2, ids("b"))))
    waiting.start()
    second = serve(stack, host(), first.address)
    waiting.join(LIMIT)
    assert second.address == first.address
    assert text(replies[0]) == text(expected.step("s", 2, ids("b")))
    assert events(folder).count("reset") == 3


def test_an_episode_continues_after_another_one_has_killed_their_worker(
    host: Callable[..., EnvironmentHost], connect: Connect, stack: ExitStack
) -> None:
    client, expected = connect(serve(stack, host()).address), host()
    for played in (client, expected):
        played.reset("a", 5, "", PROMPT)
        played.step("a", 1, ids("x"))
    client.reset("b", 5, "", PROMPT)
    assert client.step("b", 1, ids("killed")).outcome is Outcome.ENVIRONMENT_ERROR
    assert text(client.step("a", 2, ids("y"))) == text(expected.step("a", 2, ids("y")))


def test_a_lost_session_with_a_state_is_restored_and_no_turn_repeated(
    host: Callable[..., EnvironmentHost], connect: Connect, stack: ExitStack, folder: Path
) -> None:
    client, expected = connect(serve(stack, host("Saved")).address), host("Saved")
    for played in (client, expected):
        played.reset("a", 5, "", PROMPT)
        played.step("a", 1, ids("x"))
    client.reset("b", 5, "", PROMPT)
    client.step("b", 1, ids("killed"))
    before = len(events(folder))
    assert text(client.step("a", 2, ids("y"))) == text(expected.step("a", 2, ids("y")))
    assert events(folder)[before:] == ["restore", "step", "step"]


@pytest.mark.parametrize("name", ["Saved", "Echo"])
def test_an_episode_of_another_client_continues(
    name: str, host: Callable[..., EnvironmentHost], connect: Connect, stack: ExitStack, folder: Path
) -> None:
    address = serve(stack, host(name)).address
    first, second = connect(address), connect(address)
    turns = [ids("x"), ids("y")]
    replies = [first.reset("a", 5, "", PROMPT), first.step("a", 1, turns[0]), first.step("a", 2, turns[1])]
    before = len(events(folder))
    assert second.resume("b", 5, "", PROMPT, turns, replies) is replies[-1]
    assert events(folder)[before:] == (["restore"] if name == "Saved" else ["reset", "step", "step"])
    assert text(second.step("b", 3, ids("z"))) == text(first.step("a", 3, ids("z")))


def test_an_episode_that_continues_otherwise_than_before_is_reported(
    host: Callable[..., EnvironmentHost], connect: Connect, stack: ExitStack
) -> None:
    client = connect(serve(stack, host()).address)
    replies = [client.reset("a", 5, "", PROMPT), client.step("a", 1, ids("x"))]
    with pytest.raises(EpisodeDiffers, match="turn 0 gave another answer"):
        client.resume("b", 6, "", PROMPT, [ids("x")], replies)


def test_a_failure_while_an_episode_continues_is_an_outcome(
    host: Callable[..., EnvironmentHost], connect: Connect, stack: ExitStack
) -> None:
    client = connect(serve(stack, host("BadRestore")).address)
    first = client.reset("a", 5, "", PROMPT)
    reply = client.resume("b", 5, "", PROMPT, [], [first])
    assert reply.outcome is Outcome.ENVIRONMENT_ERROR
    assert "the environment failed after turn 0: worlds:BadRestore: raised ValueError" in reply.detail


def test_a_service_that_cannot_restore_repeats(
    host: Callable[..., EnvironmentHost], connect: Connect, stack: ExitStack, folder: Path
) -> None:
    client = connect(serve(stack, host("Saved")).address)
    client._stub.RestoreSession = client._channel.grpc_channel.unary_unary(
        "/quartet.v1.EnvironmentService/Missing",
        request_serializer=environment_pb2.RestoreSessionRequest.SerializeToString,
        response_deserializer=environment_pb2.RestoreSessionResponse.FromString,
    )
    replies = [client.reset("a", 5, "", PROMPT), client.step("a", 1, ids("x"))]
    client.resume("b", 5, "", PROMPT, [ids("x")], replies)
    assert "restore" not in events(folder)
    assert text(client.step("b", 2, ids("y"))) == text(client.step("a", 2, ids("y")))


def test_a_repeated_session_that_differs_is_an_environment_error(
    host: Callable[..., EnvironmentHost], connect: Connect, stack: ExitStack
) -> None:
    client = connect(serve(stack, host("Unsteady")).address)
    for session in ("a", "b"):
        client.reset(session, 5, "", PROMPT)
    client.step("a", 1, ids("x"))
    client.step("b", 1, ids("killed"))
    reply = client.step("a", 2, ids("y"))
    assert reply.outcome is Outcome.ENVIRONMENT_ERROR
    assert (
        "turn 1 gave another answer when a lost session was repeated; the environment is not deterministic"
        in reply.detail
    )


def test_a_session_that_ended_is_closed_at_the_service(
    host: Callable[..., EnvironmentHost], connect: Connect, stack: ExitStack
) -> None:
    played = host()
    client = connect(serve(stack, played).address)
    client.reset("s", 1, "", PROMPT)
    client.end("s")
    client.end("s")
    wait_until(lambda: played.status().open_sessions == 0)
    with pytest.raises(FailedPrecondition, match="session s is not open"):
        client.step("s", 1, ids("a"))


def test_a_call_waits_for_a_free_session(
    host: Callable[..., EnvironmentHost], connect: Connect, stack: ExitStack
) -> None:
    client = connect(serve(stack, host(max_sessions=1)).address)
    client.reset("a", 1, "", PROMPT)
    replies: list[EnvironmentReply] = []
    waiting = threading.Thread(target=lambda: replies.append(client.reset("b", 1, "", PROMPT)))
    waiting.start()
    client.end("a")
    waiting.join(LIMIT)
    assert replies[0].outcome is Outcome.OK


def test_a_dead_service_is_an_outcome_at_once_after_the_first_wait(connect: Connect) -> None:
    client = connect("127.0.0.1:9", TimeoutsConfig(load_seconds=0.5, score_seconds=20))
    first = client.reset("a", 1, "", PROMPT)
    start = time.monotonic()
    second = client.reset("b", 1, "", PROMPT)
    assert time.monotonic() - start < 5
    for reply in (first, second):
        assert (reply.outcome, reply.done) == (Outcome.ENVIRONMENT_ERROR, True)
        assert "environment at 127.0.0.1:9: Reset: unavailable" in reply.detail


def test_closing_the_client_ends_a_waiting_call(connect: Connect) -> None:
    client, errors = connect("127.0.0.1:9"), []

    def reset() -> None:
        try:
            client.reset("a", 1, "", PROMPT)
        except Cancelled as error:
            errors.append(error)

    waiting = threading.Thread(target=reset)
    waiting.start()
    client.close()
    waiting.join(LIMIT)
    assert len(errors) == 1


Reply = environment_pb2.EnvironmentReply


class Foreign(environment_pb2_grpc.EnvironmentServiceServicer):
    """A service in the terms of environment.proto only, whose answers a test chooses."""

    def __init__(self, answers: list[Any], stack: ExitStack) -> None:
        """``answers`` to the calls in order, the last one repeatedly: a reply, or a function of the context."""
        self.answers, self.calls = answers, 0
        server = grpc.server(ThreadPoolExecutor(4))
        environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(self, server)
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        stack.callback(lambda: server.stop(0).wait())

    def Reset(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer = self.answers[min(self.calls, len(self.answers) - 1)]
        self.calls += 1
        return environment_pb2.ResetResponse(reply=answer(context) if callable(answer) else answer)


def reply(ids_: list[int] | None = None, **fields: Any) -> Reply:
    values = {"outcome": 1, "observation": tensor_message(np.array(ids_ or [], np.int32)), **fields}
    return Reply(**values)


def abort(code: grpc.StatusCode) -> Callable[[grpc.ServicerContext], Reply]:
    def answer(context: grpc.ServicerContext) -> Reply:
        context.abort(code, "on purpose")
        raise AssertionError

    return answer


def hang(context: grpc.ServicerContext) -> Reply:
    while context.is_active():
        time.sleep(0.01)
    return reply()


def crash(context: grpc.ServicerContext) -> Reply:
    raise RuntimeError("on purpose")


FAULTS: dict[str, tuple[Any, Outcome, str]] = {
    "hang": (hang, Outcome.TIMEOUT, "no response within 2 s"),
    "error": (crash, Outcome.ENVIRONMENT_ERROR, "on purpose"),
    "aborted": (abort(grpc.StatusCode.ABORTED), Outcome.ENVIRONMENT_ERROR, "on purpose"),
    "unavailable": (abort(grpc.StatusCode.UNAVAILABLE), Outcome.ENVIRONMENT_ERROR, "unavailable (on purpose)"),
    "cut": (abort(grpc.StatusCode.CANCELLED), Outcome.TIMEOUT, "cancelled by the service"),
    "full": (abort(grpc.StatusCode.RESOURCE_EXHAUSTED), Outcome.ENVIRONMENT_ERROR, "on purpose"),
    "refuses": (abort(grpc.StatusCode.INVALID_ARGUMENT), Outcome.ENVIRONMENT_ERROR, "on purpose"),
    "NaN": (reply(reward=math.nan), Outcome.ENVIRONMENT_ERROR, "reward: nan with outcome ok"),
    "infinity": (reply(reward=math.inf), Outcome.ENVIRONMENT_ERROR, "reward: inf with outcome ok"),
    "number": (reply(outcome=5, reward=0, done=True), Outcome.ENVIRONMENT_ERROR, "reward: 0 with outcome environment"),
    "not done": (reply(outcome=5, reward=math.nan), Outcome.ENVIRONMENT_ERROR, "expected no observation, and done"),
    "no outcome": (reply(outcome=0), Outcome.ENVIRONMENT_ERROR, "outcome 0: unknown, expected ok, timeout"),
    "empty": (Reply(), Outcome.ENVIRONMENT_ERROR, "observation: expected dtype int32, got none"),
    "ids": (reply([3, 100]), Outcome.ENVIRONMENT_ERROR, "observation: expected ids in 0..99, got 3 to 100"),
    "negative": (reply([-1]), Outcome.ENVIRONMENT_ERROR, "observation: expected ids in 0..99, got -1 to -1"),
    "floats": (
        Reply(outcome=1, observation=tensor_message(np.zeros(1, np.float32))),
        Outcome.ENVIRONMENT_ERROR,
        "observation: expected dtype int32, got float32",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_service_is_an_outcome_and_never_a_reward(fault: str, connect: Connect, stack: ExitStack) -> None:
    answer, outcome, detail = FAULTS[fault]
    seconds = 1 if fault in ("hang", "full") else 20
    timeouts = TimeoutsConfig(load_seconds=0.3, score_seconds=seconds)
    client = EnvironmentClient(Foreign([answer], stack).address, seconds, timeouts, RECOVERY, vocabulary_size=100)
    stack.callback(client.close)
    result = client.reset("s", 1, "", PROMPT)
    assert (result.outcome, result.done, len(result.observation)) == (outcome, True, 0)
    assert math.isnan(result.reward)
    assert detail in result.detail


@pytest.mark.parametrize("fault", ["error", "unavailable", "aborted", "NaN", "full"])
def test_a_fault_that_passes_leaves_no_trace(fault: str, connect: Connect, stack: ExitStack) -> None:
    service = Foreign([FAULTS[fault][0], reply([5])], stack)
    result = connect(service.address).reset("s", 1, "", PROMPT)
    assert (result.outcome, result.observation.tolist(), result.reward, service.calls) == (Outcome.OK, [5], 0.0, 2)


def test_a_process_without_the_service_is_an_error(connect: Connect, stack: ExitStack) -> None:
    server = Server([], "127.0.0.1:0")
    stack.callback(lambda: server.stop(0))
    with pytest.raises(MismatchError, match="does not offer this method; check the address"):
        connect(server.address).reset("s", 1, "", PROMPT)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"session": ""}, "session: expected 1 to 512 printable characters, got 0"),
        ({"session": "s" * 513}, "session: expected 1 to 512 printable characters, got 513"),
        ({"session": "a\nb"}, "session: expected"),
        ({"seed": 2**63}, "seed 9223372036854775808: expected less than 2**63"),
        ({"token_ids": tensor_message(np.zeros(0, np.int32))}, "token_ids: empty"),
        ({"token_ids": tensor_message(np.array([-1], np.int32))}, "token_ids: expected 0 or more, got -1"),
        ({"token_ids": tensor_message(np.zeros(2, np.float32))}, "token_ids: expected dtype int32"),
        ({"fields": "[1]"}, "fields[0]: found list, expected a JSON object"),
    ],
)
def test_a_malformed_reset_is_refused(
    request_: dict[str, Any],
    expected: str,
    host: Callable[..., EnvironmentHost],
    stack: ExitStack,
) -> None:
    server = serve(stack, host())
    values = {"session": "s", "seed": 1, "token_ids": tensor_message(PROMPT), **request_}
    with grpc.insecure_channel(server.address) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Reset(environment_pb2.ResetRequest(**values), timeout=10)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert expected in refused.value.details()
        with pytest.raises(grpc.RpcError, match="turn 0: expected 1 to"):
            stub.Step(environment_pb2.StepRequest(session="s", token_ids=tensor_message(PROMPT)), timeout=10)


def test_the_status_of_the_service(host: Callable[..., EnvironmentHost], connect: Connect, stack: ExitStack) -> None:
    server = serve(stack, host())
    connect(server.address).reset("s", 1, "", PROMPT)
    client = EnvironmentStatusClient(server.address, TIMEOUTS)
    stack.callback(client.close)
    status = client.wait_until_ready()
    assert (status.role, status.model, status.open_sessions, status.threads) == (Role.ENVIRONMENT, "worlds:Echo", 1, 1)
    assert status.busy_seconds["reset"] > 0


def test_many_episodes_at_once(host: Callable[..., EnvironmentHost], connect: Connect, stack: ExitStack) -> None:
    client = connect(serve(stack, host(num_workers=2)).address)
    results: dict[int, list[str]] = {}

    def play(number: int) -> None:
        session = f"s{number}"
        replies = [client.reset(session, number % 4, "", PROMPT)]
        replies += [client.step(session, turn, ids("ab")) for turn in (1, 2)]
        client.end(session)
        results[number] = [text(each) for each in replies]

    threads = [threading.Thread(target=play, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 64
    for number in range(4):
        assert len({tuple(results[other]) for other in range(number, 64, 4)}) == 1


def test_a_step_with_other_tokens_than_before_is_refused(
    host: Callable[..., EnvironmentHost], connect: Connect, stack: ExitStack
) -> None:
    client = connect(serve(stack, host()).address)
    client.reset("s", 1, "", PROMPT)
    client.step("s", 1, ids("a"))
    with pytest.raises(FailedPrecondition, match="got turn 1, expected 2"):
        client.step("s", 1, ids("b"))
