"""At its start, a service derives the micro-batch size from its free memory, reports it and uses it in updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from quartet.buffer.connection import Redis
from quartet.buffer.experience_store import ExperienceStore
from quartet.config.models import TrainedModelConfig
from quartet.config.root import Config
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.update import OptimizationSettings, PolicyLossSettings, ValueLossSettings
from quartet.errors import ConfigError
from quartet.model_files.memory import MEMORY_FRACTION
from quartet.models.training.update_memory import Activations, SavedActivations, UpdateMemory, measure_policy
from quartet.models.training.updates import update_policy, update_value
from quartet.planner.memory_shares import GpuShare
from quartet.services import memory_budget as budget
from quartet.services import trainable_model as trained
from quartet.services.actor import actor
from quartet.services.critic import critic
from quartet.services.memory_budget import UpdateLimits
from tests.services.model_services import Services
from tests.training.measured_once import loaded_once, measured_once
from tests.unit.models import tiny
from tests.unit.models.updates import experience

TRAINED = (Role.ACTOR, Role.CRITIC)
MAX_SEQUENCE = 40
RUN = "update-memory"
LOSSES: dict[Role, Any] = {Role.ACTOR: PolicyLossSettings(), Role.CRITIC: ValueLossSettings()}


@pytest.fixture(scope="module", autouse=True)
def _measured_once() -> Iterator[None]:
    """Let each service measure the memory of its updates at its start."""
    with measured_once(memory=False), loaded_once():
        yield


@pytest.fixture
def config(make_config: Callable[..., Config]) -> Callable[..., Config]:
    """Factory of configs with at most 40 tokens per sequence; ``changes`` apply to actor and critic."""

    def make(**changes: Any) -> Config:
        tree = make_config().model_dump()
        tree["data"] |= {"max_prompt_tokens": 10}
        tree["rollout"] |= {"max_response_tokens": 30}
        for role in TRAINED:
            tree[role] |= {"micro_batch_tokens": None, "gradient_checkpointing": None, **changes}
        return Config.model_validate(tree)

    return make


@pytest.fixture
def set_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the bytes of memory that updates may use."""

    def set_free(size: float) -> None:
        monkeypatch.setattr(trained, "free_bytes", lambda model, limits: int(size / MEMORY_FRACTION) + 1)

    return set_free


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The micro-batch tokens of every update, and whether it used gradient checkpointing."""
    results: list[tuple[int, bool]] = []

    def recorded(real: Any) -> Any:
        def update(
            model: Any, optimizer: Any, experience: Any, settings: Any, loss: Any, tokens: int, *rest: Any
        ) -> Any:
            results.append((tokens, model.base_model.is_activation_checkpointing))
            return real(model, optimizer, experience, settings, loss, tokens, *rest)

        return update

    monkeypatch.setattr(actor, "update_policy", recorded(update_policy))
    monkeypatch.setattr(critic, "update_value", recorded(update_value))
    return results


@pytest.fixture
def seal(redis_client: Redis, redis_url: str) -> Callable[[int], None]:
    """Seal the experience of a step."""
    store = ExperienceStore(redis_client, redis_url, RUN)
    return lambda step: store.seal(replace(experience(None), run=RUN, step=step, policy_version=step - 1))


def status_of(role: Role, config: Config, services: Services) -> ServiceStatus:
    status: ServiceStatus = services.start(role, config).wait_until_ready()
    return status


@pytest.mark.parametrize("role", TRAINED)
def test_ample_memory_gives_the_default_micro_batch_size(role: Role, config: Any, services: Services) -> None:
    status = status_of(role, config(), services)
    assert (status.micro_batch_tokens, status.micro_batch_tokens_held) == (4096, 4096)
    assert not status.gradient_checkpointing
    assert status.token_bytes > 1000
    assert status.free_bytes > 2**20


def required_bytes(tokens: int, recomputes: bool = False) -> float:
    """Return the bytes of an update of the tiny policy."""
    return measure_policy(tiny.causal("llama", seed=3), MAX_SEQUENCE, "report").bytes(tokens, recomputes)


def test_less_memory_gives_smaller_micro_batches(config: Any, services: Services, set_memory: Any) -> None:
    set_memory(required_bytes(450))
    status = status_of(Role.ACTOR, config(), services)
    # With gradient checkpointing, more tokens would fit.
    assert (status.micro_batch_tokens, status.gradient_checkpointing) == (256, False)
    assert status.micro_batch_tokens_held > 256


def test_gradient_checkpointing_is_used_if_the_longest_sequence_would_not_fit_otherwise(
    config: Any, services: Services, set_memory: Any
) -> None:
    set_memory(required_bytes(MAX_SEQUENCE) - 1)
    status = status_of(Role.ACTOR, config(), services)
    assert (status.micro_batch_tokens, status.gradient_checkpointing) == (32, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "even with gradient checkpointing"),
        ({"gradient_checkpointing": True}, "even with gradient checkpointing"),
        ({"gradient_checkpointing": False}, "actor.gradient_checkpointing to null"),
        ({"lora": {"rank": 2}}, "one sequence of 40 tokens"),
    ],
)
def test_too_little_memory_is_an_error_that_names_the_settings_to_reduce(
    changes: dict[str, Any], message: str, config: Any, services: Services, set_memory: Any
) -> None:
    set_memory(1000)
    with pytest.raises(ConfigError, match=message) as raised:
        services.build(Role.ACTOR, config(**changes))
    assert str(raised.value).startswith("actor.micro_batch_tokens: ")
    assert "rollout.max_response_tokens" in str(raised.value)
    assert ("actor.lora" in str(raised.value)) == ("lora" not in changes)


def test_a_configured_micro_batch_size_is_used_regardless_of_free_memory(
    config: Any, services: Services, set_memory: Any
) -> None:
    set_memory(1000)
    status = status_of(Role.ACTOR, config(micro_batch_tokens=512), services)
    assert (status.micro_batch_tokens, status.micro_batch_tokens_held) == (512, 0)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_memory_is_not_measured_if_both_settings_are_configured(
    checkpointing: bool, config: Any, services: Services, set_memory: Any
) -> None:
    set_memory(0)
    status = status_of(Role.CRITIC, config(micro_batch_tokens=64, gradient_checkpointing=checkpointing), services)
    assert (status.micro_batch_tokens, status.gradient_checkpointing) == (64, checkpointing)
    assert (status.micro_batch_tokens_held, status.token_bytes, status.free_bytes) == (0, 0, 0)


@pytest.mark.parametrize("role", TRAINED)
def test_an_update_uses_the_micro_batch_size_of_its_request(
    role: Role, config: Any, services: Services, seal: Any, updates: list[tuple[int, bool]]
) -> None:
    configured = config(gradient_checkpointing=role is Role.CRITIC)
    client = services.start(role, configured)
    for step, requested in ((1, 0), (2, 128)):
        seal(step)
        settings = OptimizationSettings(1, 1, 1e-3, 1.0, 0, micro_batch_tokens=requested)
        client.update(RUN, step, 1, settings, LOSSES[role]).result()
    assert updates == [(4096, role is Role.CRITIC), (128, role is Role.CRITIC)]


def test_an_update_above_the_measured_limit_uses_gradient_checkpointing(
    config: Any, services: Services, set_memory: Any, seal: Any, updates: list[tuple[int, bool]]
) -> None:
    set_memory(required_bytes(300))
    configured = config()
    client = services.start(Role.ACTOR, configured)
    for step, requested in ((1, 256), (2, 512)):
        seal(step)
        settings = OptimizationSettings(1, 1, 1e-3, 1.0, 0, micro_batch_tokens=requested)
        client.update(RUN, step, 1, settings, LOSSES[Role.ACTOR]).result()
    assert updates == [(256, False), (512, True)]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("role", TRAINED)
def test_an_update_is_deterministic_as_configured(
    role: Role, deterministic: bool, config: Any, services: Services, seal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts: list[tuple[str, str, bool]] = []

    def recorded(*arguments: Any) -> Any:
        contexts.append(arguments)
        return nullcontext()

    monkeypatch.setattr(trained, "deterministic_update", recorded)
    client = services.start(role, config(deterministic_updates=deterministic))
    seal(1)
    client.update(RUN, 1, 1, OptimizationSettings(1, 1, 1e-3, 1.0, 0), LOSSES[role]).result()
    assert contexts == [("cpu", role, deterministic)]


@pytest.mark.parametrize(("sharers", "expected"), [(1, 1200), (4, 300)])
def test_free_memory_is_divided_by_the_number_of_sharers(
    sharers: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "free_memory_bytes", lambda: 1200)
    assert budget.free_bytes(tiny.causal("llama"), UpdateLimits(40, num_sharers=sharers)) == expected


def budget_with_cache(free: float, cache: int) -> budget.MemoryBudget:
    """Return the budget of an update that needs 300 bytes of state and 10 per token of a sequence of 40."""
    activations = Activations(SavedActivations(0, 10, 0), SavedActivations(0, 10, 0), 0, 0)
    memory = UpdateMemory(300, activations, None, MAX_SEQUENCE)
    limits = UpdateLimits(MAX_SEQUENCE, cache=cache, cache_shape=(8, 64), max_micro_batch_tokens=128)
    config = TrainedModelConfig()
    return budget.find_budget(Role.ACTOR, config, memory, int(free / MEMORY_FRACTION) + 1, limits)


def test_the_cache_of_the_engine_is_not_available_to_updates() -> None:
    without, beside = budget_with_cache(300 + 1280, 0), budget_with_cache(300 + 1280, 500)
    assert (without.micro_batch_tokens, without.frees_cache) == (128, False)
    assert (beside.micro_batch_tokens, beside.frees_cache) == (64, False)


def test_the_cache_is_freed_before_updates_that_do_not_fit_beside_it() -> None:
    result = budget_with_cache(300 + 800, 750)
    assert (result.micro_batch_tokens, result.frees_cache) == (64, True)


def test_a_cache_that_does_not_fit_is_an_error_that_names_what_to_lower() -> None:
    with pytest.raises(
        ConfigError, match=r"^rollout.max_concurrent_sequences: .* 8 sequences of up to 64 tokens"
    ) as raised:
        budget_with_cache(300 + 800, 2000)
    assert "rollout.max_response_tokens" in str(raised.value)


def test_a_share_by_need_does_not_depend_on_what_other_roles_have_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.causal("llama").bfloat16()
    loaded = (2 + 4) * sum(parameter.numel() for parameter in model.parameters())
    limits = UpdateLimits(40, num_sharers=4, share=GpuShare(own=10**6, all_roles=4 * 10**6, weight=0.5))
    monkeypatch.setattr(budget, "device_of", lambda model: torch.device("cuda", 0))
    monkeypatch.setattr(budget, "total_gpu_bytes", lambda device: 6 * 10**6)
    for free in (5 * 10**6, 2 * 10**6):
        monkeypatch.setattr(budget, "free_gpu_bytes", lambda device, free=free: free)
        assert budget.free_bytes(model, limits) == 2 * 10**6 - loaded
    monkeypatch.setattr(budget, "free_gpu_bytes", lambda device: 10**6)
    assert budget.free_bytes(model, limits) == 10**6


def test_frozen_roles_report_no_memory_limits(config: Any, services: Services) -> None:
    status = status_of(Role.REFERENCE, config(), services)
    assert (status.micro_batch_tokens, status.free_bytes) == (0, 0)
