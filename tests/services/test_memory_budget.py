"""A service looks at its memory when it starts, says what it found, and updates as it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from quartet.buffer.connection import Redis
from quartet.buffer.experience_store import ExperienceStore
from quartet.config import Config
from quartet.errors import ConfigError
from quartet.models.training.update_memory import MEMORY_FRACTION, measure_policy
from quartet.models.training.updates import update_policy, update_value
from quartet.services import memory_budget as budget
from quartet.services import trainable_model as trained
from quartet.services.actor import actor
from quartet.services.critic import critic
from quartet.services.memory_budget import UpdateLimits
from quartet.types import OptimizationSettings, PolicyLossSettings, Role, ServiceStatus, ValueLossSettings
from tests.services.model_services import Services
from tests.unit.models import tiny
from tests.unit.models.updates import experience

TRAINED = (Role.ACTOR, Role.CRITIC)
LONGEST = 40
RUN = "update-memory"
LOSSES: dict[Role, Any] = {Role.ACTOR: PolicyLossSettings(), Role.CRITIC: ValueLossSettings()}


@pytest.fixture
def config(make_config: Callable[..., Config]) -> Callable[..., Config]:
    """A config whose longest sequence has 40 tokens, with changes to the actor's section and the critic's."""

    def make(**changes: Any) -> Config:
        tree = make_config().model_dump()
        tree["data"] |= {"max_prompt_tokens": 10}
        tree["rollout"] |= {"max_response_tokens": 30}
        for role in TRAINED:
            tree[role] |= {"micro_batch_tokens": None, **changes}
        return Config.model_validate(tree)

    return make


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Leave a service so much free memory: bytes that updates may take."""

    def set_free(size: float) -> None:
        monkeypatch.setattr(trained, "free_bytes", lambda model, limits: int(size / MEMORY_FRACTION) + 1)

    return set_free


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The tokens of the micro-batches of every update, and whether gradient checkpointing was on."""
    results: list[tuple[int, bool]] = []

    def watched(real: Any) -> Any:
        def update(
            model: Any, optimizer: Any, experience: Any, settings: Any, loss: Any, tokens: int, *rest: Any
        ) -> Any:
            results.append((tokens, model.base_model.is_activation_checkpointing))
            return real(model, optimizer, experience, settings, loss, tokens, *rest)

        return update

    monkeypatch.setattr(actor, "update_policy", watched(update_policy))
    monkeypatch.setattr(critic, "update_value", watched(update_value))
    return results


@pytest.fixture
def seal(redis_client: Redis, redis_url: str) -> Callable[[int], None]:
    """Seals the experience of a step."""
    store = ExperienceStore(redis_client, redis_url, RUN)
    return lambda step: store.seal(replace(experience(None), run=RUN, step=step, policy_version=step - 1))


def status_of(role: Role, config: Config, services: Services) -> ServiceStatus:
    status: ServiceStatus = services.start(role, config).wait_until_ready()
    return status


@pytest.mark.parametrize("role", TRAINED)
def test_ample_memory_gives_what_was_the_default(role: Role, config: Any, services: Services) -> None:
    status = status_of(role, config(), services)
    assert (status.micro_batch_tokens, status.micro_batch_tokens_held) == (4096, 4096)
    assert not status.gradient_checkpointing
    assert status.token_bytes > 1000
    assert status.free_bytes > 2**20


def needed(tokens: int, recomputes: bool = False) -> float:
    """Bytes of the tiny policy's update."""
    return measure_policy(tiny.causal("llama", seed=3), LONGEST, "report").bytes(tokens, recomputes)


def test_less_memory_gives_smaller_micro_batches(config: Any, services: Services, leave: Any) -> None:
    leave(needed(450))
    status = status_of(Role.ACTOR, config(), services)
    # With gradient checkpointing it would hold more.
    assert (status.micro_batch_tokens, status.gradient_checkpointing) == (256, False)
    assert status.micro_batch_tokens_held > 256


