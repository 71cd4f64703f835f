"""Notifications that a run sends to its generation engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quartet.contract.trajectory import Trajectory
from quartet.models.generation.engine import Policy
from quartet.models.generation.torch_engine import TorchEngine
from quartet.services import factories as roles
from tests.training.conftest import MakeConfig
from tests.training.runs import run_to_completion


def test_an_engine_is_notified_before_and_after_each_update(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    notifications: list[str] = []

    class RecordingEngine(TorchEngine):
        def generate(self, *arguments: Any, **options: Any) -> Iterator[Trajectory]:
            notifications.append("generate")
            return super().generate(*arguments, **options)

        def release(self, everything: bool = False) -> None:
            notifications.append("release")

        def weights_changed(self) -> None:
            notifications.append("weights changed")

    def build(policy: Policy) -> RecordingEngine:
        engine = RecordingEngine(policy.model, policy.stop_ids, 8)
        notifications.clear()  # the trial of the engine releases its own memory
        return engine

    monkeypatch.setattr(roles, "engine_factory", lambda *_: build)
    run_to_completion(make())
    assert notifications == ["generate", "release", "weights changed"] * 2


def test_an_engine_is_closed_when_the_policy_is_replaced(
    make: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from quartet.services.actor.actor import Actor

    closed: list[Policy] = []

    class ClosableEngine(TorchEngine):
        def __init__(self, policy: Policy) -> None:
            super().__init__(policy.model, policy.stop_ids, 8)
            self._policy = policy

        def close(self) -> None:
            closed.append(self._policy)

    def no_buffer(run: str) -> Any:
        raise AssertionError(run)

    config = make()
    actor = Actor(config.actor, "cpu", 8, tmp_path, no_buffer, create_engine=ClosableEngine)
    actor.restore("run", 0, 1, "")
    assert len(closed) == 1
