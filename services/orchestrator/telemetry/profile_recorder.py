"""Profiles of steps that a user has requested: begun and ended between two steps, taken from the services, and saved."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path

import structlog

from quartet.config.root import Config
from quartet.contract.profile import ProfileSummary, RunProfile, ServiceProfile
from quartet.contract.status import Role
from quartet.errors import QuartetError, ServiceFailed, StorageFailed
from quartet.rpc.clients import ProfileClient
from quartet.rpc.security.credentials import LOCAL, Credentials
from quartet.run_directory.run_files import PROFILE_SUMMARY, RunFiles
from quartet.services.orchestrator.control.run_control import RunControl
from quartet.system.durable_files import fsync_path, storage_errors, write_durably

log = structlog.get_logger()

BOUNDARY_SECONDS = 30.0
"""Time for which a step boundary waits for the services to start or end a profile. One that still works does so afterwards."""
FINISH_SECONDS = 300.0
"""Time for which the end of a run waits for a profile."""
MAX_PARALLEL = 8
"""Largest number of services whose profiles are taken at once."""


@dataclass(slots=True)
class _Recording:
    """A profile that is under way."""

    first: int
    last: int
    clients: dict[str, ProfileClient]
    starts: dict[str, Future[None]]
    step_seconds: dict[str, float] = field(default_factory=dict)
    step_started: float = 0.0

    @property
    def name(self) -> str:
        return f"step-{self.first:06d}"


class ProfileRecorder:
    """Recorder of the profiles of a run. Nothing that fails here fails the run: the profile says what is missing.

    Its methods are called on the training thread. Another thread takes the traces while the next step goes on.
    """

    def __init__(
        self,
        config: Config,
        files: RunFiles,
        control: RunControl,
        note: Callable[[str], None],
        services: Callable[[], Mapping[str, str]],
        credentials: Credentials = LOCAL,
    ) -> None:
        """``services`` returns the address of each service by its name: actor, generator HOST:PORT."""
        self._config, self._files, self._control = config, files, control
        self._note, self._services, self._credentials = note, services, credentials
        self._recording: _Recording | None = None
        self._collector: threading.Thread | None = None

    def is_boundary(self, step: int) -> bool:
        """Return whether a profile begins or ends after ``step``, so that the work of the next step must not begin before."""
        return self._control.profile_due or (self._recording is not None and step >= self._recording.last)

    def begin_step(self, step: int) -> None:
        """Start a requested profile before ``step``."""
        if self._recording is None and (steps := self._control.take_profile_command()):
            try:
                self._recording = self._start(step, min(step + steps - 1, self._config.run.steps))
            except StorageFailed as error:
                self._failed(step, error)
                self._control.finish_profile()
        if self._recording is not None:
            self._recording.step_started = time.perf_counter()

    def end_step(self, step: int) -> None:
        """End the profile if ``step`` is its last one."""
        recording = self._recording
        if recording is None:
            return
        recording.step_seconds[str(step)] = round(time.perf_counter() - recording.step_started, 6)
        if step >= recording.last:
            self._end(recording)

    def finish(self) -> None:
        """End the profile that is under way, because no more steps follow, and wait until it is saved."""
        if self._recording is not None:
            self._end(self._recording)
        if self._collector is not None:
            self._collector.join(FINISH_SECONDS)

    def _start(self, first: int, last: int) -> _Recording:
        folder = self._folder(first)
        with storage_errors(folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        timeouts = self._config.timeouts
        # A service starts and ends a profile after the work in progress.
        seconds = timeouts.generate_seconds + timeouts.update_seconds
        names: dict[str, list[str]] = {}
        for name, address in self._services().items():
            names.setdefault(address, []).append(name)
        clients = {
            "+".join(roles): ProfileClient(Role(roles[0].partition(" ")[0]), address, seconds, self._credentials)
            for address, roles in names.items()
        }
        recording = _Recording(first, last, clients, {})
        for name, client in clients.items():
            try:
                recording.starts[name] = client.start(recording.name)
            except QuartetError as error:
                recording.starts[name] = Future()
                recording.starts[name].set_exception(error)
        wait(recording.starts.values(), BOUNDARY_SECONDS)
        log.info("profile started", step=first, last_step=last, services=[*clients])
        return recording

    def _end(self, recording: _Recording) -> None:
        """Let the services end the profile, and take it from them on a separate thread."""
        self._recording = None
        ended = {name: threading.Event() for name in recording.clients}
        self._collector = threading.Thread(target=self._collect, args=(recording, ended), name="profile", daemon=True)
        self._collector.start()
        deadline = time.monotonic() + BOUNDARY_SECONDS
        for event in ended.values():
            event.wait(max(0.0, deadline - time.monotonic()))

    def _collect(self, recording: _Recording, ended: Mapping[str, threading.Event]) -> None:
        folder = self._folder(recording.first)
        try:
            with ThreadPoolExecutor(MAX_PARALLEL, thread_name_prefix="profile") as pool:
                services = pool.map(lambda name: self._take(recording, name, ended[name], folder), recording.clients)
            profile = RunProfile(recording.first, recording.last, time.time(), recording.step_seconds, tuple(services))
            with storage_errors(folder):
                write_durably(folder / PROFILE_SUMMARY, json.dumps(asdict(profile), indent=2) + "\n")
        except QuartetError as error:
            self._failed(recording.first, error)
        else:
            log.info("profile saved", step=recording.first, folder=str(folder))
            self._note(f"profile of steps {recording.first} to {recording.last}: saved in {folder}")
        finally:
            for client in recording.clients.values():
                client.close()
            self._control.finish_profile()

    def _folder(self, step: int) -> Path:
        return self._files.profiles / f"step-{step:06d}"

    def _failed(self, step: int, error: QuartetError) -> None:
        log.warning("profile not saved", step=step, error=str(error))
        self._note(f"profile of step {step}: not saved ({error})")

    def _take(self, recording: _Recording, name: str, ended: threading.Event, folder: Path) -> ServiceProfile:
        """Take the profile of one service, and write its trace. Never raises."""
        path = folder / f"{name.replace(' ', '-').replace(':', '-').replace('/', '-')}-0.json.gz"
        summary: ProfileSummary | None = None
        try:
            start = recording.starts[name]
            if not start.done():
                raise ServiceFailed("has not started the profile: it has worked without a pause")
            start.result()
            with storage_errors(path), path.open("wb") as file:
                for part in recording.clients[name].take(recording.name):
                    ended.set()
                    if isinstance(part, ProfileSummary):
                        summary = part
                    elif part is not None:
                        file.write(part)
            fsync_path(path)
        except Exception as error:
            log.warning("profile incomplete", service=name, error=str(error))
            path.unlink(missing_ok=True)
            return ServiceProfile(name, problem=str(error), summary=summary)
        finally:
            ended.set()
        size = path.stat().st_size
        if not size:
            path.unlink()
            return ServiceProfile(name, problem="the trace is too large to be sent", summary=summary)
        problem = "ended early, at its limit of time or memory" if summary is not None and summary.cut_off else ""
        return ServiceProfile(name, path.name, size, problem, summary)
