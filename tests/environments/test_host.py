"""Sessions of environments in worker processes: repetition, limits, failures and their outcomes."""

from __future__ import annotations

import json
import math
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quartet.contract.arrays import IntArray
from quartet.contract.status import Role
from quartet.contract.trajectory import EnvironmentReply, Outcome
from quartet.environments.host import EnvironmentHost
from quartet.errors import ConfigError, InvalidRequest, ServiceBusy, SessionLost
from tests.environments import chats
from tests.environments.conftest import Host
from tests.rewards.processes import children
from tests.waiting import LIMIT, wait_until

TOKENIZER = chats.tokenizer()
PROMPT = np.array([9, 10], np.int32)


def ids(text: str) -> IntArray:
    """Return the token ids of a text."""
    return np.array(TOKENIZER(text)["input_ids"], np.int32)


def text(reply: EnvironmentReply) -> str:
    """Return the text of an observation."""
    return str(TOKENIZER.decode(reply.observation, clean_up_tokenization_spaces=False))


def events(folder: Path) -> list[str]:
    """Return the calls that environments of `worlds` have noted."""
    return (folder / "events").read_text().split()


def test_an_episode_gets_seed_fields_arguments_and_turns(host: Host) -> None:
    played = host(arguments={"prefix": "say ", "turns": 2})
    first = played.reset("s", 7, '{"word": "cat"}', PROMPT)
    draw = random.Random(7)
    assert text(first) == f"say cat {draw.randrange(10**6)}"
    assert (first.reward, first.done, first.outcome) == (0.0, False, Outcome.OK)
    second = played.step("s", 1, ids("hello"))
    assert (text(second), second.reward, second.done) == (f"hello {draw.randrange(10**6)}", 0.25, False)
    third = played.step("s", 2, ids("bye"))
    assert (len(third.observation), third.reward, third.done) == (0, 0.5, True)


def test_an_equal_session_has_equal_answers_and_another_seed_others(host: Host) -> None:
    played = host()

    def episode(name: str, seed: int) -> list[str]:
        return [text(played.reset(name, seed, "", PROMPT)), text(played.step(name, 1, ids("a")))]

    assert episode("one", 3) == episode("two", 3) != episode("three", 4)


def test_repeating_the_last_call_has_no_effect_and_the_same_answer(host: Host, folder: Path) -> None:
    played = host()
    assert played.reset("s", 1, "", PROMPT) is played.reset("s", 1, "", PROMPT)
    assert played.step("s", 1, ids("a")) is played.step("s", 1, ids("a"))
    assert events(folder) == ["reset", "step"]


