"""The process that runs agents, many at once on one event loop.

``python -m quartet.environments.agent_child DESCRIPTOR``

Reads settings, then runs and cancellations from standard input, and writes results to DESCRIPTOR, one JSON object per line. When
standard input ends, because its parent has closed it or has died, this process kills all agents and ends. See
``quartet.environments.agent_worker`` for the parent.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import os
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from quartet.environments.agent_command import run_command
from quartet.environments.agent_results import OUTCOMES, Result, Unusable, failed, result_of
from quartet.environments.environment import EnvironmentFailed
from quartet.system.child_processes import kill_descendants
from quartet.system.user_code import NotImportable, import_callable, location_of, required_parameters, text_of
from quartet.system.user_function_child import take_pipes

PARAMETERS = ("fields", "base_url", "api_key", "model", "seed", "session")
"""What an agent that is a function gets, by name."""
HINT = "; the text is left out because it may quote a response: set environment.quote_texts: true to see it"
_PR_SET_CHILD_SUBREAPER = 36

Run = Callable[[Mapping[str, Any]], Awaitable[Result]]
"""Runs the agent for one trajectory. The argument has the fields of ``AgentRun``."""


def unusable_reason(function: Any, keywords: Sequence[str] = ()) -> str:
    """Return why ``function`` is no agent, or "" if it is one."""
    call = function if inspect.isroutine(function) else getattr(function, "__call__", None)  # noqa: B004
    if not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(call):
        return "is not async; define it with async def, because many agents share a process"
    unknown = [name for name in required_parameters(function) if name not in PARAMETERS]
    if unknown:
        return f"has the parameter {unknown[0]}; an agent gets what it names of {', '.join(PARAMETERS)}"
    return ""


def function_agent(name: str, quotes: bool) -> Run:
    """Import the function ``name`` and return what runs it. Raises NotImportable."""
    function = import_callable(name)
    if problem := unusable_reason(function):
        raise NotImportable(problem)
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    named = {each.name for each in parameters}

    async def run(given: Mapping[str, Any]) -> Result:
        values = {**given, "fields": json.loads(given["fields"] or "{}")}
        try:
            value = await function(**{key: value for key, value in values.items() if takes_all or key in named})
            return result_of(value)
        except Unusable as error:
            return failed(f"its result {error}")
        except Exception as error:
            return _failure(error, quotes)

    return run


def _failure(error: Exception, quotes: bool) -> Result:
    """Return the failure that an exception means."""
    explained = isinstance(error, EnvironmentFailed)
    kind, text = type(error).__name__, text_of(error) if quotes or explained else ""
    traceback.print_tb(error.__traceback__)
    print(f"{kind}: {text}" if text else kind, file=sys.stderr, flush=True)
    outcome = getattr(error, "outcome", None)
    if explained and text:
        return failed(text, outcome if outcome in OUTCOMES else "environment_error")
    location = location_of(error)
    return failed(f"raised {kind}{f' at {location}' if location else ''}{': ' + text if text else HINT}")


def agent_of(settings: Mapping[str, Any]) -> Run:
    """Return what runs the agent of ``settings``. Raises NotImportable, ConfigError."""
    if settings["function"] is not None:
        return function_agent(settings["function"], settings["quotes"])
    if settings["url"] is not None:
        # Its libraries take a noticeable time to import.
        from quartet.environments.agent_http import HttpAgents

        return HttpAgents(
            settings["url"],
            settings["api_key_file"],
            settings["certificate_authority_file"],
            settings["max_concurrent"],
        ).run

    return lambda run: run_command(settings["command"], run, settings["quotes"])


class _Runs:
    """The runs of this process, by number. Used on the event loop only."""

    def __init__(self, agent: Run, seconds: float, answers: BinaryIO) -> None:
        self._agent, self._seconds, self._answers = agent, seconds, answers
        self._tasks: dict[int, asyncio.Task[Result]] = {}

    def take(self, message: dict[str, Any]) -> None:
        """Start or cancel a run."""
        number = message["number"]
        if "run" in message:
            task = self._tasks[number] = asyncio.create_task(self._run(message["run"]))
            task.add_done_callback(lambda ended: self._end(number, ended))
        elif number in self._tasks:
            self._tasks[number].cancel()

    async def _run(self, run: Mapping[str, Any]) -> Result:
        try:
            async with asyncio.timeout(self._seconds):
                return await self._agent(run)
        except TimeoutError:
            what = f"took longer than {self._seconds:g} s (environment.agent.timeout_seconds), and was ended"
            return failed(what, "timeout")
        except Exception as error:  # Such as a process that cannot be started, because there are too many.
            traceback.print_exc()
            return failed(f"cannot be run ({type(error).__name__}: {text_of(error)})")
        except (SystemExit, KeyboardInterrupt) as error:  # sys.exit() of one agent is no reason to end the process.
            return failed(f"raised {type(error).__name__}")

    def _end(self, number: int, ended: asyncio.Task[Result]) -> None:
        del self._tasks[number]
        cancelled = failed("was cancelled by its caller", "cancelled")
        _say(self._answers, {"number": number, "result": cancelled if ended.cancelled() else ended.result()})


async def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Run agents until this process is ended."""
    settings = json.loads(requests.readline())
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    # For asyncio.to_thread: the default is a few threads, in which agents would wait for each other.
    loop.set_default_executor(ThreadPoolExecutor(settings["max_concurrent"], "agent"))
    try:
        runs = _Runs(agent_of(settings), settings["timeout_seconds"], answers)
    except Exception as error:
        _say(answers, {"number": 0, "unusable": text_of(error)})
        return
    _say(answers, {"number": 0})

    def read() -> None:
        for line in requests:
            loop.call_soon_threadsafe(runs.take, json.loads(line))
        # On this thread, because an agent may block the loop. Orphans of agents are children of this process.
        kill_descendants()
        os._exit(0)

    threading.Thread(target=read, name="requests", daemon=True).start()
    await ended.wait()


def _say(answers: BinaryIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message).encode() + b"\n")
    answers.flush()


def main(descriptor: str) -> None:
    """Serve the parent. ``descriptor``: number of the pipe for results."""
    if sys.platform == "linux":
        # Processes that leave their agent stay below this process, which can end them.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    asyncio.run(_serve(*take_pipes(int(descriptor))))


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
