"""Every option of a model's section acts in its service: the optimizer, the dtype, the device, the size of a forward pass."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from torch import nn

from quartet.buffer.connection import Redis
from quartet.buffer.experience_store import ExperienceStore
from quartet.config import Config, ServiceConfig
from quartet.errors import ConfigError
from quartet.services import factories as roles
from quartet.types import (
    MODEL_ROLES,
    Experience,
    OptimizationSettings,
    PolicyLossSettings,
    Prompt,
    Role,
    SamplingParameters,
    SaveKind,
    ValueLossSettings,
)
from tests.services.model_services import Services
from tests.unit.models import tiny

RUN = "options"
SEQUENCES = 12
BATCH = tiny.batch([2] * SEQUENCES, [3] * SEQUENCES)
"""Sequences of five tokens each."""
SETTINGS = OptimizationSettings(num_epochs=1, num_mini_batches=1, learning_rate=3e-3, max_grad_norm=0.02, seed=0)
LOSSES: dict[Role, Any] = {Role.ACTOR: PolicyLossSettings(), Role.CRITIC: ValueLossSettings(value_clip=0.0)}
TRAINED = [Role.ACTOR, Role.CRITIC]

MakeConfig = Callable[..., Config]
Passes = list[tuple[tuple[int, ...], torch.dtype]]


@pytest.fixture
def changed(make_config: MakeConfig) -> MakeConfig:
    """The config over the tiny checkpoints, with changes to the keys of its sections."""

    def make(**sections: dict[str, Any]) -> Config:
        tree = make_config().model_dump()
        for name, changes in sections.items():
            tree[name] |= changes
        return Config.model_validate(tree)

    return make


@pytest.fixture
def passes() -> Iterator[Passes]:
    """Of each forward pass the shape of its token ids [rows, longest], and the dtype of the embedding that reads them."""
    results: Passes = []

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, nn.Embedding):
            results.append((tuple(inputs[0].shape), module.weight.dtype))

    hook = nn.modules.module.register_module_forward_pre_hook(note)
    yield results
    hook.remove()


@pytest.fixture
def _sealed(redis_client: Redis, redis_url: str) -> None:
    """The experience of step 1, over BATCH."""
    generator = np.random.default_rng(1)
    tokens = int(BATCH.response_lengths.sum())
    drawn = {
        name: generator.standard_normal(tokens).astype(np.float32)
        for name in ("log_probs", "reference_log_probs", "values", "advantages", "returns")
    }
    ExperienceStore(redis_client, redis_url, RUN).seal(
        Experience(
            run=RUN,
            step=1,
            policy_version=0,
            ids=tuple(f"{RUN}/1/{index}/0" for index in range(SEQUENCES)),
            batch=BATCH,
            scores=np.zeros(SEQUENCES, np.float32),
            actor_mask=np.ones(tokens, np.float32),
            **drawn,
        )
    )


def optimizer_file(client: Any, config: Config) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Return the parameter groups and moments of a service's AdamW, read from a new checkpoint."""
    client.save(RUN, 1, f"c-{client.role}", SaveKind.CHECKPOINT).result()
    path: Path = config.run_directory / f"c-{client.role}" / "optimizer.safetensors"
    with safetensors.safe_open(path, framework="np") as file:
        groups = json.loads(file.metadata()["param_groups"])
        return groups, {name: file.get_tensor(name).astype(np.float64) for name in file.keys()}  # noqa: SIM118


@pytest.mark.usefixtures("_sealed")
@pytest.mark.parametrize("role", TRAINED)
def test_each_trained_model_has_the_optimizer_of_its_section_and_the_learning_rate_of_the_request(
    role: Role, services: Services, changed: MakeConfig
) -> None:
    own = {"betas": [0.6, 0.7], "eps": 1e-3, "weight_decay": 0.25}
    other = {"betas": [0.5, 0.55], "eps": 1e-2, "weight_decay": 0.125}
    config = changed(
        **{
            name: {"learning_rate": 0.5, "optimizer": own if name is role else other, "micro_batch_tokens": 64}
            for name in TRAINED
        }
    )
    client = services.start(role, config)
    client.update(RUN, 1, 1, SETTINGS, LOSSES[role]).result()
    (matrices, vectors), moments = optimizer_file(client, config)
    for group, decay in ((matrices, 0.25), (vectors, 0.0)):
        assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (3e-3, [0.6, 0.7], 1e-3, decay)
    # After one step the first moment is (1 - beta1) g, the second (1 - beta2) g^2, of the gradient g clipped to the norm.
    squares = 0.0
    for name in (name for name in moments if name.endswith(".exp_avg")):
        gradient = moments[name] / (1 - 0.6)
        squares += float(np.square(gradient).sum())
        np.testing.assert_allclose(moments[f"{name}_sq"], (1 - 0.7) * gradient**2, rtol=1e-4, atol=1e-14)
    assert math.sqrt(squares) == pytest.approx(0.02, rel=1e-3)


