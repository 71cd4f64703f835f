"""The moving average of the actor: part of checkpoints, restored bit-identical, and saved as a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import transformers

from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.contract.update import OptimizationSettings, PolicyLossSettings
from quartet.contract.weights import SaveKind
from quartet.errors import ConfigError, FailedPrecondition
from tests.services.model_services import Services
from tests.services.test_trainable_models import outputs, run, store, update

__all__ = ["run", "store"]
pytestmark = pytest.mark.usefixtures("store")


def averaging(make_config: Callable[..., Config], **actor: Any) -> Config:
    tree = make_config().model_dump()
    tree["actor"] |= {"ema_decay": 0.5, **actor}
    return parse_config(tree, "test")


def average(client: Any, config: Config, run: str, name: str) -> bytes:
    """Save the average as a model and return its weights."""
    client.save(run, 1, name, SaveKind.EMA).result()
    return (config.run_directory / name / "model.safetensors").read_bytes()


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["full", "lora"])
def test_the_average_after_a_restore_is_bit_identical(
    lora: Any, services: Services, make_config: Callable[..., Config], run: str
) -> None:
    config = averaging(make_config, lora=lora)
    client = services.start(Role.ACTOR, config)
    initial = average(client, config, run, "initial")
    update(client, run, 1)
    client.save(run, 1, "one", SaveKind.CHECKPOINT).result()
    after_one = average(client, config, run, "ema-1")
    update(client, run, 2)
    after_two = average(client, config, run, "ema-2")
    assert len({initial, after_one, after_two}) == 3

    client.restore(run, 1, 1, "one").result()
    assert average(client, config, run, "again-1") == after_one
    update(client, run, 2)
    update(client, run, 2)
    assert average(client, config, run, "again-2") == after_two, "a repeated update must not count twice"

    client.restore(run, 0, 1, "").result()
    assert average(client, config, run, "start") == initial
    for step in (1, 2):
        update(client, run, step)
    assert average(client, config, run, "replayed") == after_two


def test_the_average_is_between_the_policies_and_does_not_change_the_policy(
    services: Services, make_config: Callable[..., Config], run: str
) -> None:
    config = averaging(make_config)
    client, plain = services.start(Role.ACTOR, config), services.start(Role.ACTOR, make_config())
    before = transformers.AutoModelForCausalLM.from_pretrained(config.actor.model).state_dict()
    for each in (client, plain):
        update(each, run, 1)
    policy = outputs(client)
    assert policy == outputs(plain)
    average(client, config, run, "ema")
    assert outputs(client) == policy, "saving the average changed the policy"
    client.save(run, 1, "model", SaveKind.MODEL).result()
    averaged, after = (
        safetensors.numpy.load_file(config.run_directory / name / "model.safetensors") for name in ("ema", "model")
    )
    for name, value in averaged.items():
        np.testing.assert_allclose(value, (before[name].numpy() + after[name]) / 2, atol=1e-6)


def test_an_update_without_optimizer_steps_leaves_the_average_as_it_is(
    services: Services, make_config: Callable[..., Config], run: str
) -> None:
    config = averaging(make_config)
    client = services.start(Role.ACTOR, config)
    before = average(client, config, run, "before")
    warmup = OptimizationSettings(num_epochs=0, num_mini_batches=1, learning_rate=1e-2, max_grad_norm=1.0, seed=0)
    client.update(run, 1, 1, warmup, PolicyLossSettings()).result()
    assert average(client, config, run, "after") == before


@pytest.mark.parametrize("role", [Role.ACTOR, Role.CRITIC])
def test_saving_an_average_is_refused_without_one(
    role: Role, services: Services, make_config: Callable[..., Config], run: str
) -> None:
    config = make_config()
    client = services.start(role, config)
    with pytest.raises(FailedPrecondition, match=rf"this {role} keeps none; set actor\.ema_decay"):
        client.save(run, 1, "ema", SaveKind.EMA).result()
    assert not (config.run_directory / "ema").exists()


def test_an_actor_of_several_ranks_is_refused(make_config: Callable[..., Config], tmp_path: Path) -> None:
    tree = make_config().model_dump()
    tree["actor"]["ema_decay"] = 0.9
    tree["services"]["actor"]["processes"] = 2
    with pytest.raises(ConfigError, match=r"actor\.ema_decay 0\.9: one process keeps .* over 2 ranks"):
        parse_config(tree, "test")