def test_concurrent_repetitions_of_a_call_reach_the_environment_once(host: Host, folder: Path) -> None:
    played, replies = host(), []
    played.reset("s", 1, "", PROMPT)
    threads = [threading.Thread(target=lambda: replies.append(played.step("s", 1, ids("a")))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert events(folder) == ["reset", "step"]
    assert len({id(reply) for reply in replies}) == 1


def test_a_reset_after_a_turn_starts_the_episode_again(host: Host, folder: Path) -> None:
    played = host()
    first = played.reset("s", 1, "", PROMPT)
    played.step("s", 1, ids("a"))
    assert text(played.reset("s", 1, "", PROMPT)) == text(first)
    assert played.step("s", 1, ids("b")).reward == 0.25
    assert events(folder) == ["reset", "step", "close", "reset", "step"]


@pytest.mark.parametrize(
    ("turn", "tokens", "expected"),
    [(3, "b", "got turn 3, expected turn 2"), (1, "b", "got turn 1, expected turn 2"), (0, "b", "got turn 0")],
)
def test_another_turn_than_the_next_or_the_last_is_refused(host: Host, turn: int, tokens: str, expected: str) -> None:
    played = host()
    played.reset("s", 1, "", PROMPT)
    played.step("s", 1, ids("a"))
    with pytest.raises(InvalidRequest, match=expected):
        played.step("s", turn, ids(tokens))
    assert played.step("s", 2, ids("c")).outcome is Outcome.OK


def test_a_turn_after_the_end_is_refused(host: Host) -> None:
    played = host(arguments={"turns": 1})
    played.reset("s", 1, "", PROMPT)
    assert played.step("s", 1, ids("a")).done
    with pytest.raises(InvalidRequest, match="no further turn, because the episode is over"):
        played.step("s", 2, ids("a"))


def test_an_unknown_or_closed_session_is_lost(host: Host, folder: Path) -> None:
    played = host()
    with pytest.raises(SessionLost, match="session s: unknown"):
        played.step("s", 1, ids("a"))
    played.reset("s", 1, "", PROMPT)
    played.close_session("s")
    played.close_session("s")
    with pytest.raises(SessionLost):
        played.step("s", 1, ids("a"))
    # The next call of the worker comes after the close.
    played.reset("t", 1, "", PROMPT)
    assert "close" in events(folder)


def test_a_slow_close_ends_no_other_session_of_its_worker(host: Host, folder: Path) -> None:
    played, before = host("SlowToClose", num_workers=1), children()
    for session in "st":
        played.reset(session, 1, "", PROMPT)
    played.close_session("s")
    wait_until(lambda: "close" in events(folder))
    assert played.step("t", 1, ids("a")).outcome is Outcome.OK
    assert children() == before


FAILURES: dict[str, tuple[Outcome, str]] = {
    "raise": (Outcome.ENVIRONMENT_ERROR, "raised ValueError at worlds.py:"),
    "refuse": (Outcome.REFUSED, "worlds:Echo: declined"),
    "exit": (Outcome.ENVIRONMENT_ERROR, "raised SystemExit"),
    "die": (Outcome.ENVIRONMENT_ERROR, "its process ended with status 3"),
    "killed": (Outcome.ENVIRONMENT_ERROR, "its process was killed by SIGKILL"),
    "sleep": (Outcome.TIMEOUT, "took longer than 0.3 s, and was ended; raise its timeout if it needs longer"),
}


@pytest.mark.parametrize("turn", FAILURES)
def test_a_failure_of_the_environment_is_an_outcome_and_not_a_reward(host: Host, turn: str) -> None:
    outcome, detail = FAILURES[turn]
    played = host(timeout_seconds=0.3 if turn == "sleep" else 60)
    played.reset("s", 1, "", PROMPT)
    reply = played.step("s", 1, ids(turn))
    assert (reply.outcome, reply.done, len(reply.observation)) == (outcome, True, 0)
    assert math.isnan(reply.reward)
    assert detail in reply.detail
    assert reply.detail.startswith("worlds:Echo: ")
    assert "secret" not in reply.detail
    # The failure is the session's last answer. A new session is not affected.
    assert played.step("s", 1, ids(turn)) is reply
    assert played.reset("t", 1, "", PROMPT).outcome is Outcome.OK


def test_the_text_of_an_exception_is_shown_on_request(host: Host) -> None:
    played = host(quote_texts=True)
    played.reset("s", 1, "", PROMPT)
    assert "raised ValueError at worlds.py:" in (detail := played.step("s", 1, ids("raise")).detail)
    assert "secret text" in detail


def test_a_killed_worker_loses_its_sessions_and_no_other(host: Host) -> None:
    played = host(num_workers=2)
    for name in ("a", "b", "c"):  # One worker has a and c.
        played.reset(name, 1, "", PROMPT)
    assert played.step("a", 1, ids("killed")).outcome is Outcome.ENVIRONMENT_ERROR
    assert played.step("b", 1, ids("x")).outcome is Outcome.OK
    with pytest.raises(SessionLost, match="session c: lost, because its worker process was replaced"):
        played.step("c", 1, ids("x"))
    assert played.reset("c", 1, "", PROMPT).outcome is Outcome.OK
    assert played.step("c", 1, ids("x")).outcome is Outcome.OK


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"result": ["a", 1.0]}, "step returned a list of 2, expected (observation, reward, done)"),
        ({"result": None}, "step returned a value of type NoneType, expected (observation, reward, done)"),
        ({"result": [5, 1.0, False]}, "step returned a value of type int, expected an observation"),
        ({"result": ["a", True, 1.0]}, "step returned a value of type bool, expected a finite number as the reward"),
        ({"result": ["a", "1", False]}, "step returned a string of 1 characters, expected a finite number"),
        ({"result": ["a", None, False]}, "expected a finite number as the reward"),
        ({"python": "('a', float('nan'), False)"}, "step returned nan, expected a finite number as the reward"),
        ({"python": "('a', 1e300, False)"}, "expected a finite number as the reward"),
        ({"result": ["a", 1.0, 0]}, "expected true or false as done"),
        ({"result": [[{"role": "user", "content": "a"}], 1.0, False]}, "set environment.observations to chat"),
        ({"first": 5}, "reset returned a value of type int, expected an observation"),
        ({"first": [{"content": "a"}]}, "reset returned a list of 1, expected an observation"),
        ({"first": "a" * 1_000_001}, "returned 1000001 characters; the limit is 1000000"),
    ],
)
def test_a_malformed_result_is_an_environment_error(host: Host, fields: dict[str, Any], expected: str) -> None:
    played = host("Given")
    reply = played.reset("s", 1, json.dumps(fields), PROMPT)
    if "first" not in fields:
        reply = played.step("s", 1, ids("x"))
    assert reply.outcome is Outcome.ENVIRONMENT_ERROR
    assert expected in reply.detail


@pytest.mark.parametrize("python", ["('', numpy.float32(0.5), numpy.bool_(False))", "(None, 1, False)"])
def test_numbers_of_numpy_and_an_absent_observation_are_accepted(host: Host, python: str) -> None:
    played = host("Given")
    played.reset("s", 1, json.dumps({"python": python.replace("numpy", "__import__('numpy')")}), PROMPT)
    reply = played.step("s", 1, ids("x"))
    assert (reply.outcome, len(reply.observation)) == (Outcome.OK, 0)


