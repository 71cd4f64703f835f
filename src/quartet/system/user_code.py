"""Import of a callable that a config names as package.module:callable. Standard library only: a worker process starts fast."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

MAX_REASON = 300
"""Maximum number of characters of an exception's text in a message."""
CHECKED = "checked:"
"""Start of the result of ``python -m quartet.system.user_code``. Without it, the import has ended the process."""


class NotImportable(Exception):
    """The callable cannot be imported. The text says why."""


def import_callable(name: str) -> Callable[..., Any]:
    """Import package.module:callable. The working directory is searched last. Raises NotImportable."""
    here = os.getcwd()
    # Last, so that a user's file never hides a library of the same name.
    if here not in sys.path:
        sys.path.append(here)
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:  # A module may do anything on import, including sys.exit().
        top = sys.modules.get(module_name.partition(".")[0])
        shadow = _shadowed_by(top) if top is not None and isinstance(error, ModuleNotFoundError) else ""
        raise NotImportable(f"cannot be imported from {Path.cwd()}: {describe(error)}{shadow}") from None
    function = getattr(module, attribute, None)
    if function is None:
        close = difflib.get_close_matches(attribute, vars(module), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise NotImportable(f"module {module_name} has no {attribute}{hint}{_shadowed_by(module)}")
    if not callable(function):
        raise NotImportable(f"is a value of type {type(function).__name__}, expected a function")
    return function  # type: ignore[no-any-return]


def wrong_arguments(function: Callable[..., Any], count: int, keywords: Sequence[str] = ()) -> str:
    """Return why the function cannot be called with ``count`` positional arguments and ``keywords``, or "" if it can."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Some functions written in C have no signature.
        return ""
    try:
        signature.bind(*range(count), **dict.fromkeys(keywords))
    except TypeError as error:
        named = f" and {', '.join(keywords)} by name" if keywords else ""
        return f"{error}, called with {counted_arguments(count)}{named}"
    return ""


def required_parameters(function: Callable[..., Any]) -> list[str]:
    """Return the parameters without a default that can be given by name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [each.name for each in parameters if each.kind in by_name and each.default is inspect.Parameter.empty]


def wrong_columns(function: Callable[..., Any], keywords: Sequence[str], columns: Sequence[str] | None) -> str:
    """Return why the function cannot be called with ``keywords`` and the columns of the prompts by name, or "" if it can.

    Without knowledge of the ``columns``, each parameter may be one.
    """
    required = required_parameters(function)
    given = dict.fromkeys([*keywords, *(required if columns is None else columns)])
    if missing := [name for name in required if name not in given]:
        close = difflib.get_close_matches(missing[0], given, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        others = [name for name in columns or () if name not in keywords]
        return (
            f"its parameter {missing[0]} is no column of the prompts, which have "
            f"{', '.join(others[:20]) or 'no column'}{hint}; rename the parameter, give it a default, or "
            "rename a column with columns in data.sets"
        )
    # Every column and argument is passed by name, as TRL does.
    problem = wrong_arguments(function, 0, tuple(given))
    return f"{problem}; add **kwargs to its parameters" if "unexpected keyword" in problem else problem


def counted_arguments(count: int) -> str:
    """Return the number with its noun, such as "1 argument"."""
    return f"{count} argument{'' if count == 1 else 's'}"


def describe(error: BaseException) -> str:
    """Return an exception's type, text, and the file and line of the user's code that raised it, in one line."""
    text, location = text_of(error), location_of(error)
    return f"{type(error).__name__}{': ' if text else ''}{text}{f' ({location})' if location else ''}"


def text_of(error: BaseException) -> str:
    """Return an exception's text in one line of limited length. It may repeat prompts and responses."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        return ""
    return text if len(text) <= MAX_REASON else text[:MAX_REASON] + "..."


def location_of(error: BaseException) -> str:
    """Return the file and line of the user's code that raised an exception, or called the library that did; "" if unknown."""
    own = (__file__, importlib.__file__, str(Path(__file__).parents[1] / "system/user_function_child.py"))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in own]
    frames = [frame for frame in frames if not frame.filename.startswith("<frozen importlib")]
    libraries = tuple({f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib")})
    # A function of an installed package is itself in a library: then its own frame, the first, counts.
    users = [frame for frame in frames if not frame.filename.startswith(libraries)] or frames[:1]
    return f"{Path(users[-1].filename).name}:{users[-1].lineno}" if users else ""


def _shadowed_by(module: ModuleType) -> str:
    """Return a note if an installed module was imported instead of a file of the same name in the working directory."""
    top, file = module.__name__.partition(".")[0], getattr(module, "__file__", None) or _folder(module)
    alike = [path for path in (Path.cwd() / top, Path.cwd() / f"{top}.py") if path.exists()]
    if not alike or Path(file).is_relative_to(Path.cwd()):
        return ""
    return f"; {file} was imported instead of {alike[0]}, which has the same name: rename yours"


def _folder(module: ModuleType) -> str:
    return next(iter(getattr(module, "__path__", ())), "Python's own")


def _main(name: str, passed: str, descriptor: str) -> None:
    """Write to ``descriptor`` why package.module:callable cannot be called, nothing if it can.

    ``passed``: a JSON object with the ``count`` of positional arguments, the ``keywords``, and, if the function gets the columns
    of the prompts by name, ``columns``: their names, or null if they are not known. ``check``: a callable of Quartet that says
    why the callable cannot be used with the ``keywords``, or "".
    """
    answers = os.dup(int(descriptor))  # Not inherited by processes that the module starts.
    os.close(int(descriptor))
    call = json.loads(passed)
    try:
        function = import_callable(name)
        if call["check"]:
            problem = import_callable(call["check"])(function, call["keywords"])
        elif "columns" in call:
            problem = wrong_columns(function, call["keywords"], call["columns"])
        else:
            problem = wrong_arguments(function, call["count"], call["keywords"])
    except NotImportable as error:
        problem = str(error)
    os.write(answers, f"{CHECKED}{problem}".encode())


if __name__ == "__main__":
    _main(*sys.argv[1:])
