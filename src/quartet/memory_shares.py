"""Memory of the roles that share a GPU: what each one needs, and its share of the rest. Imports no torch.

The shares depend on the config and the checkpoints only, not on the order in which the roles load their models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors

from quartet.config import Config
from quartet.topology import generates_in_actor, memory_sharers
from quartet.types import TRAINED_ROLES, Role

CONTEXT_BYTES = 700 * 2**20
"""Memory of a process on a GPU before its first tensor: the CUDA context and its libraries. An estimate."""
GRAPH_LAYER_BYTES = 2**18
"""Memory of a captured graph per layer of the model: about 20 kernels with their arguments. An estimate, not measured."""
SCORING_WEIGHT = 0.25
"""Weight of a frozen model in the memory for activations, as a part of that of a trained model: it keeps none for a backward
pass."""
ADAPTER_FRACTION = 0.02
"""Trained parameters of a LoRA adapter, as a part of the model's. Larger than usual ones."""
_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """Bytes that a role holds on a GPU between calls, and the number of its parameters.

    ``state``: master weights, gradients and AdamW's moments. ``cache``: buffers and graphs of the torch engine.
    """

    parameters: int
    weights: int
    state: int = 0
    cache: int = 0

    @property
    def bytes(self) -> int:
        """The sum."""
        return self.weights + self.state + self.cache


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


def gpu_share(config: Config, role: Role) -> GpuShare | None:
    """Return the share of ``role`` in its GPU. None if a model is not a local directory, so that its size is not known."""
    sharers = memory_sharers(config, role)
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
    """Return the memory of a role on a GPU. None if it is not known: for models that are not local, and for other engines."""
    if role is Role.GENERATOR and config.rollout.engine != "torch":
        return None
    if role is Role.GENERATOR:
        models, dtype = [config.actor.model], config.actor.dtype
    else:
        models = [model for key, model in config.models.items() if key.partition(".")[0] == role]
        dtype = getattr(getattr(config, role), "dtype", None) or config.actor.dtype
    counts = [_directory_parameters(Path(model)) for model in models]
    if not all(counts):
        return None
    parameters, size = sum(counts), _SIZES[dtype]
    state = 0
    if role in TRAINED_ROLES:
        trained = parameters
        if getattr(config, role).lora:
            trained, size_of_trained = int(ADAPTER_FRACTION * parameters), 4
        else:
            size_of_trained = size
        state = trained * trained_state_bytes(size_of_trained)
    generates = role is Role.GENERATOR or (role is Role.ACTOR and generates_on_its_device(config))
    return RoleMemory(parameters, parameters * size, state, engine_cache_bytes(config) if generates else 0)


def trained_state_bytes(size: int) -> int:
    """Return the bytes per trained parameter on a GPU besides the weight, whose ``size`` is in bytes.

    A float32 gradient and the two moments of AdamW, and for a weight in half precision its master weight.
    """
    return 4 + 8 + (4 if size < 4 else 0)


def generates_on_its_device(config: Config) -> bool:
    """Return whether the actor generates with the torch engine on the GPU that it trains on."""
    engine_is_here = config.rollout.engine == "torch" and not config.has_generators
    elsewhere = generates_in_actor(config) and len(config.services.actor.devices) > 1
    return engine_is_here and not elsewhere


def engine_cache_bytes(config: Config) -> int:
    """Return the bytes that the torch engine keeps between generations on a GPU: key-value cache, logits and graphs.

    0 if the actor's model is not a local directory.
    """
    if config.rollout.engine != "torch":
        return 0
    shape = _shape(Path(config.actor.model))
    if shape is None:
        return 0
    layers, token_values, vocabulary = shape
    slots, columns = cache_shape(config)
    size = _SIZES[config.actor.dtype]
    column_sizes = math.ceil(columns / 64) if columns <= 1024 else 16 + 8 * math.ceil(math.log2(columns / 1024))
    graphs = 2 * (column_sizes + slots.bit_length())
    return slots * size * (columns * token_values + vocabulary) + graphs * layers * GRAPH_LAYER_BYTES


def cache_shape(config: Config) -> tuple[int, int]:
    """Return the rows and columns of the key-value cache: concurrent sequences, and tokens of the longest one, rounded up."""
    rollout = config.rollout
    slots = rollout.max_concurrent_sequences
    if config.data.validation is None:
        slots = min(slots, rollout.prompts_per_step * rollout.samples_per_prompt)
    return slots, -(-(config.data.max_prompt_tokens + rollout.max_response_tokens) // 64) * 64


def count_file_parameters(path: Path) -> int:
    """Return the number of parameters in a safetensors file, by its header. 0 for a damaged file, which loading reports."""
    try:
        with safetensors.safe_open(path, framework="np") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    except (OSError, safetensors.SafetensorError):
        return 0


def _directory_parameters(directory: Path) -> int:
    return sum(map(count_file_parameters, directory.glob("*.safetensors"))) if _shape(directory) else 0


def _shape(directory: Path) -> tuple[int, int, int] | None:
    """Return layers, numbers in the cache per token, and vocabulary of a checkpoint. None without a readable config.json."""
    try:
        content = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return None
    config: Mapping[str, Any] = content.get("text_config") or content
    layers = config.get("num_hidden_layers") or config.get("n_layer")
    heads = config.get("num_attention_heads") or config.get("n_head")
    hidden = config.get("hidden_size") or config.get("n_embd")
    if not (layers and heads and hidden):
        return None
    groups, head = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
    return layers, 2 * layers * groups * head, config.get("vocab_size") or 0
