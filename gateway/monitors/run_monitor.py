"""The runs that go on now: what their orchestrators say, and their other processes."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from typing import Any

from quartet.errors import ConfigError, QuartetError
from quartet.gateway.events.event_stream import Feeds
from quartet.gateway.monitors.buffer_address import Buffers
from quartet.gateway.monitors.service_monitor import Services
from quartet.gateway.runs.catalog import Runs, Signature, signature
from quartet.gateway.runs.run_launcher import Starter
from quartet.gateway.schemas import Access, Progress, State
from quartet.rpc.channels import ServiceChannel
from quartet.rpc.security.credentials import LOCAL, Credentials
from quartet.run_directory.run_files import RunFiles
from quartet.types import Role
from quartet.v1 import orchestrator_pb2, orchestrator_pb2_grpc

DEADLINE = 2.0
"""Seconds that an orchestrator has to answer; it does so at once, also during a step."""
FRESH = 0.2
"""Seconds for which an answer is good enough for the next who asks."""
SILENCE = 1.0
"""The same of no answer."""
NOBODY = 5.0
"""The same where there never was an answer: most likely the run was killed, and what is known of its processes is old."""
NEVER = float("-inf")
PATIENCE = 15.0
"""Seconds for which a run still counts as going on after its orchestrator's last answer: it may be started again."""
MAX_LINE = 1 << 16
"""Bytes of a step's metrics, at most."""
SHOWN_NOTES = 50
"""Newest notes that are passed on."""

_STATES = {
    orchestrator_pb2.RUN_STATE_STARTING: State.STARTING,
    orchestrator_pb2.RUN_STATE_TRAINING: State.TRAINING,
    orchestrator_pb2.RUN_STATE_FINISHED: State.FINISHED,
    orchestrator_pb2.RUN_STATE_STOPPED: State.STOPPED,
    orchestrator_pb2.RUN_STATE_FAILED: State.FAILED,
    orchestrator_pb2.RUN_STATE_PAUSED: State.PAUSED,
    orchestrator_pb2.RUN_STATE_RECOVERING: State.RECOVERING,
}


ENDS = (State.FINISHED, State.STOPPED, State.FAILED)


class Orchestrator:
    """The orchestrator of one run, at one address."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self._peer = ServiceChannel(Role.ORCHESTRATOR, address, credentials)
        self._stub = orchestrator_pb2_grpc.OrchestratorServiceStub(self._peer.channel)
        self.address = address

    def call(self, title: str, request: Any) -> Any:
        """Calls the method of this name. Raises the domain exception of its answer."""
        try:
            return self._peer.call(getattr(self._stub, title), request, DEADLINE, title)
        except ValueError:  # The channel has been closed meanwhile: the run has another orchestrator now, or none.
            raise ConfigError(f"orchestrator at {self.address}: {title}: the run has just ended") from None

    def close(self) -> None:
        """Closes the channel."""
        self._peer.close()


class _Known:
    """What is known of one run's orchestrator."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self.lock = threading.Lock()
        self.asking = threading.Lock()
        """Held by whoever waits for an answer."""
        self.orchestrator: Orchestrator | None = None
        self.asked_at = self.answered_at = NEVER
        """When the last question was settled, with or without an answer; when there was one."""
        self.progress: Progress | None = None
        self.last: Progress | None = None
        """What it said last, also when it has ended since."""
        self.rest: tuple[Signature | None, Progress] | None = None

    def rests_for(self) -> float:
        """Seconds after the last question in which there is no other."""
        if self.answered_at >= self.asked_at:
            return FRESH
        return SILENCE if self.answered_at > NEVER else NOBODY

    def use(self, address: str | None) -> Orchestrator | None:
        """The orchestrator at ``address``; with None what is known is forgotten."""
        if self.orchestrator is not None and self.orchestrator.address != address:
            self.orchestrator.close()
            self.orchestrator, self.progress = None, None
            self.asked_at = self.answered_at = NEVER
        if self.orchestrator is None and address is not None:
            self.orchestrator = Orchestrator(address, self._credentials)
        return self.orchestrator

    def reconnect(self, orchestrator: Orchestrator) -> None:
        """A connection that was lost comes back the later the longer it was: a new one is made for the next who asks."""
        orchestrator.close()
        self.orchestrator = Orchestrator(orchestrator.address, self._credentials)


