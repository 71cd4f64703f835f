"""Memory of the roles that share a GPU: what each one needs, and its share of the rest. Imports no torch.

The shares depend on the config and the checkpoints only, not on the order in which the roles load their models. The arithmetic is
that of `quartet plan`. Models that it cannot count are counted by their files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import safetensors

from quartet.config.layout import generates_in_actor, memory_sharers
from quartet.config.root import Config
from quartet.contract.status import TRAINED_ROLES, Role
from quartet.errors import ConfigError
from quartet.model_files.hub_models import looks_local
from quartet.model_files.memory import DTYPE_BYTES, training_state
from quartet.model_files.shape import FLOAT32_BYTES, DecoderSizes, ModelShape, decoder_sizes
from quartet.planner.device_memory import CONTEXT_BYTES, engine_cache_bytes, trained_state
from quartet.planner.measured_shape import shape_of
from quartet.planner.workload import (
    configured_parallel,
    max_concurrent_sequences,
    model_dtype,
    model_work,
    read_description,
)

SCORING_WEIGHT = 0.25
"""Weight of a frozen model in the memory for activations, as a part of that of a trained model: it keeps none for a backward
pass."""
ADAPTER_FRACTION = 0.02
"""Trained parameters of a LoRA adapter on a model that cannot be counted, as a part of the model's. Larger than usual ones."""


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """Bytes that a process of a role holds between calls, and the number of the role's parameters.

    ``state``: master weights, gradients and AdamW's moments. ``cache``: buffers and graphs of the torch engine. ``copy``: weights
    besides those of the trained model, of an engine or for generators.
    """

    parameters: int
    weights: int
    state: int = 0
    cache: int = 0
    copy: int = 0

    @property
    def bytes(self) -> int:
        """The sum."""
        return self.weights + self.state + self.cache + self.copy


@dataclass(frozen=True, slots=True)
class GpuShare:
    """Share of a role in the memory of a GPU: what it needs, and the fraction ``weight`` of what no role needs.

    ``all_roles``: bytes that all roles on the GPU need, CUDA contexts included.
    """

    own: int
    all_roles: int
    weight: float

    def bytes(self, total: int) -> int:
        """Return the bytes of this role on a GPU of ``total`` bytes, including what it has allocated already."""
        return self.own + int(self.weight * max(0, total - self.all_roles))


def gpu_share(config: Config, role: Role, rank: int = 0) -> GpuShare | None:
    """Return the share of a rank of ``role`` in its GPU. None if a model is not a local directory, so that its size is not
    known."""
    sharers = memory_sharers(config, role, rank)
    if not all(looks_local(model) for each in sharers for model in _models(config, each).values()):
        # A model of the hub may be in the cache of one process of a run and not yet in that of another.
        return None
    memories = [role_memory(config, each) for each in sharers]
    known = [memory for memory in memories if memory is not None]
    if len(known) < len(memories):
        return None
    weights = [
        memory.parameters * (1.0 if each in TRAINED_ROLES else SCORING_WEIGHT)
        for each, memory in zip(sharers, known, strict=True)
    ]
    index = sharers.index(role)
    needed = sum(memory.bytes for memory in known) + CONTEXT_BYTES * len(sharers)
    return GpuShare(known[index].bytes, needed, weights[index] / (sum(weights) or 1.0))


def role_memory(config: Config, role: Role) -> RoleMemory | None:
    """Return the memory of each rank of a role. None if it is not known: for models without files on this machine, and for other
    engines.
    """
    if role is Role.GENERATOR and config.rollout.engine != "torch":
        return None
    on_gpu = bool(getattr(config.services, role).devices)
    memories = [_model_memory(config, role, key, model, on_gpu) for key, model in _models(config, role).items()]
    known = [memory for memory in memories if memory is not None]
    if len(known) < len(memories) or not known:
        return None
    generates = role is Role.GENERATOR or (role is Role.ACTOR and generates_on_its_device(config))
    copies = role is Role.ACTOR and ((generates and generates_in_actor(config)) or shares_gpu_memory(config))
    offloaded = role in TRAINED_ROLES and getattr(config.services, role).offload.parameters
    return RoleMemory(
        parameters=sum(memory.parameters for memory in known),
        weights=0 if offloaded else sum(memory.weights for memory in known),
        state=0 if offloaded else sum(memory.state for memory in known),
        cache=torch_cache_bytes(config, on_gpu) if generates else 0,
        copy=sum(memory.copy for memory in known) if copies else 0,
    )


