"""Training runs in one process: every service behind its own server, over TCP, with a real Redis."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet.config import Config, load_config, parse_config
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.server import Server
from quartet.run_directory.run_files import RunFiles
from quartet.services.factories import build_model_role
from quartet.services.orchestrator.control.live_settings import LiveSettings
from quartet.services.orchestrator.control.progress import ProgressBoard
from quartet.services.orchestrator.control.run_control import RunControl
from quartet.services.orchestrator.run import TrainingRun, run_training
from quartet.topology import model_roles
from quartet.types import Progress, Role


@dataclass(frozen=True)
class Run:
    """A run that has ended: where its files are, how it stood, and its exit status."""

    files: RunFiles
    progress: Progress
    code: int

    @property
    def metrics(self) -> list[dict[str, float]]:
        return json_lines(self.files.metrics)

    def trajectories(self, step: int) -> list[dict[str, Any]]:
        return json_lines(self.files.trajectories / f"step-{step:06d}.jsonl")


def json_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def step_metrics(run: Run) -> list[dict[str, float]]:
    """Its metrics but for the seconds."""
    return [{name: step[name] for name in step if not name.endswith("seconds")} for step in run.metrics]


def weights(run: Run) -> bytes:
    """The saved policy's."""
    return (run.files.policy / "model.safetensors").read_bytes()


def assert_same(run: Run, expected: Run) -> None:
    """The run came to its end with the undisturbed run's bits; every trajectory was trained on once; versions only rise."""
    assert run.code == 0, run.progress.error
    assert step_metrics(run) == step_metrics(expected)
    assert weights(run) == weights(expected)
    assert [metrics["step"] for metrics in run.metrics] == list(range(1, len(expected.metrics) + 1))
    for step in range(1, len(expected.metrics) + 1):
        lines, wanted = run.trajectories(step), expected.trajectories(step)
        assert [_without_run(line) for line in lines] == [_without_run(line) for line in wanted]
        assert len({line["id"] for line in lines}) == len(lines)
        assert all(line["policy_version"] < step for line in lines)


def _without_run(line: dict[str, Any]) -> dict[str, Any]:
    return {**line, "id": line["id"].split("/", 1)[1]}


@dataclass(frozen=True)
class ActiveRun:
    """An active run."""

    config: Config
    board: ProgressBoard
    control: RunControl
    thread: threading.Thread
    ended: list[int]
    live_settings: LiveSettings

    def finish(self, seconds: float = 250) -> Run:
        """Wait for its end."""
        self.thread.join(seconds)
        assert not self.thread.is_alive(), self.board.current()
        return Run(RunFiles(self.config.run_directory), self.board.current(), self.ended[0])


class Fleet:
    """The services of a run, each of which can go away and come back at its address as it was at its start."""

    def __init__(self, config: Config) -> None:
        self._started_with = config
        self._servers: dict[Role, Server] = {}
        self._addresses: dict[Role, str] = {}
        for role in model_roles(config):
            self.start(role)

    @property
    def config(self) -> Config:
        """With the services' addresses."""
        overrides = [f"services.{role}.address={address}" for role, address in self._addresses.items()]
        return load_config(RunFiles(self._started_with.run_directory).config, overrides)

    def start(self, role: Role, config: Config | None = None, compute: ComputeThread | None = None) -> None:
        """Start a service, with another config than the run's, or another compute thread, where one is given."""
        built = build_model_role(role, config or self._started_with, compute or ComputeThread(), threads=1)
        self._servers[role] = Server([built], self._addresses.get(role, "127.0.0.1:0"))
        self._addresses[role] = self._servers[role].address

    def lose(self, role: Role) -> None:
        """End a service in the middle of its calls."""
        self._servers.pop(role).stop(0.0)

    def restart(self, role: Role) -> None:
        """Stop a service and start it again."""
        self.lose(role)
        self.start(role)

    def stop(self) -> None:
        """End them all."""
        for server in self._servers.values():
            server.stop(5.0)


@contextmanager
def fleet(config: Config) -> Iterator[Fleet]:
    """The run's services."""
    RunFiles(config.run_directory).write_config(config.to_yaml())
    started = Fleet(config)
    try:
        yield started
    finally:
        started.stop()


@contextmanager
def services(config: Config) -> Iterator[Config]:
    """The run's services; gives the config with their addresses."""
    with fleet(config) as started:
        yield started.config


@contextmanager
def orchestrator(config: Config, control: RunControl | None = None) -> Iterator[ActiveRun]:
    """The run's training, on the services at the config's addresses."""
    control = control or RunControl(RunFiles(config.run_directory), persist=False)
    board, ended = ProgressBoard(config.run.name, config.run.steps), list[int]()
    assert config.buffer.url is not None
    training = TrainingRun(config, config.buffer.url, board, control)
    thread = threading.Thread(target=run_training, args=(training, board, ended.append), daemon=True)
    thread.start()
    yield ActiveRun(config, board, control, thread, ended, training.live_settings)
    control.stop()
    thread.join(60)


@contextmanager
def active_run(config: Config) -> Iterator[ActiveRun]:
    """Start the run's services and its training."""
    with services(config) as addressed, orchestrator(addressed) as running:
        yield running


def wait_for(running: ActiveRun, condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until ``condition`` holds while the run is active."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert running.thread.is_alive(), running.board.current()
        assert time.monotonic() < deadline, running.board.current()
        time.sleep(0.01)


def run_to_the_end(config: Config) -> Run:
    """One run from start to end. Raises AssertionError when it fails."""
    with active_run(config) as running:
        run = running.finish()
    assert run.code == 0, run.progress.error
    return run


def merged(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The tree with ``changes`` in place, section by section."""
    result = dict(tree)
    for name, value in changes.items():
        old = result.get(name)
        result[name] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def parsed(tree: dict[str, Any]) -> Config:
    return parse_config(tree, "test")
