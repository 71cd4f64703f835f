"""Effects of the options of a model section: the optimizer, the dtype, the device, the size of a forward pass."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import structlog
import torch
from torch import nn

from quartet.buffer.connection import Redis
from quartet.buffer.experience_store import ExperienceStore
from quartet.config.deployment import ServiceConfig
from quartet.config.root import Config
from quartet.contract.generation import SamplingParameters
from quartet.contract.status import MODEL_ROLES, Role
from quartet.contract.trajectory import Prompt
from quartet.contract.update import Experience, OptimizationSettings, PolicyLossSettings, ValueLossSettings
from quartet.contract.weights import SaveKind
from quartet.errors import ConfigError
from quartet.models.training.update_memory import trial_batch
from quartet.services import roles, trainable_model
from tests.services.model_services import Services, save_checkpoint, start_generation
from tests.unit.models import tiny
from tests.unit.models.training.test_compiled_layers import capture_only

RUN = "options"
SEQUENCES = 12
BATCH = tiny.batch([2] * SEQUENCES, [3] * SEQUENCES)
"""Sequences of five tokens each."""
SETTINGS = OptimizationSettings(num_epochs=1, num_mini_batches=1, learning_rate=3e-3, max_grad_norm=0.02, seed=0)
LOSSES: dict[Role, Any] = {Role.ACTOR: PolicyLossSettings(), Role.CRITIC: ValueLossSettings(value_clip=0.0)}
TRAINED = [Role.ACTOR, Role.CRITIC]

MakeConfig = Callable[..., Config]
Passes = list[tuple[tuple[int, ...], torch.dtype]]


@pytest.fixture(scope="module", autouse=True)
def _measured_once() -> None:
    """Let each service measure at its start."""


@pytest.fixture
def changed_config(make_config: MakeConfig) -> MakeConfig:
    """Factory of configs with the tiny checkpoints and with changes to sections."""

    def make(**sections: dict[str, Any]) -> Config:
        tree = make_config().model_dump()
        tree["actor"]["gradient_checkpointing"] = None  # The default, so that it is tried at the start.
        for name, changes in sections.items():
            tree[name] |= changes
        return Config.model_validate(tree)

    return make


@pytest.fixture
def passes() -> Iterator[Passes]:
    """Each forward pass: the shape of its token ids [rows, longest] and the dtype of the embedding."""
    results: Passes = []

    def record(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, nn.Embedding):
            results.append((tuple(inputs[0].shape), module.weight.dtype))

    hook = nn.modules.module.register_module_forward_pre_hook(record)
    yield results
    hook.remove()


@pytest.fixture
def _sealed(redis_client: Redis, redis_url: str) -> None:
    """Seal experience of step 1 over BATCH."""
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
def test_the_optimizer_has_the_options_of_its_section_and_the_learning_rate_of_the_request(
    role: Role, services: Services, changed_config: MakeConfig
) -> None:
    own = {"betas": [0.6, 0.7], "eps": 1e-3, "weight_decay": 0.25}
    other = {"betas": [0.5, 0.55], "eps": 1e-2, "weight_decay": 0.125}
    config = changed_config(
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


@pytest.mark.usefixtures("_sealed")
@pytest.mark.slow
def test_a_compiled_service_compiles_at_its_start_and_not_in_updates(
    services: Services, changed_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    graphs: list[Any] = []

    def compile_nothing(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    capture_only(compile_nothing, monkeypatch)
    model = save_checkpoint(tiny.causal("gpt2", num_hidden_layers=1), tmp_path)  # Its layers are captured fast.
    client = services.start(Role.ACTOR, changed_config(actor={"compile": True, "model": str(model)}))
    compiled = len(graphs)
    assert compiled > 0
    client.update(RUN, 1, 1, SETTINGS, LOSSES[Role.ACTOR]).result()
    assert len(graphs) == compiled


@pytest.mark.usefixtures("_sealed")
def test_a_model_whose_layers_keep_a_state_is_not_compiled(
    services: Services, changed_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    capture_only(lambda *_: pytest.fail("a layer is compiled"), monkeypatch)
    model = save_checkpoint(tiny.causal("lfm2", seed=3), tmp_path)
    with structlog.testing.capture_logs() as logs:
        client = services.start(Role.ACTOR, changed_config(actor={"compile": True, "model": str(model)}))
    assert "compile is off: layers of this model keep a state" in [each["event"] for each in logs]
    client.update(RUN, 1, 1, SETTINGS, LOSSES[Role.ACTOR]).result()


@pytest.mark.usefixtures("_sealed")
@pytest.mark.parametrize("role", TRAINED)
def test_a_service_compiles_the_outputs_of_its_updates_if_its_section_says_so(
    role: Role, services: Services, changed_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, switches = list[str](), list[bool]()

    def try_outputs(model: Any, forward: Callable[[Any], torch.Tensor], name: str, workers: Any) -> None:
        assert forward(trial_batch(model, [4, 3])).requires_grad
        tried.append(name)

    def layers(model: Any, on: bool) -> AbstractContextManager[None]:
        switches.append(on)
        return nullcontext()

    monkeypatch.setattr(trainable_model, "try_compiled", try_outputs)
    monkeypatch.setattr(trainable_model, "compiled_layers", layers)
    for on in (False, True):
        switches.clear()
        client = services.start(role, changed_config(**{role: {"compile": on}}))
        client.update(RUN, 1, 1, SETTINGS, LOSSES[role]).result()
        assert set(switches) == {on}
    assert tried == [role]


REQUESTS: dict[str, tuple[Role, Callable[[Any], Any]]] = {
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
"""Rows of a forward pass by role. Each divides the number of sequences."""
TOKENS = {Role.ACTOR: 4, Role.CRITIC: 4, Role.REWARD: 5, Role.REFERENCE: 4}
"""Tokens of a sequence that the forward pass reads, by role. Only a score needs the last token."""
TRIAL = [(3, 5), (1, 5), (1, 4), (1, 2), (1, 9)]
"""Forward passes that test once if padded and packed sequences equal each alone. Trained models run them at the start."""


@pytest.mark.usefixtures("_sealed")
@pytest.mark.parametrize("name", REQUESTS)
def test_a_forward_pass_has_the_configured_micro_batch_size(
    name: str, services: Services, changed_config: MakeConfig, passes: Passes
) -> None:
    role, call = REQUESTS[name]
    size = TOKENS[role] * ROWS[role]
    client = services.start(role, changed_config(**{role: {"micro_batch_tokens": size}}))
    passes.clear()
    call(client)
    trial = [] if role in TRAINED else TRIAL
    assert [shape for shape, _ in passes] == [*trial, *[(1, size)] * (SEQUENCES // ROWS[role])]


def test_reference_passes_of_an_adapter_have_the_actors_micro_batch_size(
    services: Services, changed_config: MakeConfig, passes: Passes
) -> None:
    client = services.start(Role.ACTOR, changed_config(actor={"lora": {"rank": 2}, "micro_batch_tokens": 16}))
    passes.clear()
    client.reference_log_probs(BATCH, 1.0).result()
    assert [shape for shape, _ in passes] == [(1, 16)] * 3


def test_at_most_max_concurrent_sequences_are_decoded_at_once(
    services: Services, changed_config: MakeConfig, passes: Passes
) -> None:
    client = services.start(Role.ACTOR, changed_config(rollout={"max_concurrent_sequences": 3}))
    prompts = [Prompt(index, np.array([index + 2, 5], np.int32)) for index in range(7)]
    passes.clear()
    start_generation(client, RUN, prompts, SamplingParameters(4, ignore_eos=True)).result()
    assert max(rows for (rows, _), _ in passes) == 4  # Buffers have a multiple of 4 rows.


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
def test_a_model_computes_in_its_configured_dtype_and_the_reference_defaults_to_the_actors(
    role: Role,
    dtypes: dict[str, str | None],
    expected: torch.dtype,
    services: Services,
    changed_config: MakeConfig,
    passes: Passes,
) -> None:
    client = services.start(role, changed_config(**{name: {"dtype": dtype} for name, dtype in dtypes.items()}))
    assert client.wait_until_ready().dtype == str(expected).removeprefix("torch.")
    passes.clear()
    next(call for owner, call in REQUESTS.values() if owner is role)(client)
    assert {dtype for _, dtype in passes} == {expected}


def test_devices_have_torch_names_and_invalid_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(roles, "check_gpu", lambda index: None)
    assert roles.device_of(ServiceConfig()) == "cpu"
    assert [roles.device_of(ServiceConfig(devices=(index,))) for index in range(2)] == ["cuda:0", "cuda:1"]
    with pytest.raises(ConfigError, match=r"devices \[2\]: this machine has 2 CUDA devices and lacks \[2\]"):
        roles.device_of(ServiceConfig(devices=(2,)))
    group = ServiceConfig(devices=(1, 0))
    assert [roles.device_of(group, rank) for rank in range(4)] == ["cuda:1", "cuda:0"] * 2
    with pytest.raises(ConfigError, match=r"devices \[0, 3, 5\]: .* lacks \[3, 5\]"):
        # Also in rank 0, whose device exists.
        roles.device_of(ServiceConfig(devices=(0, 3, 5)))


@pytest.fixture
def target_devices(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices of all moves of models. CUDA reports two GPUs, but the models stay on the CPU."""
    results: list[torch.device] = []
    real = nn.Module.to

    def to(module: nn.Module, device: torch.device | str) -> nn.Module:
        results.append(torch.device(device))
        return real(module, "cpu")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(roles, "check_gpu", lambda index: None)
    monkeypatch.setattr(trainable_model, "matmul_peak", lambda *arguments: 0.0)
    monkeypatch.setattr(nn.Module, "to", to)
    return results


@pytest.mark.parametrize("role", MODEL_ROLES)
def test_a_service_loads_its_model_on_its_device_and_reports_it(
    role: Role, services: Services, changed_config: MakeConfig, target_devices: list[torch.device]
) -> None:
    config = changed_config(services={role: {"devices": [1]}})
    for other in MODEL_ROLES:
        target_devices.clear()
        expected = "cuda:1" if other is role else "cpu"
        assert services.build(other, config).status().device == expected
        assert set(target_devices) == {torch.device(expected)}
