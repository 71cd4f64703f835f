"""Progress of runs: from the orchestrator of an active run, from the files of any other run."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from functools import cache

from quartet.contract import control
from quartet.errors import ConfigError, QuartetError
from quartet.gateway.readers.file_cache import Signature, signature
from quartet.gateway.readers.run_catalog import RunCatalog
from quartet.gateway.schemas import ProgressInfo, State
from quartet.rpc.clients import OrchestratorClient
from quartet.rpc.security.credentials import Credentials
from quartet.run_directory.run_files import RunFiles

TIMEOUT_SECONDS = 2.0
"""Time that an orchestrator has to respond. It responds at once, also during a step."""
MAX_AGE_SECONDS = 0.2
"""Age up to which the last response is reused."""
RETRY_SECONDS = 1.0
"""Delay before the next request after a request without a response."""
RETRY_DEAD_SECONDS = 5.0
"""The same delay if there never was a response: most likely the run was killed and its recorded addresses are stale."""
NEVER = float("-inf")
RESTART_SECONDS = 15.0
"""Time after the orchestrator's last response during which a run counts as active: the orchestrator may be restarted."""
MAX_LINE_BYTES = 1 << 16
"""Size of one step's line in the metrics file."""
MAX_NOTES = 50
"""Number of newest notes that are passed on."""

END_STATES = (State.FINISHED, State.STOPPED, State.FAILED)


class _OrchestratorConnection:
    """The connection to one run's orchestrator, and its last responses."""

    def __init__(self, credentials: Callable[[], Credentials]) -> None:
        """``credentials`` returns those for calls to the orchestrator. It may raise ConfigError."""
        self._credentials = credentials
        self.lock = threading.Lock()
        self.request_lock = threading.Lock()
        """Held by the thread that waits for a response."""
        self.orchestrator: OrchestratorClient | None = None
        self.requested_at = self.responded_at = NEVER
        """Completion time of the last request, with or without a response; time of the last response."""
        self.progress: ProgressInfo | None = None
        self.last_response: ProgressInfo | None = None
        """Kept after the orchestrator has ended."""
        self.from_files: tuple[Signature | None, ProgressInfo] | None = None
        """Progress by the run's files, with the signature of the metrics file."""

    def request_delay(self) -> float:
        """Return the minimum time between the last request and the next one, in seconds."""
        if self.responded_at >= self.requested_at:
            return MAX_AGE_SECONDS
        return RETRY_SECONDS if self.responded_at > NEVER else RETRY_DEAD_SECONDS

    def connect(self, address: str | None) -> OrchestratorClient | None:
        """Return the orchestrator at ``address``. If the address is None, drop the connection and the last responses.

        Raises ConfigError if the credentials cannot be read.
        """
        if self.orchestrator is not None and self.orchestrator.address != address:
            self.orchestrator.close()
            self.orchestrator, self.progress = None, None
            self.requested_at = self.responded_at = NEVER
        if self.orchestrator is None and address is not None:
            self.orchestrator = OrchestratorClient(address, TIMEOUT_SECONDS, self._credentials())
        return self.orchestrator

    def reconnect(self, orchestrator: OrchestratorClient) -> None:
        """Replace a lost connection. gRPC's own reconnect delay would grow with the time the connection has been lost."""
        orchestrator.close()
        self.orchestrator = OrchestratorClient(orchestrator.address, TIMEOUT_SECONDS, self._credentials())


