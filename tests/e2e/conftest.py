"""A miniature toy task, a config that trains on it in seconds, and runs that several tests share."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quartet.buffer.embedded_redis import EmbeddedRedis
from quartet.cli.main import main
from quartet.contract.logged_values import PREFIX
from quartet.demo.pretraining import Schedule, Shape
from quartet.demo.toy_task import Recipe, ToyTask, make_toy_task
from tests.e2e.commands import QUARTET, Command, CommandResult, settings
from tests.once import once
from tests.preflight_workers import run_here

Start = Callable[..., Command]
Call = Callable[..., CommandResult]

MINIATURE = Recipe(
    vocabulary=300,
    shape=Shape(hidden=16, layers=1, heads=2, positions=128),
    reviews=64,
    preferences=32,
    policy=Schedule(steps=4, batch_sequences=8),
    reward=Schedule(steps=3, batch_sequences=8),
)
WIDE = replace(MINIATURE, vocabulary=600, reviews=400, shape=Shape(hidden=128, layers=2, heads=4, positions=128))
"""Models as wide as those of the reviews, which reach the kernels that users reach."""
STEPS = 8
SAVED = (6, 8)
"""Steps of the checkpoints of a finished run. A fault at another step makes the run recompute steps."""
MAX_PROMPT = 24


@dataclass(frozen=True)
class Run:
    """A finished run: the result of its command, and its directory."""

    result: CommandResult
    directory: Path

    @property
    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def toy_task(tmp_path_factory: pytest.TempPathFactory) -> ToyTask:
    folder = once(tmp_path_factory, "e2e", lambda folder: make_toy_task(folder / "toy-task", recipe=MINIATURE))
    return make_toy_task(folder / "toy-task", recipe=MINIATURE)


def wide_toy_task(factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the toy task with wide models."""
    return once(factory, "wide", lambda folder: make_toy_task(folder / "toy-task", recipe=WIDE)) / "toy-task"


@pytest.fixture(scope="session")
def config(toy_task: ToyTask, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config file of every run. Run directories are below the working directory of the command."""
    tree = {
        "run": {"name": "tiny", "steps": STEPS},
        "data": {"prompts": str(toy_task.prompts), "max_prompt_tokens": MAX_PROMPT},
        "algorithm": {"num_epochs": 2},
        "rollout": {
            "prompts_per_step": 8,
            "max_response_tokens": 12,
            "score_batch_size": 4,
            "max_concurrent_sequences": 16,
        },
        "actor": {"model": str(toy_task.policy), "learning_rate": 1e-3},
        "critic": {"learning_rate": 1e-3},
        "reward": {"model": str(toy_task.reward)},
        "checkpoint": {"every_steps": 3, "keep_last": 2},
        # One thread each, so that the results do not depend on how the services are started.
        "services": {role: {"num_threads": 1} for role in ("actor", "critic", "reward", "reference")},
    }
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start ``quartet ARGUMENTS`` in the folder of the test, and clean up after the test."""
    commands: list[Command] = []

    def start_command(
        *arguments: str | Path,
        terminal: bool = False,
        cwd: Path = tmp_path,
        environment: Mapping[str, str] = MappingProxyType({}),
        fresh: bool = False,
    ) -> Command:
        commands.append(Command(QUARTET, *arguments, cwd=cwd, terminal=terminal, environment=environment, fresh=fresh))
        return commands[-1]

    yield start_command
    for command in commands:
        command.clean_up()


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run ``quartet ARGUMENTS`` in this process. For commands that start no process: this saves seconds of imports per call."""

    run_here(monkeypatch)

    def call_command(*arguments: str | Path) -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["quartet", *map(str, arguments)])
        monkeypatch.chdir(tmp_path)
        capsys.readouterr()
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        started, code = time.monotonic(), 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        out, err = capsys.readouterr()
        return CommandResult(code, out, err, time.monotonic() - started, [])

    return call_command


def train(folder: Path, config: Path, *options: str) -> Run:
    """Run ``quartet train`` to its end in ``folder``."""
    command = Command(QUARTET, "train", config, *options, cwd=folder)
    try:
        return Run(command.wait(), folder / "runs" / "tiny")
    finally:
        command.clean_up()


def _shared_run(factory: pytest.TempPathFactory, name: str, config: Path, *options: str) -> Run:
    """Return a finished run that the tests of all workers read."""

    def create(folder: Path) -> None:
        run = train(folder, config, *options)
        assert (run.result.code, run.result.leftovers) == (0, []), run.result
        (folder / "result.json").write_text(json.dumps(asdict(run.result)))

    folder = once(factory, name, create)
    return Run(CommandResult(**json.loads((folder / "result.json").read_text())), folder / "runs" / "tiny")


@pytest.fixture(scope="session")
def first_run(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of ``quartet train`` that starts all its processes itself, without a fault."""
    return _shared_run(tmp_path_factory, "first", config)


GROUPS = settings("services.actor.processes=2", "services.critic.processes=2")


@pytest.fixture(scope="session")
def group_run(config: Path, few_processes: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two groups without a fault."""
    return _shared_run(tmp_path_factory, "groups", config, *few_processes, *GROUPS)


def step_metrics(run: Any) -> list[dict[str, float]]:
    """Return the metrics of each step of a run, except measurements."""
    return without_measurements(run.metrics)


def without_measurements(steps: Iterable[Mapping[str, float]]) -> list[dict[str, float]]:
    """Return the metrics of steps, except measurements, which a repetition of the run does not repeat."""
    transfers = ("generators", "weights_changed", "weight_update_bytes", "weight_transfers")
    counts = (*transfers, "mfu", "tokens_per_second", "device_")

    def is_measured(name: str) -> bool:
        return name.startswith(counts) or (name.endswith(("seconds", "cured_faults")) and not name.startswith(PREFIX))

    return [{name: step[name] for name in step if not is_measured(name)} for step in steps]


def weights(run: Path) -> bytes:
    """Return the weights of the trained policy."""
    return (run / "policy" / "model.safetensors").read_bytes()


@dataclass(frozen=True)
class Service:
    """A service process that the tests start instead of the launcher."""

    command: Command
    address: str
    redis: str

    def serving(self, *roles: str) -> list[str]:
        """Return the options of a run that uses this process for these roles. Actor and critic also use its Redis."""
        shared = [f"buffer.url={self.redis}"] if {"actor", "critic"} & set(roles) else []
        return settings(*shared, *(f"services.{role}.address={self.address}" for role in roles))


@pytest.fixture(scope="session")
def frozen(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The reward and reference models in one process. They have no state, so several runs can share them."""
    command = Command(
        *(
            sys.executable,
            "-m",
            "quartet.services",
            "reward",
            "reference",
            "--config",
            config,
            "--listen",
            "127.0.0.1:0",
        ),
        cwd=tmp_path_factory.mktemp("frozen"),
    )
    folder = tmp_path_factory.mktemp("redis")
    try:
        with EmbeddedRedis(folder, folder / "log") as redis:
            ready = command.wait_for(lambda: re.search(r"event='ready' address='([\d.:]+)'", command.err))
            yield Service(command, ready[1], redis.url)
    finally:
        command.clean_up()


@pytest.fixture(scope="session")
def few_processes(frozen: Service) -> list[str]:
    """Options of a run that does not test its start: it shares the frozen models and has no gateway."""
    return [*frozen.serving("reward", "reference"), *settings("gateway.enabled=false")]


def health(address: str) -> int:
    """Return the status that the service at HOST:PORT reports."""
    with grpc.insecure_channel(address) as channel:
        return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10).status