def test_gradient_checkpointing_comes_where_the_longest_sequence_would_not_fit(
    config: Any, services: Services, leave: Any
) -> None:
    leave(needed(LONGEST) - 1)
    status = status_of(Role.ACTOR, config(), services)
    assert (status.micro_batch_tokens, status.gradient_checkpointing) == (32, True)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "even with gradient checkpointing"),
        ({"gradient_checkpointing": True}, "even with gradient checkpointing"),
        ({"gradient_checkpointing": False}, "actor.gradient_checkpointing to null"),
        ({"lora": {"rank": 2}}, "one sequence of 40 tokens"),
    ],
)
def test_too_little_memory_is_an_error_that_says_what_to_lower(
    given: dict[str, Any], says: str, config: Any, services: Services, leave: Any
) -> None:
    leave(1000)
    with pytest.raises(ConfigError, match=says) as raised:
        services.build(Role.ACTOR, config(**given))
    assert str(raised.value).startswith("actor.micro_batch_tokens: ")
    assert "rollout.max_response_tokens" in str(raised.value)
    assert ("actor.lora" in str(raised.value)) == ("lora" not in given)


def test_a_number_that_is_given_is_taken_whatever_is_free(config: Any, services: Services, leave: Any) -> None:
    leave(1000)
    status = status_of(Role.ACTOR, config(micro_batch_tokens=512), services)
    assert (status.micro_batch_tokens, status.micro_batch_tokens_held) == (512, 0)


@pytest.mark.parametrize("given", [True, False])
def test_nobody_looks_where_both_are_given(given: bool, config: Any, services: Services, leave: Any) -> None:
    leave(0)
    status = status_of(Role.CRITIC, config(micro_batch_tokens=64, gradient_checkpointing=given), services)
    assert (status.micro_batch_tokens, status.gradient_checkpointing) == (64, given)
    assert (status.micro_batch_tokens_held, status.token_bytes, status.free_bytes) == (0, 0, 0)


@pytest.mark.parametrize("role", TRAINED)
def test_an_update_is_split_as_it_says(
    role: Role, config: Any, services: Services, seal: Any, updates: list[tuple[int, bool]]
) -> None:
    chosen = config(gradient_checkpointing=role is Role.CRITIC)
    client = services.start(role, chosen)
    for step, asked in ((1, 0), (2, 128)):
        seal(step)
        settings = OptimizationSettings(1, 1, 1e-3, 1.0, 0, micro_batch_tokens=asked)
        client.update(RUN, step, 1, settings, LOSSES[role]).result()
    assert updates == [(4096, role is Role.CRITIC), (128, role is Role.CRITIC)]


def test_an_update_larger_than_what_was_found_uses_gradient_checkpointing(
    config: Any, services: Services, leave: Any, seal: Any, updates: list[tuple[int, bool]]
) -> None:
    leave(needed(300))
    chosen = config()
    client = services.start(Role.ACTOR, chosen)
    for step, asked in ((1, 256), (2, 512)):
        seal(step)
        settings = OptimizationSettings(1, 1, 1e-3, 1.0, 0, micro_batch_tokens=asked)
        client.update(RUN, step, 1, settings, LOSSES[Role.ACTOR]).result()
    assert updates == [(256, False), (512, True)]


@pytest.mark.parametrize(("part", "shared_by", "expected"), [(1.0, 1, 1200), (1.0, 4, 300), (0.5, 2, 300)])
def test_the_free_memory_is_divided(
    part: float, shared_by: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "free_memory_bytes", lambda: 1200)
    assert (
        budget.free_bytes(tiny.causal("llama"), UpdateLimits(40, memory_fraction=part, num_sharers=shared_by))
        == expected
    )


def test_frozen_roles_say_nothing(config: Any, services: Services) -> None:
    status = status_of(Role.REFERENCE, config(), services)
    assert (status.micro_batch_tokens, status.free_bytes) == (0, 0)