class RunMonitor:
    """Monitor that polls the orchestrators of active runs on request. Thread-safe. No call waits longer than TIMEOUT_SECONDS."""

    def __init__(self, catalog: RunCatalog) -> None:
        self._catalog = catalog
        self._runs: dict[str, _OrchestratorConnection] = {}
        self._lock = threading.Lock()

    def progress(self, name: str) -> ProgressInfo | None:
        """Return the progress of an active run, or None if the run is not active. Raises NotFound."""
        run = self._monitored(name)
        orchestrator = self.orchestrator(name)
        if orchestrator is None:
            return None
        # One thread sends the request. Concurrent callers get the last response, and wait only before the first response.
        if not run.request_lock.acquire(blocking=run.requested_at == NEVER):
            return run.progress
        try:
            if time.monotonic() - run.requested_at >= run.request_delay():
                _request_progress(run, orchestrator)
            return run.progress
        finally:
            run.request_lock.release()

    def latest(self, name: str) -> ProgressInfo:
        """Return the progress of an active run, or the final progress of any other run. Raises NotFound."""
        progress = self.progress(name)
        if progress is not None:
            return progress
        files, run = self._catalog.find(name), self._monitored(name)
        current = _metrics_signature(files)
        if run.from_files is None or run.from_files[0] != current:
            run.from_files = (current, self._progress_from_files(name, files))
        from_files, last = run.from_files[1], run.last_response
        return last if last is not None and last.state in END_STATES and last.step == from_files.step else from_files

    def orchestrator(self, name: str) -> OrchestratorClient | None:
        """Return the orchestrator of an active run, or None. Raises NotFound."""
        files = self._catalog.find(name)
        run = self._monitored(name)
        with run.lock:
            try:
                return run.connect(_address(files))
            except ConfigError:  # ``latest`` shows it.
                return None

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            runs = list(self._runs.values())
            self._runs.clear()
        for run in runs:
            with run.lock:
                run.connect(None)

    def _progress_from_files(self, name: str, files: RunFiles) -> ProgressInfo:
        """Return the progress that the files show. If they cannot be read, ``error`` says why."""
        step = total_steps = 0
        error = ""
        try:
            total_steps = self._catalog.any_config(name).run.steps or 0
            step = _last_step(files)
            if _address(files) is not None:
                self._catalog.credentials(name)
        except ConfigError as problem:
            error = str(problem)
        finished = 0 < total_steps <= step and files.is_finished(step)
        return ProgressInfo(
            state=State.FINISHED if finished else State.IDLE,
            step=step,
            total_steps=total_steps,
            phase="",
            num_scored=0,
            num_expected=0,
            error=error,
            recoveries=0,
            notes=[],
        )

    def _monitored(self, name: str) -> _OrchestratorConnection:
        with self._lock:
            return self._runs.setdefault(name, _OrchestratorConnection(cache(lambda: self._catalog.credentials(name))))


def _address(files: RunFiles) -> str | None:
    try:
        return files.orchestrator_address()
    except ConfigError:
        return None


def _request_progress(run: _OrchestratorConnection, orchestrator: OrchestratorClient) -> None:
    """Request the progress and store the response, or that there was none."""
    try:
        response = orchestrator.progress()
    except QuartetError:
        response = None
    with run.lock:
        if run.orchestrator is not orchestrator:  # The run has another orchestrator now, or none.
            return
        run.requested_at = time.monotonic()
        if response is not None:
            run.progress = run.last_response = _progress(response)
            run.responded_at = run.requested_at
            return
        run.reconnect(orchestrator)
        run.progress = (
            _without_response(run.progress) if run.requested_at - run.responded_at < RESTART_SECONDS else None
        )


def _progress(progress: control.Progress) -> ProgressInfo:
    fields = {name: getattr(progress, name) for name in ProgressInfo.model_fields}
    return ProgressInfo(**fields | {"state": State(progress.state), "notes": progress.notes[-MAX_NOTES:]})


def _without_response(last: ProgressInfo | None) -> ProgressInfo | None:
    """Return the progress of a run whose orchestrator does not respond: recovering, unless it had already ended."""
    if last is None or last.state in END_STATES:
        return last
    return last.model_copy(update={"state": State.RECOVERING, "phase": "waiting for orchestrator"})


def _metrics_signature(files: RunFiles) -> Signature | None:
    try:
        return signature(files.metrics)
    except OSError:
        return None


def _last_step(files: RunFiles) -> int:
    """Return the last committed step, read from the end of the metrics file. Raises ConfigError."""
    try:
        with files.metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_LINE_BYTES))
            *lines, _incomplete = file.read().split(b"\n")
    except OSError:
        return 0
    try:
        return int(json.loads(lines[-1])["step"]) if lines else 0
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"metrics {files.metrics}: the last line is not a step; repair the file") from None
