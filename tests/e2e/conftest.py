"""A toy task of the smallest size, a config that trains on it in seconds, and the runs that several tests look at."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from quartet.buffer.embedded_redis import EmbeddedRedis
from quartet.demo.toy_task import Recipe, ToyTask, make_toy_task
from quartet.models.pretraining import Schedule, Shape
from tests.e2e.commands import QUARTET, Command, Ended, settings

Start = Callable[..., Command]

MINIATURE = Recipe(
    vocabulary=300,
    shape=Shape(hidden=16, layers=1, heads=2, positions=128),
    reviews=64,
    preferences=32,
    policy=Schedule(steps=4, batch_sequences=8),
    reward=Schedule(steps=3, batch_sequences=8),
)
STEPS = 3
MAX_PROMPT = 24


@dataclass(frozen=True)
class Run:
    """A run that has ended, and where it left its files."""

    ended: Ended
    directory: Path

    @property
    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def toy_task(tmp_path_factory: pytest.TempPathFactory) -> ToyTask:
    return make_toy_task(tmp_path_factory.mktemp("e2e") / "toy-task", recipe=MINIATURE)


@pytest.fixture(scope="session")
def config(toy_task: ToyTask) -> Path:
    """The config file that every run starts from. Runs go below the working directory of the command."""
    tree = {
        "run": {"name": "tiny", "steps": STEPS},
        "data": {"prompts": str(toy_task.prompts), "max_prompt_tokens": MAX_PROMPT},
        "algorithm": {"num_epochs": 2},
        "rollout": {"prompts_per_step": 8, "max_response_tokens": 12, "score_batch_size": 4},
        "actor": {"model": str(toy_task.policy), "learning_rate": 1e-3},
        "critic": {"learning_rate": 1e-3},
        "reward": {"model": str(toy_task.reward)},
        "checkpoint": {"every_steps": 1, "keep_last": 2},
        # The same arithmetic wherever the other services are.
        "services": {role: {"num_threads": 1} for role in ("actor", "critic", "reward", "reference")},
    }
    path = toy_task.policy.parent.parent / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start ``quartet ARGUMENTS`` in the test's own folder; what the test leaves running is ended after it."""
    commands: list[Command] = []

    def begin(*arguments: str | Path, terminal: bool = False, cwd: Path = tmp_path) -> Command:
        commands.append(Command(QUARTET, *arguments, cwd=cwd, terminal=terminal))
        return commands[-1]

    yield begin
    for command in commands:
        command.clean_up()


@pytest.fixture(scope="session")
def first_run(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``quartet train`` with everything started by it."""
    folder = tmp_path_factory.mktemp("first")
    command = Command(QUARTET, "train", config, cwd=folder)
    try:
        return Run(command.ended(), folder / "runs" / "tiny")
    finally:
        command.clean_up()


LONGER = settings("run.steps=8", "checkpoint.every_steps=3")
"""Settings of a run that is long enough for a fault between two checkpoints."""


@pytest.fixture(scope="session")
def undisturbed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A ``LONGER`` run without a fault."""
    folder = tmp_path_factory.mktemp("undisturbed")
    command = Command(QUARTET, "train", config, *LONGER, cwd=folder)
    try:
        ended = command.ended()
        assert ended.code == 0, ended
        return Run(ended, folder / "runs" / "tiny")
    finally:
        command.clean_up()


def deterministic_metrics(run: Run) -> list[dict[str, float]]:
    """Return the run's metrics without measured times."""
    return [{name: step[name] for name in step if not name.endswith("seconds")} for step in run.metrics]


def weights(run: Path) -> bytes:
    """The trained policy."""
    return (run / "policy" / "model.safetensors").read_bytes()


@dataclass(frozen=True)
class Service:
    """A service process that the tests started, not the launcher."""

    command: Command
    address: str
    redis: str

    def serving(self, *roles: str) -> list[str]:
        """Return the options of a run that uses it for these roles. Actor and critic also need its Redis."""
        shared = [f"buffer.url={self.redis}"] if {"actor", "critic"} & set(roles) else []
        return settings(*shared, *(f"services.{role}.address={self.address}" for role in roles))


@pytest.fixture(scope="session")
def frozen(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Reward and reference in one process, started by hand. They hold no state: any number of runs may use them."""
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
