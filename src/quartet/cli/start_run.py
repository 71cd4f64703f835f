"""`quartet train` and `quartet up`: a run from the command line."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from rich.console import Console

from quartet.cli.progress_view import View, make_view
from quartet.config import Config, load_config, redact_url
from quartet.errors import ConfigError, ServiceFailed
from quartet.launcher import Launcher
from quartet.launcher.security_checks import check_access
from quartet.preflight import check_gateway, check_inputs, check_resumable, unused
from quartet.rpc.security.credentials import Credentials
from quartet.run_directory.run_files import RunFiles
from quartet.types import Role
from quartet.v1 import orchestrator_pb2, orchestrator_pb2_grpc

console = Console()


def train(config_path: Path, overrides: list[str], overwrite: bool, resume: bool = False) -> None:
    """Trains and stops everything that was started."""
    config = load_config(config_path, overrides)
    run(config, overwrite, resume)
    files = RunFiles(config.run_directory)
    console.print(f"policy: {files.policy}\nmetrics: {files.metrics}", highlight=False, soft_wrap=True)


def up(config_path: Path, overrides: list[str], overwrite: bool, resume: bool = False) -> None:
    """Trains, then keeps the services up until interrupted."""
    config = load_config(config_path, overrides)
    with _started(config, overwrite, resume) as (launcher, files):
        for role, address in launcher.addresses.items():
            console.print(f"{role:<13} {address}", highlight=False)
        console.print(f"redis         {redact_url(launcher.url)}", highlight=False, soft_wrap=True)
        watch(launcher, files)
        console.print(
            "run ended; the model services stay up (one that has to be restarted has its initial weights), Ctrl-C stops them",
            highlight=False,
            soft_wrap=True,
        )
        while True:
            _tell(launcher.check())
            time.sleep(0.5)


def run(config: Config, overwrite: bool, resume: bool = False) -> None:
    """One run from start to end, every process of it stopped afterwards. Raises what ends it early."""
    with _started(config, overwrite, resume) as (launcher, files):
        watch(launcher, files)


@contextmanager
def _started(config: Config, overwrite: bool, resume: bool) -> Iterator[tuple[Launcher, RunFiles]]:
    """The processes of a run, up and ready. An earlier run comes back unless this one gets as far as training."""
    if overwrite and resume:
        raise ConfigError(
            "--overwrite and --resume: one drops the earlier run, the other goes on with it; give one of them"
        )
    check_inputs(config)
    check_access(config)
    check_gateway(config)
    for note in unused(config):
        console.print(note, highlight=False, soft_wrap=True, markup=False)
    files = RunFiles(config.run_directory)
    with files.claimed():
        if overwrite:
            files.set_aside()
        try:
            if resume:
                check_resumable(config, files)
            else:
                files.check_unused()
                # What a run that took no step has left, such as its baseline or an embedded Redis, is not this run's.
                files.clear()
            files.write_config(config.to_yaml())
            # Whoever starts a run, or asks for it to go on, does not want it to wait.
            files.asked.unlink(missing_ok=True)
            with Launcher(config, files.config) as launcher:
                _start(launcher)
                _tell(launcher.check())
                files.write_services(launcher.addresses)
                if launcher.dashboard is not None:
                    _tell([f"dashboard: {launcher.dashboard}"])
                yield launcher, files
                console.print("stopping the services", highlight=False)
        finally:
            files.services.unlink(missing_ok=True)
            files.gateway.unlink(missing_ok=True)
            files.restore()


def _start(launcher: Launcher) -> None:
    if not console.is_terminal:
        console.print("starting the services")
    with console.status("starting the services"):
        launcher.start()


def _tell(lines: list[str]) -> None:
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


ENDS = (orchestrator_pb2.RUN_STATE_FINISHED, orchestrator_pb2.RUN_STATE_STOPPED, orchestrator_pb2.RUN_STATE_FAILED)
"""States after which no more news come."""
RECONNECT = 0.2
"""Seconds from the end of the stream of news to the next attempt to hear it."""


class _News:
    """The orchestrator's news, heard by a thread of its own; taken up again where they broke off."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self._address, self._credentials = address, credentials
        self._channel: grpc.Channel | None = None
        self._closed = threading.Event()
        self.queue: queue.Queue[orchestrator_pb2.Progress | None] = queue.Queue()
        """None: they have broken off, or could not be taken up."""
        threading.Thread(target=self._hear, name="watch", daemon=True).start()

    def close(self) -> None:
        """Hears no more."""
        self._closed.set()
        if self._channel is not None:
            self._channel.close()

    def _hear(self) -> None:
        step = 0
        while not self._closed.is_set():
            # Anew for each attempt: a connection that failed waits for longer and longer.
            self._channel = self._credentials.channel(Role.ORCHESTRATOR, self._address)
            stub = orchestrator_pb2_grpc.OrchestratorServiceStub(self._channel)
            try:
                request = orchestrator_pb2.WatchProgressRequest(after_step=step)
                for response in stub.WatchProgress(request, metadata=self._credentials.metadata):
                    self.queue.put(response.progress)
                    step = response.progress.step
                    if response.progress.state in ENDS:
                        return
            except (grpc.RpcError, ValueError):  # ValueError: the channel has been closed meanwhile.
                pass
            finally:
                self._channel.close()
            self.queue.put(None)
            self._closed.wait(RECONNECT)


