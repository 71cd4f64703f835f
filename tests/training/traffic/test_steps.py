"""Training on the sessions of users: each one with a reward is trained exactly once, whatever process is lost."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import openai
import pytest

from quartet.buffer.traffic import TrafficStore
from quartet.errors import ServiceFailed
from quartet.services.generator import generator, servicer
from quartet.services.generator.attestation import Attestation
from quartet.services.orchestrator.rollout.generator_pool import MAX_FAILURES
from tests.training.runs import Run, wait_for
from tests.training.traffic.endpoint import SESSIONS, STEPS, busy_users, train_on
from tests.waiting import LIMIT


def trained(run: Run) -> list[dict[str, Any]]:
    """Return the trajectories of all steps, in order, and check their versions."""
    rows = [row for step in range(1, STEPS + 1) for row in run.trajectories(step)]
    for row in rows:
        assert row["policy_version"] < int(row["id"].split("/")[1])
    return rows


def test_sessions_are_trained_once_although_generator_and_actor_are_lost(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(2) as endpoint:
        with busy_users(endpoint, 3, turns=3, pause=0.05):
            addresses = endpoint.generators.addresses
            for step, address in ((1, addresses[0]), (2, addresses[1])):
                wait_for(endpoint.active, lambda step=step: endpoint.active.board.current().step >= step)
                endpoint.generators.replace(address)
            run = endpoint.active.finish()
        rows = trained(run)
        sessions = [row["logged"]["session"] for row in rows]
        assert len(set(sessions)) == len(sessions) == STEPS * SESSIONS
        for row in rows:
            session = row["logged"]["session"]
            assert row["score"] == endpoint.rewards[session]
            branches = [row, *row.get("further_branches", [])]
            policy = [each for branch in branches for each in branch["segments"] if each["role"] == "policy"]
            assert len(policy) == len(endpoint.answers[session])
        left = {id for id in endpoint.rewards if id not in sessions}
        assert {endpoint.state(id) for id in left} <= {"rewarded", "stale", "taken"}
    assert run.code == 0, run.progress.error


def test_a_session_of_damaged_weights_is_not_trained_although_its_reward_comes_first(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    takes, changed, damages = list[str | None](), Attestation.changed, threading.Event()
    may_read, take = threading.Event(), TrafficStore.take
    may_read.set()

    def read_back(*arguments: Any) -> tuple[list[str], int]:
        assert may_read.wait(LIMIT)
        return (["damaged"], 1) if damages.is_set() else changed(*arguments)

    def taken(*arguments: Any) -> str | None:
        takes.append(take(*arguments))
        return takes[-1]

    monkeypatch.setattr(Attestation, "changed", read_back)
    monkeypatch.setattr(TrafficStore, "take", taken)
    with start(run={"steps": 1}) as endpoint:
        may_read.clear()
        damages.set()
        for number in range(SESSIONS):
            endpoint.converse(f"damaged-{number}", 1)
        # The step looks for sessions, and the weights are not read back yet.
        looks = len(takes) + 3
        wait_for(endpoint.active, lambda: len(takes) >= looks)
        assert {endpoint.state(f"damaged-{number}") for number in range(SESSIONS)} == {"rewarded"}
        may_read.set()
        wait_for(endpoint.active, lambda: endpoint.state("damaged-0") == "unusable")
        damages.clear()
        train_on(endpoint, "whole")


def test_busy_users_do_not_delay_the_attestation_of_others(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The servings of these tests end by themselves only.
    monkeypatch.setattr(servicer, "MAX_SERVING_SECONDS", 10 * LIMIT)
    with start(run={"steps": 2}) as endpoint, busy_users(endpoint, 2):
        run = endpoint.active.finish()
    assert run.code == 0, run.progress.error


def test_a_new_run_does_not_take_sessions_of_an_earlier_one_with_its_name(
    settings: Callable[..., Any], start: Callable[..., Any], redis_url: str
) -> None:
    changes = {"run": {"steps": 1, "name": "replaced"}, "buffer": {"url": redis_url}}
    with start(**changes) as endpoint:
        # More than the step takes.
        for number in range(SESSIONS + 2):
            endpoint.converse(f"earlier-{number}", 1)
        assert endpoint.active.finish().code == 0
    shutil.rmtree(endpoint.active.config.run_directory)
    with start(**changes) as endpoint:
        assert endpoint.request("GET", "/sessions/earlier-0").status_code == 404
        train_on(endpoint, "later")


def test_the_first_answer_that_an_engine_fails_is_shown_once(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check, fails, failed = generator.check_response, threading.Event(), list[int]()

    def broken(*arguments: Any) -> Any:
        if fails.is_set():
            failed.append(1)
            raise ServiceFailed("the engine is broken")
        return check(*arguments)

    monkeypatch.setattr(generator, "check_response", broken)
    with start(run={"steps": 1}) as endpoint:
        fails.set()

        def shown() -> list[str]:
            return [note for note in endpoint.active.board.current().notes if "does not answer users" in note]

        for number in range(2):
            with pytest.raises(openai.InternalServerError):
                endpoint.ask(f"failed-{number}", "ab")
            wait_for(endpoint.active, lambda: shown() != [])
        fails.clear()
        run = train_on(endpoint, "answered")
        (note,) = shown()
    assert note.startswith("warning: generator ")
    assert "the engine is broken" in note
    assert len(failed) >= 1
    assert not [each for each in run.progress.notes if "in_flight" in each]


def test_a_step_without_users_waits_longer_than_the_limit_of_a_call(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, take = list[int](), generator.Generator._take_sessions

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return take(*arguments)

    monkeypatch.setattr(generator.Generator, "_take_sessions", counted)
    with start(run={"steps": 1}, timeouts={"generate_seconds": 0.5}) as endpoint:
        endpoint.converse("first", 1)
        wait_for(endpoint.active, lambda: len(calls) > 2 * MAX_FAILURES + 2)
        for number in range(1, SESSIONS):
            endpoint.converse(f"later-{number}", 1)
        run = endpoint.active.finish()
    assert run.code == 0, run.progress.error
    assert "first" in {row["logged"]["session"] for row in run.trajectories(1)}


def test_a_session_that_is_too_old_is_not_trained(start: Callable[..., Any]) -> None:
    with start(run={"steps": 1000}, rollout={"max_off_policy_steps": 1}) as endpoint:
        endpoint.ask("old", "ab")
        for number in count():
            endpoint.converse(f"new-{number}", 1)
            if endpoint.active.board.current().step >= 2:
                break
        # The step that takes it is the third one at least.
        assert endpoint.reward("old", 100.0).status_code == 200
        for number in count():
            if endpoint.state("old") != "rewarded":
                break
            endpoint.converse(f"newer-{number}", 1)
        assert endpoint.state("old") == "stale"
