"""The process that runs a user's function.

``python -m quartet.system.user_function_child package.module:callable DESCRIPTOR [quotes]``

Reads calls from standard input and writes responses to DESCRIPTOR, one JSON object per line. A response has the number of its
call; the first response has number 0. This module imports only the standard library, so that the process starts fast. The parent
process runs ``quartet.system.user_function``.
"""

from __future__ import annotations

import decimal
import inspect
import json
import math
import numbers
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

from quartet.contract.logged_values import MAX_NAMES, clean_name, clean_value, cleaned
from quartet.system.user_code import (
    NotImportable,
    import_callable,
    location_of,
    required_parameters,
    text_of,
    wrong_arguments,
)


def main(function_name: str, descriptor: str, quotes: str = "") -> None:
    """Report whether the function can be imported, then answer calls until standard input ends.

    ``quotes``: not empty to report the text of exceptions, which may quote prompts and responses. The text of an exception whose
    attribute ``quotes_texts`` is False is always reported.
    """
    requests, answers = take_pipes(int(descriptor))
    try:
        function = import_callable(function_name)
    except NotImportable as error:
        _say(answers, json.dumps({"number": 0, "unusable": str(error)}))
        return
    _say(answers, json.dumps({"number": 0, "ready": True, "required": required_parameters(function)}))
    for line in requests:
        request = json.loads(line)
        _say(answers, answer(function, request, bool(quotes)))


def answer(function: Callable[..., Any], request: dict[str, Any], quotes: bool = False) -> str:
    """Call the function, which may be async, and return the outcome as a JSON object.

    ``request``: the ``number`` of the call, its ``arguments`` and ``keywords``. ``objects``: positions and names of those of them
    whose entries are to be attributes. ``logs``: the number of responses, if the function may log with ``log_metric`` and
    ``log_extra``. ``score_key``: key of the score, if other entries of a result are to be logged. ``single_lists``: see
    ``has_single_lists`` of ``quartet.rewards.signatures``. ``lists``: the result is to be a
    list.

    The outcome has the ``number``, and one of: the function's ``result``, with what it ``logged``; ``raised``, the exception's
    type, with its ``location``, ``text`` (null if it is left out) and ``outcome`` (its attribute of this name, or null);
    ``not_json``, a description of the result.
    """
    number, arguments, named = request["number"], list(request["arguments"]), dict(request.get("keywords") or {})
    log = _Log(request.get("logs") or 0)
    try:
        for place in request.get("objects") or ():
            holder: Any = arguments if isinstance(place, int) else named
            holder[place] = _Given(place if isinstance(place, str) else "the argument", holder[place])
        if request.get("logs"):
            named |= {"log_metric": log.metric, "log_extra": log.extra}
        if problem := wrong_arguments(function, len(arguments), tuple(named)):
            return json.dumps({"number": number, "raised": "TypeError", "location": "", "text": problem})
        result = function(*arguments, **named)
        if inspect.isawaitable(result):
            import asyncio  # Only for an async function: the process starts fast.

            result = asyncio.run(_awaited(result))
        if request.get("lists") and isinstance(result, Iterable) and not isinstance(result, _NO_LISTS):
            result = list(result)
        logged = log.values()
    except BaseException as error:  # sys.exit() of one call is no reason to end the process
        shows_text = quotes or getattr(error, "quotes_texts", True) is False
        kind, text = type(error).__name__, text_of(error) if shows_text else None
        traceback.print_tb(error.__traceback__)
        print(f"{kind}: {text}" if text else kind, file=sys.stderr)
        outcome = getattr(error, "outcome", None)
        return json.dumps(
            {
                "number": number,
                "raised": kind,
                "location": location_of(error),
                "text": text,
                "outcome": outcome if isinstance(outcome, str) else None,
            }
        )
    score_key = request.get("score_key")
    if score_key is not None and isinstance(result, dict) and score_key in result:
        nested = result.get("extra_logs") if request.get("single_lists") else None
        beside = {**result, **nested, "extra_logs": None} if isinstance(nested, dict) else result
        logged = {"metrics": _logged_beside(beside, score_key, bool(request.get("single_lists")))}
        result = {score_key: _single(result[score_key]) if request.get("single_lists") else result[score_key]}
    try:
        return json.dumps({"number": number, "result": result_values(result), **({"logged": logged} if logged else {})})
    except Exception:
        return json.dumps({"number": number, "not_json": described(result)})


async def _awaited(result: Any) -> Any:
    return await result


class Misuse(TypeError):
    """A function used what it was given in a way that has no meaning. The text quotes no prompt and no response."""

    quotes_texts = False


class _Given:
    """Object with the attributes that a trainer elsewhere would give, as far as there are any here."""

    def __init__(self, name: str, values: dict[str, Any]) -> None:
        self.__dict__.update(values)
        self.__dict__["_name"] = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = ", ".join(key for key in vars(self) if key != "_name")
        error = AttributeError(f"{vars(self)['_name']} has no {name} here; it has {known}")
        error.quotes_texts = False  # type: ignore[attr-defined]
        raise error


