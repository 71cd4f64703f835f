"""Sessions that continue from a snapshot of their environment, in another session or worker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quartet.contract.trajectory import EnvironmentReply, Outcome
from quartet.environments.environment import Environment
from quartet.environments.examples import GuessingGame, WordPuzzle
from quartet.environments.tools import ToolEnvironment
from quartet.errors import ConfigError, InvalidRequest
from tests.environments import chats
from tests.environments.conftest import Host
from tests.environments.test_host import PROMPT, events, ids, text
from tests.environments.test_tools import call


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_a_restored_session_continues_without_a_repeated_turn(host: Host, folder: Path, turns: int) -> None:
    played, other = host("Saved", arguments={"turns": 4}), host("Saved", arguments={"turns": 4})
    replies = [played.reset("s", 5, '{"word": "cat"}', PROMPT)]
    replies += [played.step("s", number, ids(f"t{number}")) for number in range(1, 5)]
    assert [bool(reply.state) for reply in replies] == [True] * 4 + [False]
    before = len(events(folder))
    restored = other.restore("s", 5, '{"word": "cat"}', PROMPT, turns, replies[turns].state)
    assert (len(restored.observation), restored.reward, restored.done, restored.state) == (0, 0.0, False, "")
    for number in range(turns + 1, 5):
        again = other.step("s", number, ids(f"t{number}"))
        assert text(again) == text(replies[number])
        assert (again.reward, again.done, again.state) == _rest(replies[number])
    assert events(folder)[before:] == ["restore", *["step"] * (4 - turns)]


def test_a_restored_session_remembers_the_chat_that_a_template_rewrites(host: Host, tmp_path: Path) -> None:
    template = tmp_path / "drops.jinja"
    template.write_text(chats.DROPS_THOUGHTS)
    settings = {"arguments": {"turns": 4}, "observations": "chat", "chat_template": template}
    played, other = host("Saved", **settings), host("Saved", **settings)
    replies = [played.reset("s", 5, '{"word": "cat"}', PROMPT)]
    turns = [ids(f"<think>{number}</think>t{number}<|im_end|>") for number in range(1, 5)]
    replies += [played.step("s", number, turn) for number, turn in enumerate(turns, 1)]
    assert [reply.prompt is None for reply in replies] == [True, False, False, False, True]
    assert replies[2].prompt is not None
    written = chats.tokenizer().decode(replies[2].prompt)
    # The observations of this environment quote the turns with their reasoning.
    assert all(f"<|im_start|>assistant\nt{number}<|im_end|>" in written for number in (1, 2))
    assert replies[2].prompt[: len(PROMPT)].tolist() == PROMPT.tolist()
    other.restore("s", 5, '{"word": "cat"}', PROMPT, 2, replies[2].state)
    for number in (3, 4):
        again = other.step("s", number, turns[number - 1])
        assert again.same_answer(replies[number])
        assert again.state == replies[number].state
    for damaged in (
        '{"environment": {}, "chat": 1}',
        '{"environment": {}, "chat": [1]}',
        '{"environment": {}, "chat": [{}]}',
    ):
        with pytest.raises(InvalidRequest, match="state: expected that of a reply of this service"):
            other.restore("t", 5, "", PROMPT, 2, damaged)


def test_a_chat_that_is_too_long_for_a_state_has_none(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "drops.jinja"
    template.write_text(chats.DROPS_THOUGHTS)
    played = host("Saved", observations="chat", chat_template=template)
    monkeypatch.setattr("quartet.environments.host.MAX_STATE_CHARACTERS", 40)
    assert played.reset("s", 5, "", PROMPT).state == ""


def _rest(reply: EnvironmentReply) -> tuple[float, bool, str]:
    return reply.reward, reply.done, reply.state


def test_a_restore_replaces_the_session_and_may_be_repeated(host: Host) -> None:
    played = host("Saved")
    first = played.reset("s", 5, "", PROMPT)
    expected = played.step("s", 1, ids("a"))
    for _ in range(2):
        played.restore("s", 5, "", PROMPT, 0, first.state)
        assert text(played.step("s", 1, ids("a"))) == text(expected)


def test_after_a_restore_only_the_next_turn_is_valid(host: Host) -> None:
    played = host("Saved")
    played.reset("s", 5, "", PROMPT)
    state = played.step("s", 1, ids("a")).state
    played.restore("t", 5, "", PROMPT, 1, state)
    for turn in (1, 3):
        with pytest.raises(InvalidRequest, match=f"got turn {turn}, expected turn 2"):
            played.step("t", turn, ids("a"))
    assert played.step("t", 2, ids("b")).outcome is Outcome.OK


@pytest.mark.parametrize("state", ["", "{", "[]", "{}", "1", "[" * 100_000])
def test_a_state_of_another_service_is_refused(host: Host, state: str) -> None:
    with pytest.raises(InvalidRequest, match="state: expected that of a reply of this service"):
        host("Saved").restore("s", 5, "", PROMPT, 0, state)


def test_a_class_without_snapshot_has_no_state(host: Host) -> None:
    assert host("Echo").reset("s", 5, "", PROMPT).state == ""


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("Huge", "snapshot returned a string of 65537 characters, expected at most 65536 as JSON, or None"),
        ("NotJson", "snapshot returned a value of type set, expected a JSON value, or None"),
    ],
)
def test_a_snapshot_that_cannot_be_kept_is_an_environment_error(host: Host, name: str, cause: str) -> None:
    reply = host(name).reset("s", 5, "", PROMPT)
    assert reply.outcome is Outcome.ENVIRONMENT_ERROR
    assert cause in reply.detail


def test_a_failed_restore_is_an_outcome_without_the_text_of_the_error(host: Host) -> None:
    played = host("BadRestore")
    state = played.reset("s", 5, "", PROMPT).state
    reply = played.restore("t", 5, "", PROMPT, 0, state)
    assert reply.outcome is Outcome.ENVIRONMENT_ERROR
    assert "raised ValueError" in reply.detail
    assert "secret" not in reply.detail


def test_a_class_with_snapshot_and_without_restore_is_refused(host: Host) -> None:
    with pytest.raises(ConfigError, match="worlds:NoRestore: defines snapshot, but not restore"):
        host("NoRestore")


TOOLS = """
from pathlib import Path

