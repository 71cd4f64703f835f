"""The work of one training step, from the config and the models' config.json. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.errors import ConfigError, ModelError
from quartet.model_files.adapter_files import adapter_chain
from quartet.model_files.hub_models import cached_snapshot, looks_local
from quartet.model_files.memory import ADAMW_MOMENT_BYTES, DTYPE_BYTES
from quartet.model_files.shape import FLOAT32_BYTES, ModelShape
from quartet.planner.measured_shape import shape_of
from quartet.planner.roofline import Parallel

EXTERNAL_ENGINES = ("triton", "vllm-server", "sglang-server")
"""Engines on servers with their own GPUs, which the plan does not include."""


@dataclass(frozen=True, slots=True)
class RoleWork:
    """A model of a run. ``trained``: parameters that the optimizer trains, 0 for a frozen model.

    ``micro_batch_tokens``: configured maximum, None if the service chooses. ``has_logits``: the role needs log-probs.
    ``merges_adapter``: it decodes with copies of its adapted weights. ``trains_entropy``: its loss has the entropy.
    ``has_average``: it keeps a float32 moving average of its trained weights in host memory. ``moment_bytes``: bytes of the
    optimizer's moments per trained parameter.
    """

    role: Role
    name: str
    shape: ModelShape
    dtype: str
    parameters: int
    trained: int
    micro_batch_tokens: int | None
    checkpointing: bool | None = None
    has_logits: bool = False
    is_lora: bool = False
    merges_adapter: bool = False
    trains_entropy: bool = False
    has_average: bool = False
    moment_bytes: float = ADAMW_MOMENT_BYTES

    @property
    def dtype_bytes(self) -> int:
        """Bytes of an element in the computation's data type."""
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Workload:
    """One training step: the models and the numbers of sequences and tokens.

    ``mean_prompt`` and ``mean_response`` determine the times, ``max_prompt`` and ``max_response`` the memory.
    """

    roles: tuple[RoleWork, ...]
    prompts: int
    samples: int
    max_prompt: int
    max_response: int
    mean_prompt: int
    mean_response: int
    concurrent: int
    epochs: int
    mini_batches: int
    temperature: float
    engine: str
    off_policy: int
    process_group: str = "none"
    shares_weights: bool = True
    shares_gpu_memory: bool = False
    remote: tuple[str, ...] = ()

    @property
    def responses(self) -> int:
        """Responses per step."""
        return self.prompts * self.samples

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.max_prompt + self.max_response

    @property
    def mean_length(self) -> int:
        """Tokens of an average sequence."""
        return self.mean_prompt + self.mean_response

    @property
    def generates(self) -> bool:
        """Return whether generation needs devices of the plan."""
        return self.engine not in EXTERNAL_ENGINES and self.role(Role.ACTOR) is not None

    def role(self, role: Role) -> RoleWork | None:
        """Return the first model of a role, or None if it is not part of the plan."""
        return next((each for each in self.roles if each.role is role), None)

    def prompt_share(self, micro_batch_tokens: int) -> float:
        """Return how many samples of a prompt share a micro-batch, which then computes the prompt once (ADR 42)."""
        fitting = micro_batch_tokens / self.mean_length
        return max(1.0, min(float(self.samples), float(int(fitting))))

    def tokens(self, shape: ModelShape, micro_batch_tokens: int) -> float:
        """Return the tokens of a step that a model computes, with shared prompts."""
        share = self.prompt_share(micro_batch_tokens) if shape.packs else 1.0
        return self.responses * (self.mean_prompt / share + self.mean_response)


def read_workload(
    config: Config, mean_prompt: int | None = None, mean_response: int | None = None, skip_uncounted: bool = False
) -> Workload:
    """Return the work of a step.

    ``skip_uncounted``: leave out models whose config.json is missing or describes a model that cannot be counted. Otherwise they
    raise ConfigError.
    """
    max_prompt, max_response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    for option, mean, most, key in (
        ("--mean-prompt-tokens", mean_prompt, max_prompt, "data.max_prompt_tokens"),
        ("--mean-response-tokens", mean_response, max_response, "rollout.max_response_tokens"),
    ):
        if mean is not None and not 1 <= mean <= most:
            raise ConfigError(f"{option} {mean}: expected 1 to {most}, the limit of {key}; correct it")
    remote = tuple(key.partition(".")[0] for key in config.models if _is_remote(config, key))
    return Workload(
        roles=tuple(_roles(config, skip_uncounted)),
        prompts=config.rollout.prompts_per_step,
        samples=config.rollout.samples_per_prompt,
        max_prompt=max_prompt,
        max_response=max_response,
        mean_prompt=mean_prompt or max_prompt,
        mean_response=mean_response or max_response,
        concurrent=max_concurrent_sequences(config),
        epochs=config.algorithm.num_epochs,
        mini_batches=config.algorithm.num_mini_batches,
        temperature=config.rollout.temperature,
        engine=config.rollout.engine,
        off_policy=config.rollout.max_off_policy_steps,
        process_group=config.rollout.process_group,
        shares_weights=config.rollout.share_weights,
        shares_gpu_memory=config.rollout.share_weights and config.rollout.share_gpu_memory,
        remote=tuple(dict.fromkeys(remote)),
    )


def _is_remote(config: Config, key: str) -> bool:
    return getattr(config.services, key.partition(".")[0]).address is not None


