"""Calls with a time limit that holds in every thread and for code in C: they run in a process, which is ended when it is late.

Python's signals only reach the main thread, and neither interrupt a regular expression nor the power of two large numbers.
"""

from __future__ import annotations

import atexit
import signal
from functools import cache
from typing import Any

from quartet.contract.trajectory import Outcome
from quartet.errors import FunctionFailed
from quartet.system.user_function import FunctionWorker
from quartet.verifiers.errors import ComputationTooLarge, VerifierError, VerifierTimeout

MEMORY_BYTES = 4 * 1024**3
"""Address space of the process."""
_ENDED_BY_INPUT = ("SIGPROF", "SIGSEGV", "SIGABRT")
"""Signals that end the process when it uses too much CPU time or its input breaks a library."""


def call_bounded(function: str, arguments: list[Any], seconds: float) -> Any:
    """Call package.module:function with JSON values in its process and return its result, a JSON value.

    Raises VerifierTimeout after ``seconds``, ComputationTooLarge if the function exceeds ``limit_cpu`` or ends its process, and
    VerifierError if it fails.
    """
    try:
        return _worker(function).call(arguments, seconds)
    except FunctionFailed as error:
        if error.outcome == Outcome.TIMEOUT:
            name = function.partition(":")[2]
            raise VerifierTimeout(
                f"{name} took longer than {seconds:g} s; shorten the input or raise seconds"
            ) from None
        if str(error).endswith(tuple(f"was killed by {name}" for name in _ENDED_BY_INPUT)):
            raise ComputationTooLarge(str(error)) from None
        raise VerifierError(str(error)) from None


def limit_memory() -> None:
    """Limit the address space of this process, which runs one of these functions. Without effect on macOS."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def limit_cpu(seconds: float) -> None:
    """End this process with SIGPROF after ``seconds`` of CPU time from now on. 0: no limit."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)


@cache
def _worker(function: str) -> FunctionWorker:
    worker = FunctionWorker(function, "verifier", quotes=False)
    atexit.register(worker.close)
    return worker
