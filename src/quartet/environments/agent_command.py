"""One run of an agent that is a command: a process for each. Standard library only. See ``quartet.environments.agent_child``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from quartet.environments.agent_results import Result, Unusable, failed, result_of_line
from quartet.system.child_processes import tied_to_parent

END_SECONDS = 2.0
"""Time that an agent has to end after SIGTERM, before it is killed."""
MAX_LINE_BYTES = 64 * 1024
"""Maximum length of a line of output. The rest of a longer one is dropped."""
MAX_LOGGED_BYTES = 256 * 1024
"""Maximum bytes of the output of one run that are logged."""
HINT = "; the last line of its standard error is left out because it may quote a response: set environment.quote_texts: true"


def command_problem(command: Sequence[str]) -> str:
    """Return why a command cannot be started, or "" if it can."""
    if shutil.which(command[0]) is None:
        return f"no such program in {Path.cwd()} or in PATH; correct the name, or install it"
    return ""


async def run_command(command: Sequence[str], run: Mapping[str, Any], quotes: bool) -> Result:
    """Run ``command`` for one trajectory and return its result. The process and its children have ended then, also after a
    cancellation.

    ``run``: the fields of ``AgentRun``. ``quotes``: the detail of a failure may quote standard error.
    """
    environment = {
        **os.environ,
        "OPENAI_BASE_URL": run["base_url"],
        "OPENAI_API_KEY": run["api_key"],
        "OPENAI_MODEL": run["model"],
        "QUARTET_SESSION": run["session"],
        "QUARTET_SEED": str(run["seed"]),
        "PYTHONUNBUFFERED": "1",
    }
    with tempfile.TemporaryFile() as row, _Output(run["session"]) as printed, _Output(run["session"]) as errors:
        row.write((run["fields"] or "{}").encode() + b"\n")
        row.seek(0)
        # The kernel ends it if this process is killed. This process ends all of them if its parent does.
        process = await asyncio.create_subprocess_exec(
            *tied_to_parent(command),
            stdin=row,
            stdout=printed.descriptor,
            stderr=errors.descriptor,
            env=environment,
            start_new_session=True,
        )
        try:
            await printed.start()
            await errors.start()
            code = await process.wait()
        finally:
            # A second cancellation must not leave the process behind.
            await asyncio.shield(asyncio.ensure_future(_end(process, run["api_key"])))
            await asyncio.gather(printed.ended(), errors.ended())
    errors.log_last()
    if code:
        printed.log_last()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        last = errors.last_line if quotes else ""
        return failed(f"the command {how}{f': {last}' if last else '' if quotes else HINT}")
    try:
        result = result_of_line(printed.last_line)
    except Unusable as error:
        return failed(f"the last line that the command printed {error}")
    if not result:
        printed.log_last()
    return result


async def _end(process: asyncio.subprocess.Process, key: str) -> None:
    """End the process, its group, and those that have left the group and kept the key of the session in their environment."""
    if process.returncode is None:
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), END_SECONDS)
    _signal_group(process.pid, signal.SIGKILL)
    await process.wait()
    if sys.platform == "linux":
        await asyncio.to_thread(kill_with_keys, [key])


def _signal_group(group: int, number: signal.Signals) -> None:
    # macOS raises PermissionError if the group has only zombies.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


_killed: set[int] = set()
"""Processes that were killed after their agent had ended, and are not reaped."""


def kill_with_keys(keys: Collection[str]) -> None:
    """Kill the processes with one of these keys in their environment, and reap what this process has inherited from agents.

    Only on Linux.
    """
    own, variables = str(os.getpid()), {f"OPENAI_API_KEY={key}".encode() for key in keys}
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        with contextlib.suppress(OSError):
            if not variables.isdisjoint((folder / "environ").read_bytes().split(b"\0")):
                os.kill(pid, signal.SIGKILL)
                _killed.add(pid)
            # The command is in parentheses and may contain any character.
            state, parent, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            # An agent leads its group, and the event loop reaps it.
            if (state, parent) == ("Z", own) and (group != folder.name or pid in _killed):
                os.waitpid(pid, os.WNOHANG)
                _killed.discard(pid)


class _Output(asyncio.Protocol):
    """What an agent writes to one of its streams: logged up to a limit, and its last line."""

    def __init__(self, session: str) -> None:
        self._read, self.descriptor = os.pipe()
        self._session = session
        self._line = bytearray()
        self._logged = 0
        self._eof = asyncio.get_running_loop().create_future()
        self._transport: asyncio.BaseTransport | None = None
        self.last_line = ""
        """The last line that is not blank, up to MAX_LINE_BYTES."""

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_writer()
        if self._transport is None:
            os.close(self._read)
        else:
            self._transport.close()

    async def start(self) -> None:
        """Read from now on, while another process has the other end."""
        self._close_writer()
        pipe = open(self._read, "rb", buffering=0)  # noqa: SIM115 - the transport closes it.
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, pipe)

    async def ended(self) -> None:
        """Wait until everything is read. A process of another user may keep the pipe open longer."""
        if self._transport is not None:
            await asyncio.wait([self._eof], timeout=END_SECONDS)
        self._take_line()

    def log_last(self) -> None:
        """Log the last line, unless too much is logged. The others are logged once another one follows."""
        text = self.last_line
        if not text or self._logged > MAX_LOGGED_BYTES:
            return
        self._logged += len(text)
        if self._logged > MAX_LOGGED_BYTES:
            text = f"[printed over {MAX_LOGGED_BYTES} bytes: the rest is dropped]"
        print(f"{self._session}: {text}", file=sys.stderr, flush=True)

    def data_received(self, data: bytes) -> None:
        first, *others = data.split(b"\n")
        self._line += first[: MAX_LINE_BYTES - len(self._line)]
        for rest in others:
            self._take_line()
            self._line += rest[:MAX_LINE_BYTES]

    def connection_lost(self, error: Exception | None) -> None:
        if not self._eof.done():
            self._eof.set_result(None)

    def _take_line(self) -> None:
        text = self._line.decode(errors="replace")
        self._line.clear()
        if not text.strip():
            return
        self.log_last()
        self.last_line = text.strip()

    def _close_writer(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