def _roles(config: Config, skip_uncounted: bool) -> list[RoleWork]:
    """Return the models on the devices of the plan."""
    roles = []
    for key, model in config.models.items():
        if _is_remote(config, key):
            continue
        try:
            roles.append(model_work(config, key, model))
        except ConfigError:
            if not skip_uncounted:
                raise
    return roles


def model_work(config: Config, key: str, model: str) -> RoleWork:
    """Return the model under a key of ``config.models``. Raises ConfigError if it cannot be counted."""
    shape = shape_of(read_description(key, model), f"{key} {model}")
    return role_work(config, key, Role(key.partition(".")[0]), shape, starts_from_reward=model == config.reward.model)


def model_dtype(config: Config, key: str) -> str:
    """Return the data type in which a model of ``config.models`` computes."""
    role = Role(key.partition(".")[0])
    if role is Role.REFERENCE:
        return config.reference.dtype or config.actor.dtype
    if role is Role.REWARD:
        parts = {f"reward.parts.{part.name}.model": part for part in config.reward.parts}
        return str(parts.get(key, config.reward).dtype)
    return str(getattr(config, role).dtype)


def configured_parallel(config: Config, role: Role) -> Parallel:
    """Return the parallel sizes of a model role in this config."""
    service = getattr(config.services, role)
    replicate, tensor = service.parallel.replicate, service.parallel.tensor
    return Parallel(replicate, service.num_ranks // (replicate * tensor), tensor)


def max_concurrent_sequences(config: Config) -> int:
    """Return the number of sequences that are decoded at the same time. Evaluation may decode more than a step generates."""
    rollout = config.rollout
    if config.data.has_validation or config.evaluation.sets:
        return rollout.max_concurrent_sequences
    return min(
        rollout.max_concurrent_sequences,
        rollout.prompts_per_step * (rollout.samples_per_prompt + config.num_greedy_baselines),
    )


def role_work(config: Config, key: str, role: Role, shape: ModelShape, starts_from_reward: bool = False) -> RoleWork:
    """Return a model of a run. ``starts_from_reward``: a critic that gets the head of a classifier."""
    if role in (Role.ACTOR, Role.CRITIC):
        section: Any = getattr(config, role)
        if role is Role.ACTOR:
            parameters = shape.parameters
        else:
            parameters = shape.classifier_parameters if starts_from_reward else shape.value_parameters
        adapter = shape.lora_parameters(section.lora.rank + section.lora.dora) if section.lora else 0
        head = parameters - shape.backbone_parameters if role is Role.CRITIC else 0
        return RoleWork(
            role=role,
            name=key.rpartition(".")[0],
            shape=shape,
            dtype=model_dtype(config, key),
            parameters=parameters + adapter,
            trained=adapter + head if section.lora else parameters,
            micro_batch_tokens=section.micro_batch_tokens,
            checkpointing=section.gradient_checkpointing,
            has_logits=role is Role.ACTOR,
            is_lora=section.lora is not None,
            merges_adapter=role is Role.ACTOR and config.rollout.merge_adapter,
            trains_entropy=role is Role.ACTOR and config.algorithm.trains_entropy,
            has_average=role is Role.ACTOR and config.actor.ema_decay is not None,
            moment_bytes=moment_bytes(
                section.optimizer.kind,
                1.0 if section.lora else (shape.layer_parameters - shape.expert_parameters) / parameters,
            ),
        )
    if role is Role.REFERENCE:
        tokens = config.reference.micro_batch_tokens
        return RoleWork(role, role, shape, model_dtype(config, key), shape.parameters, 0, tokens, has_logits=True)
    parts = {f"reward.parts.{part.name}.model": part for part in config.reward.parts}
    tokens = parts.get(key, config.reward).micro_batch_tokens
    return RoleWork(
        role, key.rpartition(".")[0], shape, model_dtype(config, key), shape.classifier_parameters, 0, tokens
    )


def moment_bytes(kind: str, matrices: float) -> float:
    """Return the bytes of an optimizer's moments per trained parameter. ``matrices``: fraction that Muon would step."""
    if kind == "muon":
        return ADAMW_MOMENT_BYTES - FLOAT32_BYTES * matrices
    # Two codes of a byte, and two float32 scales for each 256 parameters.
    return 2 + 2 * FLOAT32_BYTES / 256 if kind == "adamw8bit" else ADAMW_MOMENT_BYTES


def read_description(key: str, model: str) -> Mapping[str, Any]:
    """Return the config.json of a model, or of the base model of an adapter: from a folder or from the local hub cache.

    Raises ConfigError.
    """
    try:
        base = str(adapter_chain(model)[0])
    except ModelError as error:
        raise ConfigError(f"{key} {model}: {error}") from None
    local = looks_local(base)
    folder = Path(base) if local else cached_snapshot(base)
    if folder is None or not (folder / "config.json").is_file():
        how = (
            "expected the directory of a Hugging Face model; correct the path"
            if local
            else f"the plan needs no weights: run `hf download {base} config.json`, or give a directory with it"
        )
        place = f"{base}/config.json does not exist" if local else f"{base} has no config.json in the local hub cache"
        raise ConfigError(f"{key}: {place}; {how}")
    try:
        value = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key}: {folder / 'config.json'} cannot be read as JSON ({error}); save the model again"
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{key}: {folder / 'config.json'}: expected a JSON object; save the model again")
    return value
