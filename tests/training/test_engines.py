"""What a run asks of an engine that shares the weights of the actor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from quartet.engines.engine import EngineResponse, Policy
from quartet.models.generation.torch_engine import TorchEngine
from quartet.models.generation.torch_kind import KIND
from quartet.services import roles
from quartet.services.actor.actor import Actor
from quartet.weight_transfer.tensors import WeightSet
from tests.training.conftest import MakeConfig
from tests.training.runs import run_to_completion


class RecordingEngine(TorchEngine):
    """Engine that records its calls."""

    def __init__(self, policy: Policy, calls: list[str]) -> None:
        super().__init__(policy.model, policy.served.stop_ids, 8)
        self._calls = calls

    def generate(self, *arguments: Any, **options: Any) -> Iterator[EngineResponse]:
        self._calls.append("generate")
        return super().generate(*arguments, **options)

    def sleep(self, everything: bool = True) -> None:
        self._calls.append("sleep")

    def load_weights(self, weights: WeightSet, changed: Collection[str]) -> Mapping[str, bytes]:
        assert not weights.tensors
        self._calls.append(f"version {weights.version}")
        return {}

    def close(self) -> None:
        self._calls.append("close")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    kind = replace(KIND, share=lambda config, policy, certificates: RecordingEngine(policy, calls))
    monkeypatch.setattr(roles, "find_engine", lambda name: kind)
    return calls


def test_an_engine_with_shared_weights_gets_each_version_and_frees_memory_for_updates(
    make: MakeConfig, recorded: list[str]
) -> None:
    run_to_completion(make())
    assert recorded == ["version 0", "generate", "sleep", "version 1", "generate", "sleep"]


def test_an_engine_is_closed_when_the_policy_is_replaced(make: MakeConfig, tmp_path: Any) -> None:
    def no_buffer(run: str) -> Any:
        raise AssertionError(run)

    calls: list[str] = []
    create: Callable[[Policy], RecordingEngine] = lambda policy: RecordingEngine(policy, calls)  # noqa: E731
    actor = Actor(make().actor, "cpu", tmp_path, no_buffer, create_engine=create)
    first = actor.engine()
    actor.restore("run", 0, 1, "")
    assert calls == ["close"]
    assert actor.engine() is not first
