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
from collections import deque
from typing import Any

MODULE = "solution"
"""Name under which tests can import the program."""
PLAIN: tuple[Any, ...] = (list, tuple, set, frozenset, deque)
MAX_JSON_BITS = 1024
"""Longer integers are sent in hexadecimal, see calls.py."""

FIRST_ITEMS = 64
"""Number of items of an iterator that are fetched one at a time."""
MAX_ITEMS = 256
"""Maximum number of items of an iterator in a call."""


class ProgramError(Exception):
    """An exception of the program that Python does not define."""


class Unsupported(BaseException):
    """A test does something with the program that a checker in another sandbox cannot do. The text says what."""


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
        self._ahead: dict[int, list[Any]] = {}
        self._taken: dict[int, int] = {}

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

    def lookup(self, name: str) -> Any:
        """Return what the program defines under a name. A name with a capital letter is that of a class."""
        value = self.call("name", name)
        if isinstance(value, Remote):
            value.__dict__["_is_class"] = name[:1].isupper()
        return value

    def next_item(self, iterator: Remote) -> Any:
        """Return the next item of an iterator. Fetches several at a time of one that gave many, because each call takes time."""
        number = iterator._number
        if not self._ahead.get(number):
            taken = self._taken.get(number, 0)
            items = self.call("take", iterator, 1 if taken < FIRST_ITEMS else min(taken, MAX_ITEMS))
            self._ahead[number] = items[::-1]
            self._taken[number] = taken + len(items)
        return self._ahead[number].pop()

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
            raise kind(text if kind is NameError else "")
        raise ProgramError(name)


