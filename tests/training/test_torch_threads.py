"""An update uses its own number of threads, and later work uses the number from before."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.services.actor import actor as actor_core
from quartet.services.actor.actor import Actor
from quartet.services.critic import critic as critic_core
from quartet.services.critic.critic import Critic
from quartet.types import PolicyLossSettings, ValueLossSettings
from tests.training.conftest import MakeConfig
from tests.unit.models.updates import settings


class BrokenOffError(Exception):
    """Error that interrupts the update in these tests."""


class NoBuffer:
    """A run's buffer in which every step's experience is None."""

    def __init__(self, run: str) -> None:
        pass

    @property
    def experience(self) -> NoBuffer:
        return self

    def load(self, step: int) -> None:
        return None


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_an_update_uses_its_own_number_of_threads(
    role: str, make: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, threads, seen = make(), torch.get_num_threads(), list[int]()

    def update(*_: Any) -> dict[str, float]:
        seen.append(torch.get_num_threads())
        raise BrokenOffError

    monkeypatch.setattr(actor_core, "update_policy", update)
    monkeypatch.setattr(critic_core, "update_value", update)
    buffer: Any = NoBuffer
    more = threads + 2
    if role == "actor":
        actor = Actor(config.actor, "cpu", 4, tmp_path, buffer, update_threads=more)
        learn = partial(actor.update, loss=PolicyLossSettings())
    else:
        critic = Critic(config.critic, config.critic_model, "cpu", tmp_path, buffer, update_threads=more)
        learn = partial(critic.update, loss=ValueLossSettings())
    with pytest.raises(BrokenOffError):
        learn("run", 1, 1, settings())
    assert seen == [more]
    assert torch.get_num_threads() == threads
