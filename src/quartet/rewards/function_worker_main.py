"""The process that runs a user's function.

``python -m quartet.rewards.function_worker_main package.module:callable DESCRIPTOR [quotes]``

Calls come on standard input and answers go to DESCRIPTOR, one JSON object a line; an answer bears the number of its call, the
first answer number 0. The standard library alone is imported here, so that the process starts fast; what the function imports
is its own affair. The other end is ``quartet.rewards.function_worker``.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

MAX_REASON = 300
"""Characters of an exception's text that are passed on."""


class UnusableFunction(Exception):
    """There is no such function; the text says why."""


def main(function_name: str, descriptor: str, quotes: str = "") -> None:
    """Says whether the function can be used, then answers calls until standard input ends.

    ``quotes``: not empty where what an exception says is told, though it may quote prompts and responses: it is for logs.
    """
    requests, answers = _take_pipes(int(descriptor))
    # Last: a file that is called as a library is not to take its place.
    sys.path.append(os.getcwd())
    try:
        function = load_function(function_name)
    except UnusableFunction as error:
        _say(answers, json.dumps({"number": 0, "unusable": str(error)}))
        return
    _say(answers, json.dumps({"number": 0, "ready": True}))
    for line in requests:
        request = json.loads(line)
        _say(answers, answer(function, request["number"], request["arguments"], bool(quotes)))


def load_function(name: str) -> Callable[..., Any]:
    """Imports package.module:callable. Raises UnusableFunction."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:  # a module may do anything, sys.exit() included
        top = sys.modules.get(module_name.partition(".")[0])
        elsewhere = _elsewhere(top) if top is not None and isinstance(error, ModuleNotFoundError) else ""
        raise UnusableFunction(f"cannot be imported from {Path.cwd()}: {describe(error)}{elsewhere}") from None
    function = getattr(module, attribute, None)
    if function is None:
        close = difflib.get_close_matches(attribute, vars(module), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UnusableFunction(f"module {module_name} has no {attribute}{hint}{_elsewhere(module)}")
    if not callable(function):
        raise UnusableFunction(f"is a value of type {type(function).__name__}, expected a function")
    return function  # type: ignore[no-any-return]


def _elsewhere(module: ModuleType) -> str:
    """Which module it is, where one of the working directory is called alike and was not taken."""
    top, file = module.__name__.partition(".")[0], getattr(module, "__file__", None) or _folder(module)
    alike = [path for path in (Path.cwd() / top, Path.cwd() / f"{top}.py") if path.exists()]
    if not alike or Path(file).is_relative_to(Path.cwd()):
        return ""
    return f"; it is {file}, which comes before {alike[0]}: call that otherwise"


def _folder(module: ModuleType) -> str:
    return next(iter(getattr(module, "__path__", ())), "Python's own")


def answer(function: Callable[..., Any], number: int, arguments: list[Any], quotes: bool = False) -> str:
    """Calls the function and says how that went, as a JSON object.

    It has the ``number`` of the call, and the function's ``result``; or what it ``raised``; or the type of what is ``not_json``.
    """
    try:
        _check_call(function, arguments)
        result = function(*arguments)
    except WrongArguments as error:
        return json.dumps({"number": number, "raised": str(error)})
    except BaseException as error:  # sys.exit() of one call is no reason to end the process
        reason = describe(error, quotes)
        traceback.print_tb(error.__traceback__)
        print(reason, file=sys.stderr)
        return json.dumps({"number": number, "raised": reason})
    try:
        return json.dumps({"number": number, "result": result}, default=_plain)
    except Exception:
        return json.dumps({"number": number, "not_json": type(result).__name__})


class WrongArguments(Exception):
    """A function cannot be called like this; the text says why, and nothing of the arguments."""


def _check_call(function: Callable[..., Any], arguments: list[Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Of some that are written in C nothing is known.
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise WrongArguments(f"TypeError: {error}, called with {len(arguments)} arguments") from None


def describe(error: BaseException, quotes: bool = True) -> str:
    """An exception's type and text, and the file and line that raised it, in one line.

    Unless it ``quotes``, the text is left out: it may repeat prompts and responses.
    """
    place = _place(error)
    if not quotes:
        return f"{type(error).__name__} ({place or 'no line'}; what it says is left out, it may quote a text)"
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = ""
    if len(text) > MAX_REASON:
        text = text[:MAX_REASON] + "..."
    return f"{type(error).__name__}{': ' if text else ''}{text}{f' ({place})' if place else ''}"


def _place(error: BaseException) -> str:
    """Nothing where no line but of this file and of Python's import is to blame."""
    mine = (__file__, importlib.__file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in mine]
    frames = [frame for frame in frames if not frame.filename.startswith("<frozen importlib")]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def _plain(value: Any) -> Any:
    """NumPy's and torch's numbers and arrays as Python's own."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _take_pipes(descriptor: int) -> tuple[BinaryIO, BinaryIO]:
    """Both pipes, out of reach of the function: it may read standard input, and start processes that inherit descriptors."""
    calls = os.dup(0)
    os.set_inheritable(descriptor, False)
    _close_off(0)
    # A copy of this process that the function forks has the pipes open whatever is inheritable.
    os.register_at_fork(after_in_child=lambda: _close_off(calls, descriptor))
    return os.fdopen(calls, "rb"), os.fdopen(descriptor, "wb")


def _close_off(*descriptors: int) -> None:
    """Puts nothing to read and nowhere to write in the place of pipes."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nothing, descriptor, inheritable=descriptor == 0)
    os.close(nothing)


def _say(answers: BinaryIO, message: str) -> None:
    answers.write(message.encode() + b"\n")
    answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
    # Threads that the function left behind do not hold the process.
    sys.stdout.flush()
    os._exit(0)