class Live:
    """Asks the orchestrators of runs that go on. Safe to use from several threads; no call waits longer than ``DEADLINE``."""

    def __init__(
        self, runs: Runs, own: str | None = None, own_buffer: str | None = None, credentials: Credentials = LOCAL
    ) -> None:
        """``own``: the run that this gateway was started with, and its Redis's address. Processes are shown ``credentials``."""
        self._credentials = credentials
        self._runs = runs
        self._known: dict[str, _Known] = {}
        self._lock = threading.Lock()
        self.buffers = Buffers(runs, own, own_buffer)
        self.services = Services(runs, self.buffers, credentials)
        self.starter = Starter(runs)
        self.streams: Counter[Access] = Counter()
        """Event streams that are open, by what the bearer of their token may do."""
        self.feeds = Feeds(runs, self.latest, self.services.look)

    def progress(self, name: str) -> Progress | None:
        """What the run is doing; None unless it goes on. Raises NotFound."""
        known = self._of(name)
        orchestrator = self.orchestrator(name)
        if orchestrator is None:
            return None
        # One asks; who comes meanwhile takes what is known, and waits only where that is nothing.
        if not known.asking.acquire(blocking=known.asked_at == NEVER):
            return known.progress
        try:
            if time.monotonic() - known.asked_at >= known.rests_for():
                _ask(known, orchestrator)
            return known.progress
        finally:
            known.asking.release()

    def latest(self, name: str) -> Progress:
        """What the run is doing or, where it does not go on, how it has come to rest. Raises NotFound."""
        progress = self.progress(name)
        if progress is not None:
            return progress
        files, known = self._runs.find(name), self._of(name)
        seen = _signature(files)
        if known.rest is None or known.rest[0] != seen:
            known.rest = (seen, self._at_rest(name, files))
        rest, last = known.rest[1], known.last
        return last if last is not None and last.state in ENDS and last.step == rest.step else rest

    def orchestrator(self, name: str) -> Orchestrator | None:
        """The orchestrator of a run that goes on, or None where there is none. Raises NotFound."""
        files = self._runs.find(name)
        known = self._of(name)
        with known.lock:
            return known.use(_address(files))

    def close(self) -> None:
        """Ends what was begun."""
        with self._lock:
            known = list(self._known.values())
            self._known.clear()
        for item in known:
            with item.lock:
                item.use(None)
        self.feeds.close()
        self.services.close()
        self.buffers.close()

    def _at_rest(self, name: str, files: RunFiles) -> Progress:
        """By its files; of those that cannot be read, that."""
        step = total_steps = 0
        error = ""
        try:
            total_steps = self._runs.config(name).run.steps
            step = _last_step(files)
        except ConfigError as problem:
            error = str(problem)
        finished = 0 < total_steps <= step and files.policy.is_dir()
        return Progress(
            state=State.FINISHED if finished else State.IDLE,
            step=step,
            total_steps=total_steps,
            phase="",
            scored=0,
            wanted=0,
            error=error,
            recoveries=0,
            notes=[],
        )

    def _of(self, name: str) -> _Known:
        with self._lock:
            return self._known.setdefault(name, _Known(self._credentials))


def _address(files: RunFiles) -> str | None:
    try:
        return files.orchestrator_address()
    except ConfigError:
        return None


def _ask(known: _Known, orchestrator: Orchestrator) -> None:
    """Takes in what the orchestrator says, or that it says nothing."""
    try:
        answer = orchestrator.call("GetProgress", orchestrator_pb2.GetProgressRequest())
    except QuartetError:
        answer = None
    with known.lock:
        if known.orchestrator is not orchestrator:  # The run has another one since, or none.
            return
        known.asked_at = time.monotonic()
        if answer is not None:
            known.progress = known.last = _progress(answer.progress)
            known.answered_at = known.asked_at
            return
        known.reconnect(orchestrator)
        known.progress = _silent(known.progress) if known.asked_at - known.answered_at < PATIENCE else None


def _progress(message: orchestrator_pb2.Progress) -> Progress:
    return Progress(
        state=_STATES.get(message.state, State.STARTING),
        step=message.step,
        total_steps=message.total_steps,
        phase=message.phase,
        scored=message.scored,
        wanted=message.wanted,
        error=message.error,
        recoveries=message.recoveries,
        notes=list(message.notes)[-SHOWN_NOTES:],
    )


def _silent(last: Progress | None) -> Progress | None:
    """What is said of a run whose orchestrator does not answer just now; one that had come to its end has ended."""
    if last is None or last.state in ENDS:
        return last
    return last.model_copy(update={"state": State.RECOVERING, "phase": "waiting for orchestrator"})


def _signature(files: RunFiles) -> Signature | None:
    try:
        return signature(files.metrics)
    except OSError:
        return None


def _last_step(files: RunFiles) -> int:
    """The last committed step, by the end of the metrics alone. Raises ConfigError."""
    try:
        with files.metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_LINE))
            *whole, _cut_off = file.read().split(b"\n")
    except OSError:
        return 0
    try:
        return int(json.loads(whole[-1])["step"]) if whole else 0
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"metrics {files.metrics}: the last line is no step's; mend the file") from None
