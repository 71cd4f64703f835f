"""Fixtures: configs of training runs on the toy task."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from quartet.config.root import Config
from quartet.demo.toy_task import ToyTask
from quartet.services.orchestrator.rollout.collector import CollectedStep, Collector
from tests.e2e.conftest import toy_task
from tests.preflight_workers import run_here
from tests.training.measured_once import loaded_once, measured_once
from tests.training.runs import merged, parsed

__all__ = ["toy_task"]
MakeConfig = Callable[..., Config]

_NUMBERS = itertools.count()
"""Numbers in run names. They are unique, because all tests share one Redis."""


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _measured_once() -> Iterator[None]:
    with measured_once(), loaded_once():
        yield


@pytest.fixture(autouse=True)
def _models_checked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    run_here(monkeypatch)


@pytest.fixture(scope="session")
def toy_task_tree(
    toy_task: ToyTask, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], dict[str, Any]]:
    """Factory of config trees on the toy task, each with a new run name."""
    folder = tmp_path_factory.mktemp("runs")

    def tree() -> dict[str, Any]:
        return {
            "run": {"name": f"run-{next(_NUMBERS)}", "steps": 2, "directory": str(folder)},
            "data": {"prompts": str(toy_task.prompts), "max_prompt_tokens": 24},
            "algorithm": {"num_epochs": 2},
            "rollout": {"prompts_per_step": 4, "max_response_tokens": 10, "score_batch_size": 4},
            "actor": {"model": str(toy_task.policy), "learning_rate": 1e-3},
            "critic": {"learning_rate": 1e-3},
            "reward": {"model": str(toy_task.reward)},
            "checkpoint": {"every_steps": 0},
            "buffer": {"url": redis_url},
        }

    return tree


@pytest.fixture(scope="session")
def make(toy_task_tree: Callable[[], dict[str, Any]]) -> MakeConfig:
    """Factory of configs on the toy task with changes to sections."""

    def build(**changes: Any) -> Config:
        return parsed(merged(toy_task_tree(), changes))

    return build


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[CollectedStep]:
    """Return the steps that a run collects."""
    steps: list[CollectedStep] = []
    real = Collector.collect

    def collect(self: Any, *arguments: Any, **options: Any) -> CollectedStep:
        steps.append(real(self, *arguments, **options))
        return steps[-1]

    monkeypatch.setattr(Collector, "collect", collect)
    return steps
