"""Tools: Python methods that the policy calls in the format of its chat template, such as a calculator. Standard library only."""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar

from quartet.environments.environment import Environment, EnvironmentFailed, Message, Observation
from quartet.system.user_code import import_callable

Format = Literal["hermes", "llama3-json", "mistral"]
"""Format of calls in the policy's text. hermes: <tool_call>{"name", "arguments"}</tool_call>, also of Qwen. llama3-json:
{"name", "parameters"}, several separated by ";". mistral: a list of {"name", "arguments"}."""
MAX_CALLS = 16
"""Maximum number of calls in one turn. Further calls are answered with an error."""
MAX_RESULT_CHARACTERS = 100_000
"""Maximum length of a result. A longer one is cut."""

Method = TypeVar("Method", bound=Callable[..., Any])
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def tool(method: Method) -> Method:
    """Offer a method of a Toolset to the policy. Its arguments need annotations, its docstring is the description."""
    method.__quartet_tool__ = True  # type: ignore[attr-defined]
    return method


class Toolset:
    """The tools of one episode, and the score of its answer. A subclass marks its tools with ``tool``."""

    def start(self, seed: int, fields: dict[str, Any]) -> Observation:
        """Start the episode and return the observation before the first turn. ``fields`` are those of the prompt's line."""
        return None

    def score(self, answer: str) -> float:
        """Return the reward of the episode. ``answer`` is the text of the first turn without a call."""
        raise NotImplementedError

    def snapshot(self) -> Any:
        """Return what the tools have changed since ``start`` as a JSON value, {} for nothing; see ``Environment.snapshot``.

        The default, None, says that it cannot be restored: after a failure, the tools of all turns are called again.
        """
        return None

    def restore(self, state: Any) -> None:
        """Continue after the turn whose ``snapshot`` returned ``state``. ``start`` has been called before."""

    def close(self) -> None:
        """Release what the episode holds."""


class ToolEnvironment(Environment):
    """Environment that answers calls of tools, until a turn has no call. That turn is the answer."""

    def __init__(
        self,
        toolset: str,
        format: Format = "hermes",
        arguments: dict[str, Any] | None = None,
        messages: bool = True,
        prefix: str = "",
        reward_per_error: float = 0.0,
    ) -> None:
        """``toolset``: subclass of Toolset as package.module:Class, created with ``arguments``.

        ``messages``: results are messages of the role tool, for environment.observations chat. False: text, one result per line,
        after ``prefix``. ``reward_per_error`` is given for a call that is malformed or fails.
        """
        if format not in _PARSERS:
            raise ValueError(f"format {format!r}: expected one of {', '.join(_PARSERS)}")
        self._toolset = import_callable(toolset)(**(arguments or {}))
        self._tools = tools_of(type(self._toolset))
        self._parse, self._messages, self._prefix = _PARSERS[format], messages, prefix
        self._reward_per_error = reward_per_error
        self._number = 0

    def reset(self, seed: int, fields: dict[str, Any]) -> Observation:
        """Start the toolset."""
        observation: Observation = self._toolset.start(seed, fields)
        return observation

    def step(self, text: str) -> tuple[Observation, float, bool]:
        """Answer the calls of a turn, or score its answer."""
        calls = self._parse(text)
        if not calls:
            return None, float(self._toolset.score(text.strip())), True
        results, errors = [], 0
        for number, call in enumerate(calls):
            if number >= MAX_CALLS:
                call = Malformed(f"more than {MAX_CALLS} calls in one turn")
            ok, content = self._call(call)
            errors += not ok
            results.append((call.name if isinstance(call, Call) else "", content))
            if number >= MAX_CALLS:
                break
        return self._observation(results), errors * self._reward_per_error, False

    def snapshot(self) -> Any:
        """Return the state of the toolset, and the number of its results."""
        state = self._toolset.snapshot()
        return None if state is None else {"toolset": state, "results": self._number}

    def restore(self, seed: int, fields: dict[str, Any], state: Any) -> None:
        """Start the toolset, and restore its state."""
        self._toolset.start(seed, fields)
        self._toolset.restore(state["toolset"])
        self._number = state["results"]

    def close(self) -> None:
        """Close the toolset."""
        self._toolset.close()

    def _call(self, call: Call | Malformed) -> tuple[bool, str]:
        """Return whether a call succeeded, and its result or the error, as text for the policy."""
        if isinstance(call, Malformed):
            return False, f"error: {call.reason}"
        if call.name not in self._tools:
            return False, f"error: no tool {call.name[:100]}; there are {', '.join(self._tools)}"
        method = getattr(self._toolset, call.name)
        try:
            inspect.signature(method).bind(**call.arguments)
            _check_types(method, call.arguments)
        except TypeError as error:
            return False, f"error: {call.name}: {error}"
        try:
            result = method(**call.arguments)
        except EnvironmentFailed:
            raise
        except Exception as error:  # The policy may react to it.
            return False, f"error: {type(error).__name__}: {error}"[:MAX_RESULT_CHARACTERS]
        text = result if isinstance(result, str) else json.dumps(result)
        return True, text[:MAX_RESULT_CHARACTERS]

    def _observation(self, results: list[tuple[str, str]]) -> Observation:
        if not self._messages:
            return self._prefix + "\n".join(content for _, content in results)
        messages: list[Message] = []
        for name, content in results:
            self._number += 1
            identifier = f"call{self._number:05}"
            messages.append({"role": "tool", "name": name, "tool_call_id": identifier, "content": content})
        return messages


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Malformed:
    """A text that looks like a call and is not a valid one."""

    reason: str


