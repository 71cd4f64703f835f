"""Calls with a time limit that holds in every thread and for code in C: they run in a process, which is ended when it is late.

Python's signals only reach the main thread, and neither interrupt a regular expression nor the power of two large numbers.
"""

from __future__ import annotations

import atexit
from functools import cache
from typing import Any

from quartet.errors import FunctionFailed
from quartet.rewards.function_worker import FunctionWorker
from quartet.types import Outcome
from quartet.verifiers.errors import VerifierError, VerifierTimeout

MEMORY_BYTES = 4 * 1024**3
"""Address space of the process."""


def call_bounded(function: str, arguments: list[Any], seconds: float) -> Any:
    """Call package.module:function with JSON values in its process and return its result, a JSON value.

    Raises VerifierTimeout after ``seconds``, and VerifierError if the function fails.
    """
    try:
        return _worker(function).call(arguments, seconds)
    except FunctionFailed as error:
        if error.outcome == Outcome.TIMEOUT:
            name = function.partition(":")[2]
            raise VerifierTimeout(
                f"{name} took longer than {seconds:g} s; shorten the input or raise seconds"
            ) from None
        raise VerifierError(str(error)) from None


def limit_memory() -> None:
    """Limit the address space of this process, which runs one of these functions. Without effect on macOS."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


@cache
def _worker(function: str) -> FunctionWorker:
    worker = FunctionWorker(function, "verifier", quotes=False)
    atexit.register(worker.close)
    return worker
