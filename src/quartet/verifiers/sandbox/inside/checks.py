"""Run test statements. The names of the program's functions call them in another sandbox (see calls.py), through the host.

Each line on standard output begins with a letter: C for a call, which the host passes on, V for the verdict on a test. Only plain
data comes back from the program, so it cannot change how the tests compare, and it never sees an expected result.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
import types
from typing import Any

MODULE = "solution"
"""Name under which tests can import the program."""
PLAIN: tuple[Any, ...] = (list, tuple, set, frozenset)


class ProgramError(Exception):
    """An exception of the program that Python does not define."""


class Unsupported(BaseException):
    """A test passes a value to the program that cannot be sent."""


class Channel:
    """Calls into the program."""

    def __init__(self) -> None:
        # The tests may read and print, but not in the place of this script.
        self._input, self._output = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        nothing = os.open("/dev/null", os.O_RDWR)
        for descriptor in (0, 1):
            os.dup2(nothing, descriptor)
        self.calls = 0
        """Number of calls that were made."""

    def read(self) -> Any:
        """Return the next object from the host. Ends the process at the end of the input."""
        line = self._input.readline()
        if not line:
            os._exit(0)
        return json.loads(line)

    def write(self, letter: str, message: dict[str, Any]) -> None:
        """Send a message to the host."""
        self._output.write(letter.encode() + json.dumps(message).encode() + b"\n")
        self._output.flush()

    def call(self, what: str, *arguments: Any, **named: Any) -> Any:
        """Make a call and return its result. Raises the exception of the program."""
        self.calls += 1
        message = {
            "number": self.calls,
            "do": what,
            "arguments": [encode(value) for value in arguments],
            "named": {name: encode(value) for name, value in named.items()},
        }
        self.write("C", message)
        answer = self.read()
        try:
            if answer["number"] != self.calls:
                raise ValueError
            if "raised" not in answer:
                for own, changed in zip(arguments[1:], answer.get("arguments", ()), strict=False):
                    _update(own, decode(changed, self))
                return decode(answer["value"], self)
            name, text = str(answer["raised"]), str(answer["text"])
        except (KeyError, TypeError, ValueError, RecursionError, AttributeError):
            raise ProgramError("the program wrote to the channel of its results") from None
        kind = getattr(builtins, name, None)
        if (
            isinstance(kind, type)
            and issubclass(kind, Exception)
            and not issubclass(kind, (AssertionError, UnicodeError))
        ):
            raise kind(text)
        raise ProgramError(name)


class Remote:
    """An object of the program, for example one of its functions. Equal only to itself."""

    def __init__(self, channel: Channel, number: int) -> None:
        self.__dict__.update(_channel=channel, _number=number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._channel.call("call", self, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._channel.call("getattr", self, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and other._number == self._number

    def __hash__(self) -> int:
        return hash(self._number)

    def __iter__(self) -> Any:
        return iter(self._channel.call("iterate", self))

    def __len__(self) -> int:
        length = self._channel.call("length", self)
        return length if isinstance(length, int) else -1

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, key: Any) -> Any:
        return self._channel.call("item", self, key)

    def __str__(self) -> str:
        return str(self._channel.call("text", self))


class Module(types.ModuleType):
    """The program as a module, for tests that import from it."""

    channel: Channel

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.channel.call("name", name)


def encode(value: Any) -> Any:
    """Return a value as JSON. Raises Unsupported if it is neither plain data nor an object of the program."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Remote):
        return {"object": value._number}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {type(value).__name__: bytes(value).hex()}
    for kind in PLAIN:
        if isinstance(value, kind):
            return {kind.__name__: [encode(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(each)] for key, each in value.items()]}
    if isinstance(value, range):
        return {"list": list(value)}
    raise Unsupported(type(value).__name__)


def decode(value: Any, channel: Channel) -> Any:
    """Return a value of the program. Raises ValueError, KeyError or TypeError if it is malformed."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    kind, content = next(iter(value.items()))
    if kind == "object":
        return Remote(channel, int(content))
    if kind == "complex":
        return complex(*content)
    if kind in ("bytes", "bytearray"):
        return (bytes if kind == "bytes" else bytearray).fromhex(content)
    if kind == "dict":
        return {decode(key, channel): decode(each, channel) for key, each in content}
    for plain in PLAIN:
        if plain.__name__ == kind:
            return plain(decode(each, channel) for each in content)
    raise ValueError(kind)


def _update(own: Any, changed: Any) -> None:
    """Give a list, dict or set of the test the content that the program left in its copy."""
    if type(own) is not type(changed) or own == changed:
        return
    if isinstance(own, (list, bytearray)):
        own[:] = changed
    elif isinstance(own, (dict, set)):
        own.clear()
        own.update(changed)


def names_to_provide(text: str, entry_point: str) -> set[str]:
    """Return the names that a test reads but neither it nor Python defines."""
    read: set[str] = set()
    defined: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
    provided = {name for name in read - defined if not hasattr(builtins, name)}
    return provided | ({entry_point} if entry_point else set())


def _verdict(
    text: str, entry_point: str, space: dict[str, Any], provided: set[str], channel: Channel
) -> dict[str, Any]:
    """Run a test. ``space`` has the names of the tests before it, of which ``provided`` are the program's."""
    before = channel.calls
    try:
        for name in sorted(names_to_provide(text, entry_point) - (set(space) - provided)):
            space[name] = channel.call("name", name)
            provided.add(name)
        exec(compile(text, "<test>", "exec"), space)  # noqa: S102 - the sandbox exists to run it
        if entry_point and isinstance(space.get("check"), types.FunctionType):
            space["check"](space[entry_point])
    except AssertionError:
        return {"kind": "wrong answer"}
    except MemoryError:
        return {"kind": "memory limit"}
    except Unsupported as error:
        return {
            "unusable": f"gives the program a value of type {error}, expected plain data such as numbers, text and lists"
        }
    except SyntaxError as error:
        return {"unusable": f"is not Python (line {error.lineno})"}
    except BaseException as error:
        return {"kind": "runtime error", "detail": type(error).__name__}
    return {"kind": "passed"} if channel.calls > before else {"unusable": "uses nothing of the program"}


def _serve(entry_point: str) -> None:
    channel = Channel()
    module = Module(MODULE)
    module.channel = channel
    sys.modules[MODULE] = module
    space: dict[str, Any] = {"__name__": "tests"}
    provided: set[str] = set()
    while True:
        test = channel.read()["test"]
        channel.write("V", _verdict(test, entry_point, space, provided, channel))


if __name__ == "__main__" and "request" in globals():
    _serve(globals()["request"]["more"])
