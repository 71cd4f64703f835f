"""The process that runs a user's function.

``python -m quartet.rewards.function_worker_main package.module:callable DESCRIPTOR [quotes]``

Reads calls from standard input and writes responses to DESCRIPTOR, one JSON object per line. A response has the number of its
call; the first response has number 0. This module imports only the standard library, so that the process starts fast. The parent
process runs ``quartet.rewards.function_worker``.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

from quartet.user_code import NotImportable, import_callable, location_of, text_of, wrong_arguments


def main(function_name: str, descriptor: str, quotes: str = "") -> None:
    """Report whether the function can be imported, then answer calls until standard input ends.

    ``quotes``: not empty to report the text of exceptions, which may quote prompts and responses. The text of an exception whose
    attribute ``quotes_texts`` is False is always reported.
    """
    requests, answers = _take_pipes(int(descriptor))
    try:
        function = import_callable(function_name)
    except NotImportable as error:
        _say(answers, json.dumps({"number": 0, "unusable": str(error)}))
        return
    _say(answers, json.dumps({"number": 0, "ready": True}))
    for line in requests:
        request = json.loads(line)
        _say(
            answers,
            answer(function, request["number"], request["arguments"], bool(quotes), request.get("keywords", {})),
        )


def answer(
    function: Callable[..., Any],
    number: int,
    arguments: list[Any],
    quotes: bool = False,
    keywords: dict[str, Any] | None = None,
) -> str:
    """Call the function, which may be async, and return the outcome as a JSON object.

    It has the ``number`` of the call, and one of: the function's ``result``; ``raised``, the exception's type, with its
    ``location``, ``text`` (null if it is left out) and ``outcome`` (its attribute of this name, or null); ``not_json``, the type
    of the result.
    """
    try:
        named = keywords or {}
        if problem := wrong_arguments(function, len(arguments), tuple(named)):
            return json.dumps({"number": number, "raised": "TypeError", "location": "", "text": problem})
        result = function(*arguments, **named)
        if inspect.isawaitable(result):
            import asyncio  # Only for an async function: the process starts fast.

            result = asyncio.run(_awaited(result))
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
    try:
        return json.dumps({"number": number, "result": result}, default=_plain)
    except Exception:
        return json.dumps({"number": number, "not_json": type(result).__name__})


async def _awaited(result: Any) -> Any:
    return await result


def _plain(value: Any) -> Any:
    """Convert numbers and arrays of NumPy and torch to Python values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _take_pipes(descriptor: int) -> tuple[BinaryIO, BinaryIO]:
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
