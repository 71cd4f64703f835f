"""LoRA adapters and frozen layers in services: the actor as reference, the files of each kind of save, and restarts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import transformers

from quartet.buffer.connection import Redis
from quartet.buffer.experience_store import ExperienceStore
from quartet.buffer.rollout_stream import RolloutStream
from quartet.config.root import Config
from quartet.contract.generation import SamplingParameters
from quartet.contract.status import Role
from quartet.contract.trajectory import Prompt
from quartet.contract.update import OptimizationSettings, PolicyLossSettings, ValueLossSettings
from quartet.contract.weights import SaveKind
from quartet.errors import FailedPrecondition, InvalidRequest, ModelError
from tests.buffer.samples import experience
from tests.services.model_services import Services, start_generation
from tests.unit.models import tiny

SETTINGS = OptimizationSettings(num_epochs=2, num_mini_batches=1, learning_rate=1e-2, max_grad_norm=1.0, seed=0)
LOSSES: dict[Role, Any] = {Role.ACTOR: PolicyLossSettings(), Role.CRITIC: ValueLossSettings(value_clip=0.0)}
SAVED = [kind for kind in SaveKind if kind is not SaveKind.EMA]
TRAINED = [Role.ACTOR, Role.CRITIC]
BATCH = tiny.batch([3, 2], [4, 7])
RUN = "lora"
ADAPTER = {"adapter_config.json", "adapter_model.safetensors"}
pytestmark = pytest.mark.usefixtures("store")


@pytest.fixture
def store(redis_client: Redis, redis_url: str) -> ExperienceStore:
    """Sealed experience of steps 1 and 2."""
    result = ExperienceStore(redis_client, redis_url, RUN)
    for step in (1, 2):
        result.seal(experience(RUN, step))
    return result


Lora = Callable[..., Config]


@pytest.fixture
def lora_config(make_config: Callable[..., Config]) -> Lora:
    """Factory of configs with adapters on actor and critic; ``changes`` apply to both sections."""

    def make(kind: str = "llama", seed: int = 1, **changes: Any) -> Config:
        tree = make_config(kind).model_dump()
        tree["run"]["seed"] = seed
        for role in TRAINED:
            tree[role] |= {"lora": {"rank": 4, "alpha": 8.0}, **changes}
        return Config.model_validate(tree)

    return make


def update(client: Any, steps: int = 2) -> None:
    for step in range(1, steps + 1):
        client.update(RUN, step, 1, SETTINGS, LOSSES[client.role]).result()


def outputs(client: Any) -> Any:
    return client.log_probs(BATCH, 0.7) if client.role is Role.ACTOR else client.values(BATCH).result()


def save(client: Any, config: Config, kind: SaveKind) -> Path:
    """Save, check the files that the service reports, and return the directory."""
    name = f"{client.role}-{kind}"
    files = client.save(RUN, 1, name, kind).result()
    assert {file.path for file in files} == {
        path.relative_to(config.run_directory).as_posix() for path in (config.run_directory / name).iterdir()
    }
    return config.run_directory / name


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_an_actor_with_an_adapter_computes_reference_log_probs_before_and_after_updates(
    kind: str, services: Services, lora_config: Lora
) -> None:
    config = lora_config(kind)
    actor, reference = services.start(Role.ACTOR, config), services.start(Role.REFERENCE, config)
    assert actor.wait_until_ready().answers_as_reference
    expected = reference.log_probs(BATCH, 0.7).result().tobytes()
    assert actor.reference_log_probs(BATCH, 0.7).result().tobytes() == expected
    assert outputs(actor).tobytes() == expected
    update(actor)
    policy = outputs(actor)
    assert actor.reference_log_probs(BATCH, 0.7).result().tobytes() == expected
    assert outputs(actor).tobytes() == policy.tobytes() != expected
    assert np.abs(policy - np.frombuffer(expected, np.float32)).max() > 1e-2


@pytest.mark.parametrize("dora", [False, True])
def test_an_actor_that_merges_its_adapter_generates_with_it_and_keeps_the_reference(
    dora: bool, services: Services, lora_config: Lora, redis_client: Redis, redis_url: str
) -> None:
    base = lora_config(lora={"rank": 4, "alpha": 8.0, "dora": dora})
    merging = Config.model_validate(
        base.model_dump() | {"rollout": {**base.rollout.model_dump(), "merge_adapter": True}}
    )
    sampled, stream = [], RolloutStream(redis_client, redis_url, RUN)
    for config in (base, merging):
        actor = services.start(Role.ACTOR, config)
        expected = actor.reference_log_probs(BATCH, 0.7).result().tobytes()
        update(actor)
        stream.reset(1)
        prompts = [Prompt(index, np.array([3, 4 + index], np.int32)) for index in range(4)]
        start_generation(actor, RUN, prompts, SamplingParameters(8), step=3, policy_version=2).result()
        received = [delivery.trajectory for delivery in stream.read(4, 5.0)]
        sampled.append({item.id: (item.response_ids.tolist(), item.log_probs) for item in received})
        assert actor.reference_log_probs(BATCH, 0.7).result().tobytes() == expected
    separate, merged = sampled
    assert len(merged) == 4
    for key, (ids, log_probs) in merged.items():
        assert ids == separate[key][0]
        np.testing.assert_allclose(log_probs, separate[key][1], atol=1e-5)
    assert any((log_probs != separate[key][1]).any() for key, (_, log_probs) in merged.items())


def test_a_failed_reference_call_leaves_the_adapter_enabled(services: Services, lora_config: Lora) -> None:
    actor = services.start(Role.ACTOR, lora_config())
    update(actor, 1)
    policy = outputs(actor)
    with pytest.raises(InvalidRequest, match="positions for 64"):
        actor.reference_log_probs(tiny.batch([60], [20]), 1.0).result()
    assert outputs(actor).tobytes() == policy.tobytes()
    actor.update(RUN, 2, 1, SETTINGS, LOSSES[Role.ACTOR]).result()
    assert outputs(actor).tobytes() != policy.tobytes()


def test_an_actor_without_an_adapter_refuses_reference_log_probs(
    services: Services, make_config: Callable[..., Config]
) -> None:
    actor = services.start(Role.ACTOR, make_config())
    assert not actor.wait_until_ready().answers_as_reference
    with pytest.raises(FailedPrecondition, match=r"no adapter to disable; set actor\.lora"):
        actor.reference_log_probs(BATCH, 1.0).result()


def test_the_seed_determines_the_adapter_initialization(services: Services, lora_config: Lora) -> None:
    first, same, other = (services.start(Role.ACTOR, lora_config(seed=seed)) for seed in (1, 1, 2))
    for client in (first, same, other):
        update(client, 1)
    assert outputs(first).tobytes() == outputs(same).tobytes() != outputs(other).tobytes()


@pytest.mark.parametrize("role", TRAINED)
def test_each_kind_of_save_writes_its_files(role: Role, services: Services, lora_config: Lora) -> None:
    config = lora_config()
    client = services.start(role, config)
    update(client, 1)
    before = outputs(client)
    head = {"value_head.safetensors"} if role is Role.CRITIC else set()
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    results = {kind: {path.name for path in save(client, config, kind).iterdir()} for kind in SAVED}
    assert results[SaveKind.ADAPTER] == ADAPTER | head | tokenizer
    assert results[SaveKind.CHECKPOINT] == ADAPTER | head | tokenizer | {"optimizer.safetensors"}
    generation = {"generation_config.json"} if role is Role.ACTOR else set()
    assert results[SaveKind.MODEL] == {"config.json", "model.safetensors"} | generation | head | tokenizer
    assert outputs(client).tobytes() == before.tobytes()
    directory = config.run_directory / f"{role}-checkpoint"
    written = json.loads((directory / "adapter_config.json").read_text())
    expected = config.actor.model if role is Role.ACTOR else config.critic_model
    assert (written["base_model_name_or_path"], written["r"], written["lora_alpha"]) == (expected, 4, 8)
    adapter = safetensors.numpy.load_file(directory / "adapter_model.safetensors")
    moments = safetensors.numpy.load_file(directory / "optimizer.safetensors")
    trained = len(adapter) + len(head)
    assert len({name.partition(".")[0] for name in moments}) == trained > 0
    client.update(RUN, 2, 1, SETTINGS, LOSSES[role]).result()
    assert outputs(client).tobytes() != before.tobytes()


@pytest.mark.parametrize(("role", "kind"), [*((Role.ACTOR, kind) for kind in SAVED), (Role.CRITIC, SaveKind.ADAPTER)])
def test_a_service_starts_from_each_kind_of_save(
    kind: SaveKind, role: Role, services: Services, lora_config: Lora
) -> None:
    config = lora_config()
    client = services.start(role, config)
    update(client)
    tree = lora_config().model_dump()
    tree[role]["model"] = str(save(client, config, kind))
    restarted = services.start(role, Config.model_validate(tree))
    np.testing.assert_allclose(outputs(restarted), outputs(client), atol=1e-5)
    # The restarted service merges the saved adapter into its base model and adds a new adapter.
    update(restarted, 1)
    if role is Role.ACTOR:
        np.testing.assert_allclose(restarted.reference_log_probs(BATCH, 0.7).result(), outputs(client), atol=1e-5)
    assert np.abs(outputs(restarted) - outputs(client)).max() > 1e-3


def test_a_saved_model_loads_in_transformers_without_peft(services: Services, lora_config: Lora) -> None:
    config = lora_config("gpt2")
    actor = services.start(Role.ACTOR, config)
    update(actor)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(save(actor, config, SaveKind.MODEL))
    assert not any("lora" in name for name, _ in loaded.named_parameters())
    tree = lora_config("gpt2").model_dump()
    tree["reference"]["model"] = str(config.run_directory / "actor-model")
    reference = services.start(Role.REFERENCE, Config.model_validate(tree))
    np.testing.assert_allclose(reference.log_probs(BATCH, 0.7).result(), outputs(actor), atol=1e-5)


@pytest.mark.parametrize("role", TRAINED)
def test_saving_an_adapter_is_refused_without_one(
    role: Role, services: Services, make_config: Callable[..., Config]
) -> None:
    config = make_config()
    client = services.start(role, config)
    with pytest.raises(FailedPrecondition, match=rf"this {role} has no adapter; set {role}\.lora"):
        client.save(RUN, 1, "adapter", SaveKind.ADAPTER).result()
    assert not (config.run_directory / "adapter").exists()


@pytest.mark.parametrize("role", TRAINED)
def test_frozen_parameters_are_saved_unchanged(role: Role, services: Services, lora_config: Lora) -> None:
    config = lora_config(lora=None, freeze=["*.layers.0.*"])
    client = services.start(role, config)
    update(client)
    saved = safetensors.numpy.load_file(save(client, config, SaveKind.MODEL) / "model.safetensors")
    first = Path(config.actor.model if role is Role.ACTOR else config.critic_model) / "model.safetensors"
    original = {name.removeprefix("model."): value for name, value in safetensors.numpy.load_file(first).items()}
    assert len(saved) >= 20
    for name, value in saved.items():
        unchanged = value.tobytes() == original[name.removeprefix("model.")].tobytes()
        assert unchanged == (".layers.0." in f".{name}"), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": None, "freeze": ["*.h.0.*"]}, "freeze '.*': matches no parameter of "),
        ({"lora": {"target_modules": ["c_attn"]}}, "lora.target_modules 'c_attn': no layer has this name"),
    ],
)
@pytest.mark.parametrize("role", TRAINED)
def test_unknown_layer_names_stop_the_start(
    role: Role, changes: dict[str, Any], message: str, services: Services, lora_config: Lora
) -> None:
    with pytest.raises(ModelError, match=message):
        services.build(role, lora_config(**changes))
