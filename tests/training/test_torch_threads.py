"""The number of threads of an update, and of later work."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.contract.update import PolicyLossSettings, ValueLossSettings
from quartet.services.actor import actor as actor_core
from quartet.services.actor.actor import Actor
from quartet.services.critic import critic as critic_core
from quartet.services.critic.critic import Critic
from tests.training.conftest import MakeConfig
from tests.unit.models.updates import settings


class StopUpdate(Exception):
    """Exception that ends the update in these tests."""


class NoBuffer:
    """A buffer with None as the experience of every step."""

    def __init__(self, run: str) -> None:
        pass

    @property
    def experience(self) -> NoBuffer:
        return self

    def load(self, step: int, for_policy: bool = False) -> None:
        return None


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_an_update_uses_its_number_of_threads_and_restores_the_old_one(
    role: str, make: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, threads, threads_in_update = make(), torch.get_num_threads(), list[int]()

    def update(*_: Any) -> dict[str, float]:
        threads_in_update.append(torch.get_num_threads())
        raise StopUpdate

    monkeypatch.setattr(actor_core, "update_policy", update)
    monkeypatch.setattr(critic_core, "update_value", update)
    buffer: Any = NoBuffer
    more = threads + 2
    if role == "actor":
        actor = Actor(config.actor, "cpu", tmp_path, buffer, update_threads=more)
        update_model = partial(actor.update, loss=PolicyLossSettings())
    else:
        critic = Critic(config.critic, config.critic_model, "cpu", tmp_path, buffer, update_threads=more)
        update_model = partial(critic.update, loss=ValueLossSettings())
    with pytest.raises(StopUpdate):
        update_model("run", 1, 1, settings())
    assert threads_in_update == [more]
    assert torch.get_num_threads() == threads
