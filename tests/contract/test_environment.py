"""Messages of EnvironmentService: round trips, and what they refuse."""

from __future__ import annotations

import math
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from quartet.codec.environment import (
    MAX_STATE_CHARACTERS,
    EnvironmentReset,
    EnvironmentRestore,
    EnvironmentStep,
    agent_result_from_proto,
    agent_result_to_proto,
    agent_run_from_proto,
    checked_session,
    environment_reply_from_proto,
    environment_reply_to_proto,
    environment_reset_from_proto,
    environment_restore_from_proto,
    environment_step_from_proto,
)
from quartet.codec.messages import to_message
from quartet.contract.agent import HIDDEN_KEY, AgentResult, AgentRun, new_session_key, without_keys
from quartet.contract.trajectory import FAILURES, EnvironmentReply, Outcome
from quartet.errors import ComputationFailed, InvalidRequest
from quartet.v1 import environment_pb2
from tests.contract.strategies import float32, ints, names
from tests.contract.test_codec import assert_same

printable = st.characters(categories=("L", "N", "P"))
sessions = st.text(printable, min_size=1, max_size=100)
tokens = st.integers(1, 9).flatmap(ints)
resets = st.builds(EnvironmentReset, sessions, st.integers(0, 2**63 - 1), names, tokens)
steps = st.builds(EnvironmentStep, sessions, st.integers(1, 1_000_000), tokens)
restores = st.builds(
    EnvironmentRestore,
    *(sessions, st.integers(0, 2**63 - 1), names, tokens, st.integers(0, 1_000_000), st.text(min_size=1, max_size=100)),
)
observations = st.integers(0, 9).flatmap(ints)
replies = (
    st.builds(EnvironmentReply, observations, float32, st.booleans())
    | st.builds(EnvironmentReply, observations, float32, st.just(False), state=st.text(max_size=100))
    | st.builds(
        EnvironmentReply,
        st.just(np.zeros(0, np.int32)),
        float32,
        st.just(False),
        prompt=st.integers(1, 9).flatmap(ints),
    )
)
failures = st.builds(EnvironmentReply.failed, st.sampled_from(FAILURES), st.text(printable, max_size=100))


@given(resets)
def test_resets_survive_the_wire(reset: EnvironmentReset) -> None:
    assert_same(environment_reset_from_proto(to_message(environment_pb2.ResetRequest, reset)), reset)


@given(steps)
def test_steps_survive_the_wire(step: EnvironmentStep) -> None:
    assert_same(environment_step_from_proto(to_message(environment_pb2.StepRequest, step)), step)


@given(restores)
def test_restores_survive_the_wire(restore: EnvironmentRestore) -> None:
    message = to_message(environment_pb2.RestoreSessionRequest, restore)
    assert_same(environment_restore_from_proto(message), restore)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("state", "", "state: empty"),
        ("state", "x" * (MAX_STATE_CHARACTERS + 1), "state: 1,048,577 characters"),
        ("turn", 1_000_001, "turn 1000001"),
        ("seed", 2**63, "seed 9223372036854775808"),
        ("session", "", "session: expected 1 to 512"),
    ],
)
def test_restores_outside_the_limits_are_refused(field: str, value: object, expected: str) -> None:
    restore = EnvironmentRestore("s", 1, "", np.array([1], np.int32), 2, "{}")
    message = to_message(environment_pb2.RestoreSessionRequest, restore)
    setattr(message, field, value)
    with pytest.raises(InvalidRequest, match=expected):
        environment_restore_from_proto(message)


def test_an_episode_that_is_over_has_no_state() -> None:
    with pytest.raises(ComputationFailed, match="state: expected none at the end"):
        EnvironmentReply(np.zeros(0, np.int32), 0.0, True, state="{}")


@given(replies)
def test_replies_survive_the_wire(reply: EnvironmentReply) -> None:
    assert_same(
        environment_reply_from_proto(environment_reply_to_proto(environment_pb2.StepResponse, reply).reply), reply
    )


@pytest.mark.parametrize(("prompt", "observation", "done"), [((), (), False), ((1,), (2,), False), ((1,), (), True)])
def test_a_prompt_that_contradicts_its_reply_is_refused(
    prompt: tuple[int, ...], observation: tuple[int, ...], done: bool
) -> None:
    message = to_message(
        environment_pb2.EnvironmentReply,
        EnvironmentReply(np.array(observation, np.int32), 0.0, done),
        prompt=np.array(prompt, np.int32),
    )
    with pytest.raises(InvalidRequest, match="prompt: expected at least one token, without an observation, and not at"):
        environment_reply_from_proto(message)


def test_a_prompt_has_ids_of_the_vocabulary() -> None:
    reply = EnvironmentReply(np.zeros(0, np.int32), 0.0, False, prompt=np.array([1, 9], np.int32))
    message = environment_reply_to_proto(environment_pb2.StepResponse, reply).reply
    assert environment_reply_from_proto(message, 10).same_answer(reply)
    with pytest.raises(InvalidRequest, match=r"prompt: expected ids in 0\.\.8, got 1 to 9"):
        environment_reply_from_proto(message, 9)