def _models(config: Config, role: Role) -> dict[str, str]:
    """Return the models of a role by the keys of ``config.models``."""
    owner = Role.ACTOR if role is Role.GENERATOR else role
    return {key: model for key, model in config.models.items() if key.partition(".")[0] == owner}


def _model_memory(config: Config, role: Role, key: str, model: str, on_gpu: bool) -> RoleMemory | None:
    """Return the memory of a model, and of its training if it is trained. None if its size is not known."""
    size = DTYPE_BYTES[model_dtype(config, key)]
    try:
        work = model_work(config, key, model)
    except ConfigError:
        return _memory_of_files(config, role, model, size, on_gpu)
    adapter = work.trained if work.is_lora else 0
    whole = size * (work.parameters - adapter) + FLOAT32_BYTES * adapter
    if role is Role.GENERATOR:
        return RoleMemory(work.parameters, whole)
    parallel = configured_parallel(config, role)
    if not work.trained:
        return RoleMemory(work.parameters, whole // (parallel.shard * parallel.tensor))
    parts, _ = trained_state(work, not on_gpu, parallel, getattr(config.services, role).offload.optimizer)
    kept = sum(parts.values())
    return RoleMemory(work.parameters, int(parts["parameters"]), int(kept - parts["parameters"]), copy=whole)


def _memory_of_files(config: Config, role: Role, model: str, size: int, on_gpu: bool) -> RoleMemory | None:
    parameters = sum(map(_file_parameters, Path(model).glob("*.safetensors")))
    if not parameters or not (Path(model) / "config.json").is_file():
        return None
    if role is Role.GENERATOR:
        return RoleMemory(parameters, size * parameters)
    parallel = configured_parallel(config, role)
    ranks = parallel.shard * parallel.tensor
    if role not in TRAINED_ROLES:
        return RoleMemory(parameters, size * parameters // ranks)
    lora = getattr(config, role).lora
    adapter = int(ADAPTER_FRACTION * parameters) if lora else 0
    state = training_state(parameters + adapter, adapter or parameters, size, FLOAT32_BYTES if lora else None)
    if on_gpu:
        state = state.without_temporary_gradients()
    weights, others = int(state.parameters / ranks), int((state.kept - state.parameters) / ranks)
    return RoleMemory(parameters + adapter, weights, others, copy=size * parameters)


def generates_on_its_device(config: Config) -> bool:
    """Return whether the actor generates with the torch engine on the GPU that it trains on."""
    return config.rollout.engine == "torch" and not config.has_generators


def shares_gpu_memory(config: Config) -> bool:
    """Return whether the actor keeps a copy of the policy on its GPU for generators."""
    rollout, parallel = config.rollout, configured_parallel(config, Role.ACTOR)
    is_on_one_gpu = bool(config.services.actor.devices) and parallel.devices == 1
    return rollout.share_gpu_memory and rollout.share_weights and config.has_generators and is_on_one_gpu


def torch_cache_bytes(config: Config, on_gpu: bool = True) -> int:
    """Return the bytes that the torch engine keeps between generations: states of sequences, logits, on a GPU graphs, and the
    merged weights of rollout.merge_adapter.

    0 if the actor's config.json cannot be read.
    """
    if config.rollout.engine != "torch":
        return 0
    try:
        sizes = _decoder_sizes(config)
    except ConfigError:
        return 0
    cache = engine_cache_bytes(sizes, DTYPE_BYTES[config.actor.dtype], *cache_shape(config), graphs=on_gpu)
    if not config.rollout.merge_adapter:
        return cache
    merged = _model_memory(config, Role.GENERATOR, "actor.model", config.actor.model, on_gpu)
    return cache + (merged.weights if merged else 0)


def _decoder_sizes(config: Config) -> DecoderSizes | ModelShape:
    """Return the sizes of the actor, or those that its config.json names if it cannot be counted. Raises ConfigError."""
    description, where = read_description("actor.model", config.actor.model), f"actor.model {config.actor.model}"
    try:
        return shape_of(description, where)
    except ConfigError:
        return decoder_sizes(description, where)


def cache_shape(config: Config) -> tuple[int, int]:
    """Return the rows and columns of the key-value cache: concurrent sequences, and tokens of the longest one."""
    return max_concurrent_sequences(config), config.data.max_prompt_tokens + config.rollout.max_response_tokens


def _file_parameters(path: Path) -> int:
    """Return the number of parameters in a safetensors file, by its header. 0 for a damaged file, which loading reports."""
    try:
        with safetensors.safe_open(path, framework="np") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    except (OSError, safetensors.SafetensorError):
        return 0
