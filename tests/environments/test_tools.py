"""Calls of tools in the formats of chat templates, and the environment that answers them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quartet.environments import EnvironmentFailed
from quartet.environments.examples import Calculator
from quartet.environments.tools import (
    MAX_CALLS,
    Call,
    Malformed,
    ToolEnvironment,
    parse_hermes,
    parse_llama3,
    parse_mistral,
    schemas,
)

ADD = Call("add", {"a": 1})
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
KIT = """
from quartet.environments import EnvironmentFailed
from quartet.environments.tools import Toolset, tool


class Kit(Toolset):
    def __init__(self, factor=1):
        self.factor = factor

    def start(self, seed, fields):
        self.seen = []
        return f"seed {seed}"

    @tool
    def add(self, a: int, b: float = 0.5, tags: list[str] = ()) -> float:
        "Add two numbers."
        self.seen.append(a)
        return self.factor * (a + b)

    @tool
    def broken(self):
        raise EnvironmentFailed("no disk", "sandbox_error")

    @tool
    def fails(self):
        raise KeyError("x")

    def not_offered(self):
        return "secret"

    def score(self, answer):
        return float(answer == "yes")
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no call", []),
        (HERMES, [ADD]),
        (f"Let me see. {HERMES} and {HERMES}", [ADD, ADD]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [ADD]),
        ('<tool_call>{"name": "add"}</tool_call>', [Call("add", {})]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}', [ADD]),
        ("<tool_call>{oops}</tool_call>", [Malformed("the call is not JSON")]),
        ('<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', [Malformed("the call is not JSON")]),
        (f"<tool_call>{'[' * 100_000}</tool_call>", [Malformed("the call is not JSON")]),
        ("<tool_call>5</tool_call>", [Malformed("a call needs a name")]),
        ('<tool_call>{"name": 5}</tool_call>', [Malformed("a call needs a name")]),
        ('<tool_call>{"name": "a"} more</tool_call>', [Malformed("text after the call's JSON")]),
        ('<tool_call>{"name": "a", "arguments": [1]}</tool_call>', [Malformed("the arguments are not an object")]),
        ('<tool_call>{"name": "a", "arguments": "{"}</tool_call>', [Malformed("the arguments are not JSON")]),
    ],
)
def test_hermes_calls(text: str, expected: list[Any]) -> None:
    assert parse_hermes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no call", []),
        ('{"name": "add", "parameters": {"a": 1}}', [ADD]),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', [ADD]),
        ('{"name": "add", "parameters": {"a": 1}}; {"name": "add", "arguments": {"a": 1}}', [ADD, ADD]),
        ('I call {"name": "add", "parameters": {"a": 1}}', []),
        ('{"answer": 5}', []),
        ('{"name": "add", ', [Malformed("the call is not JSON")]),
        ('{"name": "add", "parameters": 5}', [Malformed("the arguments are not an object")]),
    ],
)
def test_llama3_calls(text: str, expected: list[Any]) -> None:
    assert parse_llama3(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no call", []),
        ('[{"name": "add", "arguments": {"a": 1}}]', [ADD]),
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', [ADD]),
        ("[1, 2]", []),
        ('[{"name": "add"', [Malformed("the call is not JSON")]),
    ],
)
def test_mistral_calls(text: str, expected: list[Any]) -> None:
    assert parse_mistral(text) == expected


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Toolset in the working directory."""
    (tmp_path / "toolkits.py").write_text(KIT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "toolkits:Kit"


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_results_are_tool_messages_until_a_turn_without_a_call(kit: str) -> None:
    environment = ToolEnvironment(kit, arguments={"factor": 2})
    assert environment.reset(7, {}) == "seed 7"
    calls = [call("add", '{"a": 1}'), call("add", '{"a": 1, "b": 2}')]
    messages, reward, done = environment.step(f"first {calls[0]} {calls[1]}")
    assert messages == [
        {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "3.0"},
        {"role": "tool", "name": "add", "tool_call_id": "call00002", "content": "6"},
    ]
    assert (reward, done) == (0.0, False)
    assert environment.step(" yes\n") == (None, 1.0, True)


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        (call("missing"), "error: no tool missing; there are add, broken, fails"),
        (call("not_offered"), "error: no tool not_offered"),
        (call("score"), "error: no tool score"),
        (call("add"), "error: add: missing a required argument: 'a'"),
        (call("add", '{"a": 1, "x": 2}'), "error: add: got an unexpected keyword argument 'x'"),
        (call("add", '{"a": "1"}'), "error: add: a: expected integer"),
        (call("add", '{"a": true}'), "error: add: a: expected integer"),
        (call("add", '{"a": 1, "tags": "x"}'), "error: add: tags: expected array"),
        (call("fails"), "error: KeyError: 'x'"),
        ("<tool_call>{", "error: the call is not JSON"),
    ],
)
def test_an_error_of_a_call_is_a_result_that_the_policy_sees(kit: str, turn: str, expected: str) -> None:
    environment = ToolEnvironment(kit, messages=False, reward_per_error=-0.5)
    environment.reset(7, {})
    text, reward, done = environment.step(turn)
    assert isinstance(text, str)
    assert text.startswith(expected)
    assert (reward, done) == (-0.5, False)


def test_a_tool_that_cannot_continue_ends_the_episode_with_its_outcome(kit: str) -> None:
    environment = ToolEnvironment(kit)
    environment.reset(7, {})
    with pytest.raises(EnvironmentFailed) as failed:
        environment.step(call("broken"))
    assert failed.value.outcome == "sandbox_error"


def test_calls_beyond_the_limit_are_not_made(kit: str) -> None:
    environment = ToolEnvironment(kit, messages=False)
    environment.reset(7, {})
    text, _, _ = environment.step(call("add", '{"a": 1}') * (MAX_CALLS + 5))
    assert isinstance(text, str)
    assert text.splitlines() == ["1.5"] * MAX_CALLS + [f"error: more than {MAX_CALLS} calls in one turn"]


def test_schemas_describe_the_tools_for_a_chat_template() -> None:
    assert schemas(Calculator) == [
        {
            "type": "function",
            "function": {
                "name": "calculate",
                "description": "Compute an expression of numbers with + - * / // % and parentheses.",
                "parameters": {
                    "type": "object",
                    "properties": {"expression": {"type": "string"}},
                    "required": ["expression"],
                },
            },
        }
    ]


def test_an_unknown_format_is_refused(kit: str) -> None:
    with pytest.raises(ValueError, match="format 'xml': expected one of hermes, llama3-json, mistral"):
        ToolEnvironment(kit, format="xml")  # type: ignore[arg-type]