@given(failures)
def test_failures_survive_the_wire(reply: EnvironmentReply) -> None:
    result = environment_reply_from_proto(environment_reply_to_proto(environment_pb2.ResetResponse, reply).reply)
    assert (result.outcome, result.detail, result.done) == (reply.outcome, reply.detail, True)
    assert math.isnan(result.reward)
    assert len(result.observation) == 0


def test_a_detail_is_cut_and_cleaned() -> None:
    reply = EnvironmentReply.failed(Outcome.TIMEOUT, "a\nb" + "x" * 5000)
    message = environment_reply_to_proto(environment_pb2.StepResponse, reply).reply
    assert len(message.detail) == 1024
    detail = environment_reply_from_proto(message).detail
    assert (len(detail), detail[:4]) == (1024, "a bx")


def test_a_session_has_a_name() -> None:
    assert checked_session("r/1/2/3/1") == "r/1/2/3/1"
    with pytest.raises(InvalidRequest, match="session: expected 1 to 512 printable characters, got 0"):
        checked_session("")


NONE = np.zeros(0, np.int32)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((NONE, math.nan, False), "reward: nan with outcome ok"),
        ((NONE, math.inf, False), "reward: inf with outcome ok"),
        ((NONE, 0.0, True, Outcome.TIMEOUT), "reward: 0 with outcome timeout"),
        ((NONE, math.inf, True, Outcome.TIMEOUT), "reward: inf with outcome timeout"),
        ((NONE, math.nan, False, Outcome.TIMEOUT), "outcome timeout: expected no observation, and done"),
        ((np.ones(1, np.int32), math.nan, True, Outcome.TIMEOUT), "expected no observation, and done"),
    ],
)
def test_a_failure_cannot_be_a_number_nor_a_number_a_failure(arguments: tuple[object, ...], expected: str) -> None:
    with pytest.raises(ComputationFailed, match=expected):
        EnvironmentReply(*arguments)  # type: ignore[arg-type]


keys = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=16, max_size=50)
runs = st.builds(
    AgentRun, sessions, st.integers(0, 2**63 - 1), names, st.just("https://[::1]:80/v1"), keys, st.just("policy")
)
RUN = AgentRun("r/1/2/3/1", 7, "{}", "http://127.0.0.1:80/v1", new_session_key(), "policy")


@given(runs)
def test_runs_of_agents_survive_the_wire(run: AgentRun) -> None:
    assert agent_run_from_proto(to_message(environment_pb2.RunAgentRequest, run)) == run
    assert RUN.api_key not in repr(RUN)


@given(st.one_of(st.none(), float32), st.sampled_from(({}, {"steps": 3.0, "solved": True, "why": "é"})))
def test_results_of_agents_survive_the_wire(reward: float | None, logged: dict[str, object]) -> None:
    result = AgentResult(reward, logged=logged)
    assert agent_result_from_proto(agent_result_to_proto(result)) == result


@pytest.mark.parametrize("outcome", FAILURES)
def test_failures_of_agents_survive_the_wire(outcome: Outcome) -> None:
    result = AgentResult.failed(outcome, "why\n" * 1000)
    arrived = agent_result_from_proto(agent_result_to_proto(result))
    assert (arrived.reward, arrived.outcome, len(arrived.detail)) == (None, outcome, 1024)
    assert arrived.detail.isprintable()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"session": ""}, "session"),
        ({"seed": 2**63}, "seed"),
        ({"base_url": "ftp://host"}, "base_url: expected http"),
        ({"base_url": "http:///v1"}, "base_url: expected http"),
        ({"base_url": f"http://{'h' * 3000}"}, "base_url: expected http"),
        ({"api_key": "short"}, "api_key: expected 16 to 512"),  # pragma: allowlist secret
        ({"api_key": "k" * 20 + " x"}, "api_key: expected 16 to 512"),
        ({"model": ""}, "model: expected 1 to 512"),
    ],
)
def test_a_malformed_run_is_refused_without_its_key(changes: dict[str, object], expected: str) -> None:
    message = to_message(environment_pb2.RunAgentRequest, replace(RUN, **changes))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=expected) as error:
        agent_run_from_proto(message)
    assert message.api_key not in str(error.value)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (environment_pb2.RunAgentResponse(reward=math.nan, outcome=1), InvalidRequest),
        (environment_pb2.RunAgentResponse(reward=1.0, outcome=2), InvalidRequest),
        (environment_pb2.RunAgentResponse(reward=1.0), InvalidRequest),
        (environment_pb2.RunAgentResponse(outcome=1, logged="[1]"), InvalidRequest),
        (environment_pb2.RunAgentResponse(outcome=1, logged='{"a": {}}'), InvalidRequest),
    ],
)
def test_a_malformed_result_is_refused(message: environment_pb2.RunAgentResponse, error: type[Exception]) -> None:
    with pytest.raises(error):
        agent_result_from_proto(message)


def test_keys_are_hidden_wherever_they_are() -> None:
    key = new_session_key()
    assert len(key) > 40
    assert without_keys(f"a {key}, and {new_session_key()}!") == f"a {HIDDEN_KEY}, and {HIDDEN_KEY}!"
    assert without_keys("another form", "form") == f"another {HIDDEN_KEY}"