Calls = list[Call | Malformed]


def parse_hermes(text: str) -> Calls:
    """Return the calls of a text in the format hermes; none if it has none."""
    return [_parsed(inner) for inner in _HERMES.findall(text)]


def parse_llama3(text: str) -> Calls:
    """Return the calls of a text in the format llama3-json; none if it does not begin with one."""
    text = text.strip().removeprefix("<|python_tag|>").strip()
    calls: Calls = []
    while text.startswith("{"):
        value, text = _first_value(text)
        if isinstance(value, dict) and "name" not in value:
            return []  # JSON that is not a call is an answer.
        calls.append(_call_of(value))
        text = text.strip()
        if not text.startswith(";"):
            break
        text = text[1:].strip()
    return calls


def parse_mistral(text: str) -> Calls:
    """Return the calls of a text in the format mistral; none if it does not begin with a list of calls."""
    text = text.strip().removeprefix("[TOOL_CALLS]").strip()
    if not text.startswith("["):
        return []
    value, _ = _first_value(text)
    if isinstance(value, Malformed):
        return [value]
    has_calls = any(isinstance(each, dict) and "name" in each for each in value)
    return [_call_of(each) for each in value] if has_calls else []


_PARSERS: dict[str, Callable[[str], Calls]] = {
    "hermes": parse_hermes,
    "llama3-json": parse_llama3,
    "mistral": parse_mistral,
}


def tools_of(toolset: type) -> list[str]:
    """Return the names of a toolset's tools, in the order of their definition."""
    names = [name for kind in reversed(toolset.__mro__) for name, value in vars(kind).items() if _is_tool(value)]
    return list(dict.fromkeys(names))


def schemas(toolset: type) -> list[dict[str, Any]]:
    """Return the descriptions of a toolset's tools for a chat template (``tools``) or a system message, as JSON schemas."""
    results = []
    for name in tools_of(toolset):
        method = getattr(toolset, name)
        hints, parameters = typing.get_type_hints(method), inspect.signature(method).parameters
        own = [parameter for parameter in parameters.values() if parameter.name != "self"]
        properties = {each.name: {"type": _TYPES.get(_plain(hints.get(each.name)), "string")} for each in own}
        required = [each.name for each in own if each.default is inspect.Parameter.empty]
        function = {
            "name": name,
            "description": inspect.getdoc(method) or "",
            "parameters": {"type": "object", "properties": properties, "required": required},
        }
        results.append({"type": "function", "function": function})
    return results


def _is_tool(value: Any) -> bool:
    return getattr(value, "__quartet_tool__", False) is True


def _plain(hint: Any) -> Any:
    """Return list for list[int], and so on."""
    return typing.get_origin(hint) or hint


def _check_types(method: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Raise TypeError for an argument of another JSON type than the method's annotation."""
    hints = typing.get_type_hints(method)
    for name, value in arguments.items():
        expected = _plain(hints.get(name))
        if expected not in _TYPES or isinstance(expected, types.UnionType):
            continue
        allowed = (int, float) if expected is float else expected
        if not isinstance(value, allowed) or (isinstance(value, bool) and expected is not bool):
            raise TypeError(f"{name}: expected {_TYPES[expected]}")


def _parsed(text: str) -> Call | Malformed:
    value, rest = _first_value(text.strip())
    return Malformed("text after the call's JSON") if rest.strip() else _call_of(value)


def _call_of(value: Any) -> Call | Malformed:
    if isinstance(value, Malformed):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Malformed("a call needs a name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # As in OpenAI's API.
        arguments, rest = _first_value(arguments.strip()) if arguments.strip() else ({}, "")
        if isinstance(arguments, Malformed) or rest.strip():
            return Malformed("the arguments are not JSON")
    if not isinstance(arguments, dict):
        return Malformed("the arguments are not an object")
    return Call(value["name"], arguments)


def _first_value(text: str) -> tuple[Any, str]:
    """Return the JSON value at the start of a text, or Malformed, and the text after it."""
    try:
        value, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return Malformed("the call is not JSON"), ""
    return value, text[end:]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