def test_special_tokens_reach_only_an_environment_that_keeps_them(host: Host) -> None:
    turn = np.array([*ids("a"), 0], np.int32)
    for name, shown in (("Echo", "a "), ("Raw", "a<eos> ")):
        played = host(name)
        played.reset("s", 1, "", PROMPT)
        assert text(played.step("s", 1, turn)).startswith(shown)


def test_tokens_without_text_are_left_out(host: Host) -> None:
    played = host()
    played.reset("s", 1, "", PROMPT)
    assert text(played.step("s", 1, np.array([*ids("a"), 5000], np.int32))).startswith("a ")


def test_at_the_limit_ended_sessions_make_room_and_open_ones_do_not(host: Host) -> None:
    played = host(max_sessions=2, arguments={"turns": 1})
    for name in ("a", "b"):
        played.reset(name, 1, "", PROMPT)
    with pytest.raises(ServiceBusy, match=r"2 sessions are open already; raise environment.max_sessions"):
        played.reset("c", 1, "", PROMPT)
    played.step("a", 1, ids("x"))
    played.reset("c", 1, "", PROMPT)
    with pytest.raises(SessionLost):
        played.step("a", 1, ids("x"))
    assert played.status().open_sessions == 2


def test_an_idle_session_makes_room_at_the_limit(host: Host) -> None:
    now = [0.0]
    played = host(clock=lambda: now[0], session_idle_seconds=10, max_sessions=2)
    played.reset("a", 1, "", PROMPT)
    now[0] = 6.0
    played.reset("b", 1, "", PROMPT)
    now[0] = 15.0
    played.step("a", 1, ids("x"))
    with pytest.raises(ServiceBusy):
        played.reset("c", 1, "", PROMPT)
    now[0] = 16.5  # b has been idle for 10.5 s, a for 1.5 s.
    played.reset("c", 1, "", PROMPT)
    assert played.status().open_sessions == 2
    with pytest.raises(SessionLost):
        played.step("b", 1, ids("x"))
    assert played.step("a", 2, ids("x")).outcome is Outcome.OK


def test_calls_beyond_the_limit_are_refused_at_once(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quartet.environments.host.MAX_CALLS", 1)
    played = host()
    played.reset("s", 1, "", PROMPT)
    entered, leave = threading.Event(), threading.Event()
    call = played._workers[0].call

    def slow(*arguments: Any) -> Any:
        entered.set()
        assert leave.wait(LIMIT)
        return call(*arguments)

    monkeypatch.setattr(played._workers[0], "call", slow)
    thread = threading.Thread(target=played.step, args=("s", 1, ids("a")))
    thread.start()
    assert entered.wait(LIMIT)
    assert played.status().work_pending == 1
    with pytest.raises(ServiceBusy, match="step: 1 calls are pending already"):
        played.step("s", 1, ids("a"))
    leave.set()
    thread.join()


def test_the_status_names_class_and_vocabulary(host: Host) -> None:
    played = host()
    played.reset("s", 1, "", PROMPT)
    status = played.status()
    assert (status.role, status.model, status.device) == (Role.ENVIRONMENT, "worlds:Echo", "cpu")
    assert (status.vocabulary_size, status.open_sessions) == (len(TOKENIZER), 1)
    assert len(status.tokenizer_fingerprint) == 64
    assert status.busy_seconds["reset"] > 0 == status.busy_seconds["step"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Missing", "module worlds has no Missing"),
        ("NoStep", "is not an environment: no method step; derive a class from quartet.environments.Environment"),
        ("not_a_class", "is a value of type int"),
        ("note", "is not an environment: no method reset"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_and_leaves_no_process(host: Host, name: str, expected: str) -> None:
    before = children()
    with pytest.raises(ConfigError, match=rf"^environment\.class_name worlds:{name}: .*{expected}"):
        host(name, num_workers=2)
    assert children() == before


def test_arguments_that_the_class_does_not_take_are_refused(host: Host) -> None:
    with pytest.raises(ConfigError, match=r"^environment\.class_name worlds:Echo: environment\.arguments: .*'levle'"):
        host("Echo", arguments={"levle": 2})


def test_the_text_of_an_exception_is_shown_if_no_prompt_was_seen_and_else_the_setting_for_it(host: Host) -> None:
    refused = host("Refusing", arguments={}).reset("run/1/0/0/1.0", 1, "{}", PROMPT)
    assert refused.detail.endswith(": no such level")
    raised = host("Failing").reset("run/1/0/0/1.0", 1, "{}", PROMPT)
    assert raised.detail.endswith("set environment.quote_texts: true to see it")
    assert "secret" not in raised.detail


def test_closing_ends_the_workers(host: Host) -> None:
    before = children()
    played: EnvironmentHost = host(num_workers=2)
    assert len(children() - before) == 2
    played.close()
    assert children() == before


def test_fields_that_are_no_object_are_refused(host: Host) -> None:
    with pytest.raises(InvalidRequest, match=r"fields\[0\]: found list, expected a JSON object"):
        host().reset("s", 1, "[]", PROMPT)
