"""Rewards of a Triton server: a real PyTriton server, and one with faults. `make engines` runs them."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tritonclient.grpc")

from quartet.config.loading import parse_config
from quartet.contract.trajectory import Outcome, TokenBatch
from quartet.errors import MismatchError, ServiceFailed
from quartet.rewards.factory import build_reward
from quartet.rewards.reward_source import RewardSource
from tests.engines.faulty_triton import faulty_triton
from tests.ports import free_port
from tests.rewards.scorers.faults import FAULTS, HANG_TIMEOUT, TIMEOUT, responses
from tests.unit.models import tiny
from tests.waiting import LIMIT

PYTHON = "QUARTET_PYTRITON_PYTHON"
"""Variable with the path of a Python that has nvidia-pytriton with its dependencies."""
START_SECONDS = 120.0
FAST: dict[str, Any] = {"timeout_seconds": TIMEOUT, "max_attempts": 2, "backoff_seconds": 0.001}
Build = Callable[..., RewardSource]
BATCH, SCORES, MARKED = responses().batch, responses().scores, responses().marked


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    with ExitStack() as stack:

        def start(url: str, **settings: Any) -> RewardSource:
            config = parse_config(
                {
                    "data": {"prompts": "prompts.jsonl"},
                    "actor": {"model": str(tmp_path / "tokenizer")},
                    "reward": {"source": "triton", "triton": {"url": url, **FAST, **settings}},
                },
                "test",
            )
            source = build_reward(config, "cpu")
            stack.callback(source.close)
            return source

        yield start


@pytest.mark.parametrize("fault", ["", *FAULTS])
@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_fault_is_an_outcome_of_the_responses_that_it_concerns(fault: str, batch_size: int, build: Build) -> None:
    with faulty_triton(fault) as url:
        source = build(url, batch_size=batch_size, timeout_seconds=HANG_TIMEOUT if fault == "hang" else TIMEOUT)
        if fault == "overloaded" and batch_size > 1:
            with pytest.raises(ServiceFailed, match=r"does not respond \(StatusCode.UNAVAILABLE\)"):
                source.score(BATCH)
            return
        scores = source.score(BATCH)
    if not fault:
        np.testing.assert_array_equal(scores.total, SCORES)
        return
    outcomes = [FAULTS[fault] if mark else Outcome.OK for mark in MARKED]
    assert list(scores.all_outcomes) == outcomes, scores.details
    assert np.isnan(scores.total[MARKED]).all(), "a failure became a number"
    np.testing.assert_array_equal(scores.total[~MARKED], SCORES[~MARKED])
    assert "secret" not in str(scores.details)


def test_a_model_that_the_server_does_not_have_is_a_mismatch(build: Build) -> None:
    with faulty_triton("") as url, pytest.raises(MismatchError, match=r"model other at .*: no such model"):
        build(url, model="other").score(BATCH)


@pytest.fixture(scope="module")
def pytriton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a PyTriton server, and yield its URL."""
    if PYTHON not in os.environ:
        pytest.skip(f"{PYTHON} is not set: run make engines")
    folder = tmp_path_factory.mktemp("pytriton")
    port = free_port()
    script = Path(__file__).with_name("pytriton_reward.py")
    # Its workspace has sockets, whose paths are short.
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [os.environ[PYTHON], str(script), str(free_port()), str(port), str(folder / "w")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        end = time.monotonic() + START_SECONDS
        while (line := process.stdout.readline()) != b"ready\n":
            assert line, (folder / "log").read_text()[-3000:]
            assert time.monotonic() < end, (folder / "log").read_text()[-3000:]
        yield f"grpc://127.0.0.1:{port}"
    finally:
        process.stdin.close()
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


@pytest.mark.parametrize("inputs", ["tokens", "sentences"])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_pytriton_scores_every_response(pytriton: str, inputs: str, batch_size: int, build: Build) -> None:
    scores = build(pytriton, inputs=inputs, batch_size=batch_size).score(BATCH)
    assert scores.outcomes == ()
    np.testing.assert_array_equal(scores.total, SCORES)


def replaced(token: int) -> TokenBatch:
    ids = np.where(BATCH.token_ids == 9, token, BATCH.token_ids).astype(np.int32)
    return TokenBatch(ids, BATCH.prompt_lengths, BATCH.response_lengths)


@pytest.mark.parametrize("token", [7, 8])
def test_a_failure_of_pytriton_is_no_score(pytriton: str, token: int, build: Build) -> None:
    # The server puts requests together that arrive at once: one that fails also fails the others, until the pauses part them.
    scores = build(pytriton, max_attempts=8, backoff_seconds=0.02).score(replaced(token))
    assert list(scores.all_outcomes) == [Outcome.SCORER_ERROR if mark else Outcome.OK for mark in MARKED]
    np.testing.assert_array_equal(scores.total[~MARKED], SCORES[~MARKED])
    assert "secret" not in str(scores.details)