WORK: dict[str, tuple[Role, Callable[[Any], Any]]] = {
    "actor log-probs": (Role.ACTOR, lambda client: client.log_probs(BATCH, 1.0)),
    "actor update": (
        Role.ACTOR,
        lambda client: client.update(RUN, 1, 1, SETTINGS, LOSSES[Role.ACTOR]).result(),
    ),
    "critic values": (Role.CRITIC, lambda client: client.values(BATCH).result()),
    "critic update": (
        Role.CRITIC,
        lambda client: client.update(RUN, 1, 1, SETTINGS, LOSSES[Role.CRITIC]).result(),
    ),
    "reward": (Role.REWARD, lambda client: client.score(BATCH).result()),
    "reference": (Role.REFERENCE, lambda client: client.log_probs(BATCH, 1.0).result()),
}
ROWS = {Role.ACTOR: 2, Role.CRITIC: 3, Role.REWARD: 4, Role.REFERENCE: 6}
"""Of a forward pass, by role: each divides the sequences."""
TOKENS = {Role.ACTOR: 4, Role.CRITIC: 4, Role.REWARD: 5, Role.REFERENCE: 4}
"""Of a sequence, by role: only a score is read at the last one."""
TRIAL = [(3, 5), (1, 9)]
"""True if a model can be packed is tried first; a service that looks at its updates' memory does so when it starts."""


@pytest.mark.usefixtures("_sealed")
@pytest.mark.parametrize("work", WORK)
def test_a_forward_pass_is_as_large_as_the_models_section_allows(
    work: str, services: Services, changed: MakeConfig, passes: Passes
) -> None:
    role, call = WORK[work]
    most = TOKENS[role] * ROWS[role]
    client = services.start(role, changed(**{role: {"micro_batch_tokens": most}}))
    passes.clear()
    call(client)
    trial = [] if role in TRAINED else TRIAL
    assert [shape for shape, _ in passes] == [*trial, *[(1, most)] * (SEQUENCES // ROWS[role])]


def test_an_adapters_reference_passes_are_as_large_as_the_actors(
    services: Services, changed: MakeConfig, passes: Passes
) -> None:
    client = services.start(Role.ACTOR, changed(actor={"lora": {"rank": 2}, "micro_batch_tokens": 16}))
    passes.clear()
    client.reference_log_probs(BATCH, 1.0).result()
    assert [shape for shape, _ in passes] == [(1, 16)] * 3


def test_as_many_sequences_are_decoded_at_once_as_the_rollout_allows(
    services: Services, changed: MakeConfig, passes: Passes
) -> None:
    client = services.start(Role.ACTOR, changed(rollout={"max_concurrent_sequences": 3}))
    prompts = [Prompt(index, np.array([index + 2, 5], np.int32)) for index in range(7)]
    passes.clear()
    client.generate(RUN, 1, 1, prompts, 1, SamplingParameters(4, ignore_eos=True), 0, 0).result()
    assert max(rows for (rows, _), _ in passes) == 3


@pytest.mark.parametrize(
    ("role", "dtypes", "expected"),
    [
        (Role.ACTOR, {"actor": "bfloat16", "reference": "float32"}, torch.bfloat16),
        (Role.CRITIC, {"critic": "bfloat16"}, torch.bfloat16),
        (Role.REWARD, {"reward": "bfloat16"}, torch.bfloat16),
        (Role.REFERENCE, {"reference": None}, torch.float32),
        (Role.REFERENCE, {"reference": None, "actor": "bfloat16"}, torch.bfloat16),
        (Role.REFERENCE, {"reference": "bfloat16"}, torch.bfloat16),
        (Role.REFERENCE, {"reference": "float32", "actor": "bfloat16"}, torch.float32),
    ],
)
def test_a_model_computes_in_the_dtype_of_its_section_and_the_reference_else_in_the_actors(
    role: Role,
    dtypes: dict[str, str | None],
    expected: torch.dtype,
    services: Services,
    changed: MakeConfig,
    passes: Passes,
) -> None:
    client = services.start(role, changed(**{name: {"dtype": dtype} for name, dtype in dtypes.items()}))
    assert client.wait_until_ready().dtype == str(expected).removeprefix("torch.")
    passes.clear()
    next(call for asked, call in WORK.values() if asked is role)(client)
    assert {dtype for _, dtype in passes} == {expected}


def test_a_device_is_named_as_torch_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert roles.device_of(ServiceConfig()) == "cpu"
    assert [roles.device_of(ServiceConfig(devices=(index,))) for index in range(2)] == ["cuda:0", "cuda:1"]
    with pytest.raises(ConfigError, match=r"devices \[2\]: this machine has 2 CUDA devices"):
        roles.device_of(ServiceConfig(devices=(2,)))
    with pytest.raises(ConfigError, match=r"devices \[0, 1\]: a model on several GPUs is not supported"):
        roles.device_of(ServiceConfig(devices=(0, 1)))


@pytest.fixture
def moved_to(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Return where models were sent, on a machine that seems to have two GPUs; they stay on the CPU."""
    results: list[torch.device] = []
    real = nn.Module.to

    def to(module: nn.Module, device: torch.device | str) -> nn.Module:
        results.append(torch.device(device))
        return real(module, "cpu")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(nn.Module, "to", to)
    return results


@pytest.mark.parametrize("role", MODEL_ROLES)
def test_a_service_loads_its_model_on_its_own_device_and_says_so(
    role: Role, services: Services, changed: MakeConfig, moved_to: list[torch.device]
) -> None:
    config = changed(services={role: {"devices": [1]}})
    for other in MODEL_ROLES:
        moved_to.clear()
        expected = "cuda:1" if other is role else "cpu"
        assert services.build(other, config).status().device == expected
        assert set(moved_to) == {torch.device(expected)}