from quartet.environments.tools import Toolset, tool


class Basket(Toolset):
    def start(self, seed, fields):
        self.items = []

    @tool
    def put(self, item: str) -> str:
        with Path("bought").open("a") as file:
            file.write(item + "\\n")
        self.items.append(item)
        return ",".join(self.items)

    def snapshot(self):
        return self.items

    def restore(self, state):
        self.items = state

    def score(self, answer):
        return float(len(self.items))


class Forgetful(Basket):
    def snapshot(self):
        return None
"""


@pytest.fixture
def toolset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "baskets.py").write_text(TOOLS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "baskets"


def test_a_restored_toolset_continues_and_calls_no_tool_twice(toolset: str) -> None:
    first, second = (ToolEnvironment(f"{toolset}:Basket") for _ in range(2))
    first.reset(1, {})
    first.step(call("put", '{"item": "tea"}'))
    second.restore(1, {}, json.loads(json.dumps(first.snapshot())))
    turn = call("put", '{"item": "milk"}')
    answers = [each.step(turn) for each in (first, second)]
    assert answers[0] == answers[1]
    assert answers[0][0] == [{"role": "tool", "name": "put", "tool_call_id": "call00002", "content": "tea,milk"}]
    assert second.step("done")[1] == 2.0
    assert Path("bought").read_text().split() == ["tea", "milk", "milk"]


def test_a_toolset_without_a_snapshot_makes_its_environment_repeat_turns(toolset: str) -> None:
    environment = ToolEnvironment(f"{toolset}:Forgetful")
    environment.reset(1, {})
    assert environment.snapshot() is None


@pytest.mark.parametrize(
    ("environments", "turns", "fields"),
    [
        ([GuessingGame(1, 9) for _ in range(2)], ["3", "8", "5"], {"number": 5}),
        ([WordPuzzle(["cat"]) for _ in range(2)], ["cot", "xyz", "cat"], {}),
    ],
)
def test_the_example_games_continue_from_their_snapshots(
    environments: list[Environment], turns: list[str], fields: dict[str, int]
) -> None:
    played, other = environments
    played.reset(1, fields)
    for turn in turns:
        other.restore(1, fields, json.loads(json.dumps(played.snapshot())))
        assert other.step(turn) == played.step(turn)
