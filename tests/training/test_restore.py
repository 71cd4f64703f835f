"""Restore of a model: the old model is freed first, and a failed restore marks the model as broken."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quartet.config.root import Config
from quartet.contract.weights import SaveKind
from quartet.errors import FailedPrecondition, ModelError
from quartet.services.actor import actor as actor_core
from quartet.services.actor.actor import Actor
from quartet.services.critic import critic as critic_core
from quartet.services.critic.critic import Critic
from tests.training.conftest import MakeConfig

LOADERS = {"actor": (actor_core, "load_causal_lm"), "critic": (critic_core, "load_critic")}


def no_buffer(run: str) -> Any:
    raise AssertionError(run)


def build(role: str, config: Config, root: Path) -> Actor | Critic:
    if role == "actor":
        return Actor(config.actor, "cpu", root, no_buffer)
    return Critic(config.critic, config.critic_model, "cpu", root, no_buffer)


def save(model: Actor | Critic) -> None:
    model.restore("run", 0, 1, "")
    model.snapshot("run", 1, "checkpoint", SaveKind.CHECKPOINT)()


@pytest.fixture
def models_in_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[int]]:
    """Count the models of a role that are still in memory at each load."""

    def count(role: str) -> list[int]:
        module, name = LOADERS[role]
        real, loaded, result = getattr(module, name), list[Any](), list[int]()

        def load(*arguments: Any) -> Any:
            result.append(sum(model() is not None for model in loaded))
            model = real(*arguments)
            loaded.append(weakref.ref(model))
            return model

        monkeypatch.setattr(module, name, load)
        return result

    return count


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_the_old_model_is_freed_before_the_new_one_is_loaded(
    role: str, lora: Any, make: MakeConfig, tmp_path: Path, models_in_memory: Callable[[str], list[int]]
) -> None:
    result = models_in_memory(role)
    model = build(role, make(**{role: {"lora": lora}}), tmp_path)
    save(model)
    model.restore("run", 3, 1, "checkpoint")
    assert result == [0, 0, 0]
    assert model.status().step == 3


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_a_failed_restore_marks_the_model_as_broken(role: str, file: str, make: MakeConfig, tmp_path: Path) -> None:
    model = build(role, make(), tmp_path)
    initial_status = model.status()
    save(model)
    (tmp_path / "checkpoint" / file).write_bytes(b"broken")
    with pytest.raises(ModelError):
        model.restore("run", 3, 1, "checkpoint")
    status = model.status()
    assert status.broken
    assert status.max_sequence_tokens == initial_status.max_sequence_tokens > 0
    with pytest.raises(FailedPrecondition, match="restart the service"):
        model.snapshot("run", 1, "again", SaveKind.CHECKPOINT)
    save(model)
    model.restore("run", 3, 1, "checkpoint")
    assert not model.status().broken
    assert model.status().step == 3