class Remote:
    """An object of the program, for example one of its functions. Python's functions and operators run in the program.

    The program must not decide how a result compares with expected data. So an operator gets plain data only for an object
    that the test makes by calling a class, as in ``Vector(1, 2) * 3``.
    """

    def __init__(self, channel: Channel, number: int) -> None:
        self.__dict__.update(_channel=channel, _number=number, _is_class=False, _is_made=False)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return _mark(self._channel.call("call", self, *arguments, **named), self._is_class)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._channel.call("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._channel.call("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._channel.call("delattr", self, name)

    def __eq__(self, other: object) -> Any:
        if isinstance(other, Remote) and other._number == self._number:
            return True
        return _operate("eq", self, self, other)

    def __ne__(self, other: object) -> Any:
        return not self == other

    def __hash__(self) -> int:
        number: int = self._channel.call("hash", self)
        return number

    def __next__(self) -> Any:
        return self._channel.next_item(self)

    def __contains__(self, item: Any) -> Any:
        if self._is_made or isinstance(item, Remote):
            return self._channel.call("contains", self, item)
        return any(item is each or item == each for each in self._channel.call("iter", self))

    def __instancecheck__(self, instance: Any) -> Any:
        return isinstance(instance, Remote) and self._channel.call("isinstance", instance, self)

    def __subclasscheck__(self, subclass: Any) -> Any:
        return isinstance(subclass, Remote) and self._channel.call("issubclass", subclass, self)

    def __enter__(self) -> Any:
        return self._channel.call("getattr", self, "__enter__")()

    def __exit__(self, *exception: object) -> None:
        self._channel.call("getattr", self, "__exit__")(None, None, None)

    def __deepcopy__(self, memo: object) -> Any:
        return _mark(self._channel.call("deepcopy", self), self._is_made)

    def __mro_entries__(self, bases: object) -> Any:
        raise Unsupported("derives a class from one of the program's, which the checker cannot do")

    def __await__(self) -> Any:
        raise Unsupported("awaits the program, which the checker cannot do")


def _mark(value: Any, is_made: bool) -> Any:
    """Return a result, marked if it is an object that the test made."""
    if is_made and isinstance(value, Remote):
        value.__dict__["_is_made"] = True
    return value


def _operate(name: str, target: Remote, *operands: Any) -> Any:
    """Apply an operator in the program. It gets plain data only if the test made the object, see ``Remote``."""
    if not target._is_made and not all(isinstance(each, Remote) for each in operands):
        return NotImplemented
    is_made = any(isinstance(each, Remote) and each._is_made for each in operands)
    return _mark(target._channel.call(name, *operands), is_made)


UNARY = (
    *("len", "iter", "reversed", "bool", "str", "repr", "format", "float", "int", "complex", "index", "round"),
    *("abs", "neg", "pos", "invert", "getitem", "setitem", "delitem", "copy"),
)
"""Operators without plain operands, except for indices, digits and formats."""
ORDERING = ("lt", "le", "gt", "ge")
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lshift", "rshift", "and", "or", "xor")


def _add_operators() -> None:
    def unary(name: str) -> Any:
        return lambda self, *arguments: _mark(self._channel.call(name, self, *arguments), self._is_made)

    def binary(name: str) -> Any:
        return lambda self, other: _operate(name, self, self, other)

    def reflected(name: str) -> Any:
        return lambda self, other: _operate(name, self, other, self)

    for name in UNARY:
        setattr(Remote, f"__{name}__", unary(name))
    for name in ORDERING:
        setattr(Remote, f"__{name}__", binary(name))
    for name in (*BINARY, "divmod"):
        function = f"{name}_" if name in ("and", "or") else name
        setattr(Remote, f"__{name}__", binary(function))
        setattr(Remote, f"__r{name}__", reflected(function))
    for name in BINARY:
        setattr(Remote, f"__i{name}__", binary(f"i{name}"))


_add_operators()


class Module(types.ModuleType):
    """The program as a module, for tests that import from it."""

    channel: Channel

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.channel.lookup(name)


def encode(value: Any) -> Any:
    """Return a value as JSON. Raises Unsupported if it is neither plain data nor an object of the program."""
    if isinstance(value, int) and value.bit_length() > MAX_JSON_BITS:
        return {"int": hex(value)}
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
        return {"range": [encode(each) for each in (value.start, value.stop, value.step)]}
    if _is_a(value, "fractions", "Fraction"):
        return {"Fraction": [encode(value.numerator), encode(value.denominator)]}
    if _is_a(value, "decimal", "Decimal"):
        return {"Decimal": str(value)}
    raise Unsupported(
        f"gives the program a value of type {type(value).__name__}, expected plain data such as numbers, text and lists"
    )


def _is_a(value: Any, module: str, name: str) -> bool:
    """Return whether a value is of a class. Does not import the module, because that takes time."""
    return module in sys.modules and isinstance(value, getattr(sys.modules[module], name))


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
    if kind == "int":
        return int(content, 16)
    if kind == "range":
        return range(*[decode(each, channel) for each in content])
    if kind == "Fraction":
        from fractions import Fraction

        return Fraction(*[decode(each, channel) for each in content])
    if kind == "Decimal":
        from decimal import Decimal

        return Decimal(content)
    for plain in PLAIN:
        if plain.__name__ == kind:
            return plain(decode(each, channel) for each in content)
    raise ValueError(kind)


def _update(own: Any, changed: Any) -> None:
    """Give a list, deque, dict or set of the test the content that the program left in its copy."""
    if type(own) is not type(changed) or own == changed:
        return
    if isinstance(own, (list, bytearray)):
        own[:] = changed
    elif isinstance(own, deque):
        own.clear()
        own.extend(changed)
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
        code = compile(text, "<test>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return {"unusable": f"is not Python (line {getattr(error, 'lineno', None) or 1})"}
    try:
        for name in sorted(names_to_provide(text, entry_point) - (set(space) - provided)):
            space[name] = channel.lookup(name)
            provided.add(name)
        exec(code, space)  # noqa: S102 - the sandbox exists to run it
        if entry_point and isinstance(space.get("check"), types.FunctionType):
            space["check"](space[entry_point])
    except AssertionError:
        return {"kind": "wrong answer"}
    except MemoryError:
        return {"kind": "memory limit"}
    except Unsupported as error:
        return {"unusable": str(error)}
    except BaseException as error:
        if type(error) is TypeError and str(error).startswith("catching classes that do not inherit"):
            return {
                "unusable": "catches an exception class of the program, which the checker cannot do; catch Exception"
            }
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
