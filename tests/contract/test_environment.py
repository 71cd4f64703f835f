"""Messages of EnvironmentService: round trips, and what they refuse."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from quartet.codec.environment import (
    EnvironmentReset,
    EnvironmentStep,
    checked_session,
    environment_reply_from_proto,
    environment_reply_to_proto,
    environment_reset_from_proto,
    environment_step_from_proto,
)
from quartet.codec.messages import to_message
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
replies = st.builds(EnvironmentReply, st.integers(0, 9).flatmap(ints), float32, st.booleans())
failures = st.builds(EnvironmentReply.failed, st.sampled_from(FAILURES), st.text(printable, max_size=100))


@given(resets)
def test_resets_survive_the_wire(reset: EnvironmentReset) -> None:
    assert_same(environment_reset_from_proto(to_message(environment_pb2.ResetRequest, reset)), reset)


@given(steps)
def test_steps_survive_the_wire(step: EnvironmentStep) -> None:
    assert_same(environment_step_from_proto(to_message(environment_pb2.StepRequest, step)), step)


@given(replies)
def test_replies_survive_the_wire(reply: EnvironmentReply) -> None:
    assert_same(
        environment_reply_from_proto(environment_reply_to_proto(environment_pb2.StepResponse, reply).reply), reply
    )


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