class _Log:
    """Logged values of one call of a function for ``count`` responses."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._metrics: dict[str, list[float]] = {}
        self._columns: dict[str, list[Any]] = {}

    def metric(self, name: str, value: Any) -> None:
        """Log a number. The metric is the mean over the calls."""
        key = self._key("log_metric", name, self._metrics)
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise Misuse(
                f"log_metric({key!r}): the value is {described(value)}, expected a number; pass float(value)"
            ) from None
        if key and clean_value(number) is None:
            _note(f"log_metric({key!r}): {number} is left out, expected a finite number")
        elif key:
            self._metrics.setdefault(key, []).append(number)

    def extra(self, column: str, values: Any) -> None:
        """Log one value for each response."""
        if isinstance(values, str) or not hasattr(values, "__iter__"):
            raise Misuse(
                f"log_extra({clean_name(column)!r}): got {described(values)}, expected a list with one value per completion"
            )
        if key := self._key("log_extra", column, self._columns):
            self._columns.setdefault(key, []).extend(values)

    def values(self) -> dict[str, Any]:
        """Return the means of the metrics, and the columns, by name."""
        for name in [name for name, values in self._columns.items() if len(values) != self._count]:
            count = len(self._columns.pop(name))
            _note(f"log_extra({name!r}): {count} values for {self._count} completions are left out; pass one for each")
        columns = {name: [_plain_or_none(name, value) for value in values] for name, values in self._columns.items()}
        means = {name: math.fsum(values) / len(values) for name, values in self._metrics.items()}
        return {key: value for key, value in (("metrics", means), ("columns", columns)) if value}

    def _key(self, caller: str, name: Any, known: dict[str, Any]) -> str:
        """Return the clean name, or "" if there are too many. Raises Misuse."""
        key = clean_name(name)
        if not key:
            raise Misuse(f"{caller}: the name is {described(name)}, expected a text")
        if key not in known and len(known) >= MAX_NAMES:
            _note(f"{caller}({key!r}): left out, because a call has at most {MAX_NAMES} names")
            return ""
        return key


def _logged_beside(result: dict[Any, Any], score_key: str, single_lists: bool) -> dict[str, Any]:
    """Return the entries of a result beside the score that can be recorded."""
    values = {name: _single(value) if single_lists else value for name, value in result.items() if name != score_key}
    return cleaned({name: _plain_or_none(name, value) for name, value in values.items()})


def _single(value: Any) -> Any:
    """Return the value in a list, array or tensor with one value; any other as it is."""
    has_one = hasattr(value, "__len__") and not isinstance(value, str | dict) and getattr(value, "ndim", 1) > 0
    return next(iter(value)) if has_one and len(value) == 1 else value


def _plain_or_none(name: Any, value: Any) -> Any:
    """Return a value as it is recorded. Notes one that cannot be, once for each name and type."""
    if value is None:
        return None
    try:
        plain = clean_value(json.loads(json.dumps(value, default=_plain)))
    except Exception:
        plain = None
    if plain is None:
        _note(f"logged {clean_name(name)!r}: {described(value)} is left out; numbers, booleans and texts are recorded")
    return plain


_noted: set[str] = set()


def _note(text: str) -> None:
    """Print a note once. The log of the reward service gets it."""
    if text not in _noted and len(_noted) < 1000:
        _noted.add(text)
        print(text, file=sys.stderr)


_NO_LISTS = (str, bytes, bytearray, dict, set, frozenset)
"""Types whose iteration has another order, or other values, than the responses."""


def result_values(result: Any) -> Any:
    """Return a result as JSON values. Raises an exception if it has none."""
    return [_value(each) for each in result] if isinstance(result, list) else _value(result)


def _value(value: Any) -> Any:
    if type(value).__module__.partition(".")[0] == "torch" and getattr(value, "numel", lambda: 0)() == 1:
        return value.item()  # A tensor with one number is that number.
    return json.loads(json.dumps(value, default=_plain))


def _plain(value: Any) -> Any:
    """Convert numbers and arrays of NumPy and torch, decimal numbers and fractions to Python values."""
    if hasattr(value, "tolist"):
        plain = value.tolist()
        if type(plain) is not type(value):
            return plain
    if isinstance(value, numbers.Real | decimal.Decimal):
        return float(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def described(value: Any) -> str:
    """Describe a value that is not JSON: its type, and in a list or an object where the first such value is. Quotes no text."""
    kind = type(value).__name__
    if isinstance(value, list | tuple | dict):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in entries:
            try:
                _value(entry)
            except Exception:
                place = f"index {key}" if isinstance(key, int) else "a key"
                return f"a {kind} with a value of type {type(entry).__name__} at {place}"
    return f"a value of type {kind}"


def take_pipes(descriptor: int) -> tuple[BinaryIO, BinaryIO]:
    """Return both pipes, hidden from the function, which may read standard input or start processes that inherit descriptors."""
    calls = os.dup(0)
    os.set_inheritable(descriptor, False)
    _redirect_to_null(0)
    # A fork of this process has the pipes open even if they are not inheritable.
    os.register_at_fork(after_in_child=lambda: _redirect_to_null(calls, descriptor))
    return os.fdopen(calls, "rb"), os.fdopen(descriptor, "wb")


def _redirect_to_null(*descriptors: int) -> None:
    """Replace pipes with /dev/null."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nothing, descriptor, inheritable=descriptor == 0)
    os.close(nothing)


def _say(answers: BinaryIO, message: str) -> None:
    answers.write(message.encode() + b"\n")
    answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
    # Threads that the function started do not keep the process alive.
    sys.stdout.flush()
    os._exit(0)