def watch(launcher: Launcher, files: RunFiles) -> None:
    """Shows the run until it ends; an earlier run is forgotten once this one has taken a step.

    Meanwhile the processes are supervised. The news go on where they broke off: an orchestrator that crashed is started again
    at the same address. Raises ConfigError or ServiceFailed when the run, or a process that is given up, fails.
    """
    news = _News(launcher.addresses[Role.ORCHESTRATOR], launcher.credentials)
    try:
        with make_view(console, files.root) as view:
            _follow(launcher, news.queue, view, files)
    finally:
        news.close()


def _follow(
    launcher: Launcher, news: queue.Queue[orchestrator_pb2.Progress | None], view: View, files: RunFiles
) -> None:
    while True:
        try:
            progress = news.get(timeout=0.2)
        except queue.Empty:
            _supervise(launcher, view)
            continue
        if progress is None:
            _supervise(launcher, view)
            if launcher.run_ended:
                _explain_end(launcher)
                return
            continue
        # Lower than what was shown after the run went back: the steps that come again are shown again.
        view.back(progress.step)
        view.show(progress)
        if progress.step:
            files.forget()
        if progress.state == orchestrator_pb2.RUN_STATE_FAILED:
            _blame_a_service(launcher)
            kind = ConfigError if progress.exit_code == 2 else ServiceFailed
            raise kind(progress.error)
        if progress.state in ENDS:
            if progress.state == orchestrator_pb2.RUN_STATE_STOPPED:
                console.print(f"stopped after step {progress.step} of {progress.total_steps}", highlight=False)
            return
        # As long as there are news, nothing is wrong with the orchestrator.
        _supervise(launcher, view, orchestrator=False)


def _supervise(launcher: Launcher, view: View, orchestrator: bool = True) -> None:
    for line in launcher.check(orchestrator):
        view.say(line)


def _blame_a_service(launcher: Launcher, wait: float = 1.0) -> None:
    """Raises for a service that has died: the orchestrator may have heard of it before the kernel told us."""
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        launcher.blame()
        time.sleep(0.05)


def _explain_end(launcher: Launcher) -> None:
    """For an orchestrator that has ended in order while its news could not be heard."""
    if launcher.outcome is None:
        _blame_a_service(launcher)
        raise ServiceFailed("orchestrator: its news ended before the run did; see logs/orchestrator.log of the run")
    if launcher.outcome == "stopped":
        console.print("stopped before the last step", highlight=False)
