"""Run a program and answer calls of its functions. The checker, in another sandbox, makes the calls (see checks.py).

Calls come as lines of JSON on standard input, and results go to standard output. The program has neither: what it prints is lost,
and it knows neither the tests nor the expected results. Values are encoded by ``encode``. A value that is not plain data stays
here, and the checker gets its number.
"""

from __future__ import annotations

import builtins
import json
import operator
import os
import sys
from typing import Any

MAX_JSON_BITS = 1024
"""Longer integers are sent in hexadecimal, because Python limits the length of decimal integers that it reads."""
_OBJECTS: dict[int, Any] = {}
_COLLECTIONS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any) -> Any:
    """Return a value as JSON. Plain data is copied, also that of subclasses. Other objects are numbered."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__index__(value)
        return number if number.bit_length() <= MAX_JSON_BITS else {"int": hex(number)}
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {type(value).__name__: bytes(value).hex()}
    for name, kind in _COLLECTIONS.items():
        if isinstance(value, kind):
            return {name: [encode(each) for each in kind.__iter__(value)]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(each)] for key, each in dict.items(value)]}
    if isinstance(value, range):
        return {"range": [encode(each) for each in (value.start, value.stop, value.step)]}
    if _is_a(value, "fractions", "Fraction"):
        return {"Fraction": [encode(value.numerator), encode(value.denominator)]}
    if _is_a(value, "decimal", "Decimal"):
        return {"Decimal": str(value)}
    if _is_a(value, "collections", "deque"):
        return {"deque": [encode(each) for each in value]}
    _OBJECTS[id(value)] = value
    return {"object": id(value)}


def _is_a(value: Any, module: str, name: str) -> bool:
    """Return whether a value is of a class. Does not import the module, because that takes time."""
    return module in sys.modules and isinstance(value, getattr(sys.modules[module], name))


def decode(value: Any) -> Any:
    """Return the value that the checker sent."""
    if not isinstance(value, dict):
        return value
    kind, content = next(iter(value.items()))
    if kind == "object":
        return _OBJECTS[content]
    if kind == "complex":
        return complex(*content)
    if kind in ("bytes", "bytearray"):
        return (bytes if kind == "bytes" else bytearray).fromhex(content)
    if kind == "dict":
        return {decode(key): decode(each) for key, each in content}
    if kind == "int":
        return int(content, 16)
    if kind == "range":
        return range(*map(decode, content))
    if kind == "Fraction":
        from fractions import Fraction

        return Fraction(*map(decode, content))
    if kind == "Decimal":
        from decimal import Decimal

        return Decimal(content)
    if kind == "deque":
        from collections import deque

        return deque(map(decode, content))
    return _COLLECTIONS[kind](map(decode, content))


def _answer(call: dict[str, Any], program: dict[str, Any]) -> dict[str, Any]:
    try:
        what, arguments = call["do"], [decode(value) for value in call["arguments"]]
        if what == "name":
            name = arguments[0]
            if name not in program:
                return {"raised": "NameError", "text": f"the program does not define {name}"}
            return {"value": encode(program[name])}
        if what == "call":
            named = {name: decode(value) for name, value in call["named"].items()}
            result = arguments[0](*arguments[1:], **named)
            # Arguments that the function changed in place: the checker changes its own copies.
            return {"value": encode(result), "arguments": [encode(value) for value in arguments[1:]]}
        if what == "take":
            return {"value": encode(_take(*arguments))}
        # A function of Python, such as len or operator.add.
        function = getattr(operator, what, None) or getattr(builtins, what, None) or _copier(what)
        return {"value": encode(function(*arguments))}
    except MemoryError:
        return {"raised": "MemoryError", "text": ""}
    except BaseException as error:  # Also sys.exit().
        return {"raised": type(error).__name__, "text": ""}


def _take(iterator: Any, number: int) -> list[Any]:
    """Return up to ``number`` items of an iterator. Raises StopIteration if there are none."""
    items = [next(iterator)]
    try:
        while len(items) < number:
            items.append(next(iterator))
    except StopIteration:
        pass
    return items


def _copier(name: str) -> Any:
    import copy

    return getattr(copy, name)


def _serve(source: str) -> None:
    calls, results = os.dup(0), os.dup(1)
    nothing = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)
    program: dict[str, Any] = {"__name__": "solution", "__file__": sys.argv[0]}
    try:
        exec(compile(source, sys.argv[0], "exec"), program)  # noqa: S102
        answer: dict[str, Any] = {"value": None}
    except BaseException as error:
        answer = {"raised": type(error).__name__, "text": ""}
    with os.fdopen(calls, "rb") as lines, os.fdopen(results, "wb") as output:
        for line in lines:
            call = json.loads(line)
            if call["do"] != "start":
                answer = _answer(call, program)
            try:
                message = json.dumps({"number": call["number"], **answer})
            except Exception as error:
                message = json.dumps({"number": call["number"], "raised": type(error).__name__, "text": ""})
            output.write(message.encode() + b"\n")
            output.flush()


if __name__ == "__main__" and "request" in globals():
    _serve(globals()["request"]["source"])
    os._exit(0)
