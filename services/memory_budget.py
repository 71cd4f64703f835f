"""Micro-batch size of updates that fits into the free memory, measured once at the start of the service."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import structlog

from quartet.config.models import MAX_MICRO_BATCH_TOKENS, TrainedModelConfig
from quartet.contract.status import Role, ServiceStatus
from quartet.errors import ConfigError
from quartet.model_files.memory import MEMORY_FRACTION
from quartet.models.forward.model_capabilities import device_of
from quartet.models.training.update_memory import UpdateMemory, free_gpu_bytes, total_gpu_bytes
from quartet.models.workers.workers import local_tensor
from quartet.planner.memory_shares import GpuShare
from quartet.system.machine import free_memory_bytes

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class UpdateLimits:
    """The largest update of a run, and the share of the free memory that it may use.

    ``max_sequence_tokens``: prompt and response of the longest sequence. ``num_sharers``: model services on the same device,
    including this one. ``share``: share of this service in its GPU, if the sizes of all models on it are known.
    ``max_micro_batch_tokens``: upper limit of the default micro-batch size. ``cache``: bytes that the generation engine keeps on
    the same GPU, for the rows and columns of ``cache_shape``. ``copy``: bytes of weights that are added there later.
    """

    max_sequence_tokens: int
    trains_entropy: bool = False
    num_sharers: int = 1
    share: GpuShare | None = None
    max_micro_batch_tokens: int = MAX_MICRO_BATCH_TOKENS
    cache: int = 0
    cache_shape: tuple[int, int] = (0, 0)
    copy: int = 0


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Default micro-batch size of updates, and the measurement that it is based on.

    ``free`` is the free memory in bytes, without that of the generation engine's cache. ``memory`` is None and ``free`` 0 if
    nothing was measured. ``most`` is the upper limit of the default. ``frees_cache``: an update fits only if the cache of the
    engine is freed before it.
    """

    role: Role
    micro_batch_tokens: int
    gradient_checkpointing: bool | None = None
    memory: UpdateMemory | None = None
    free: int = 0
    most: int = MAX_MICRO_BATCH_TOKENS
    frees_cache: bool = False

    @property
    def max_tokens(self) -> int:
        """Largest micro-batch that fits the memory, in tokens; 0 if not measured."""
        if self.memory is None:
            return 0
        return max(
            self.memory.max_tokens_within(self.most, self.free, recomputes)
            for recomputes in self._checkpointing_options()
        )

    def needs_checkpointing(self, tokens: int) -> bool:
        """Return whether micro-batches of ``tokens`` tokens need gradient checkpointing. It does not change the results."""
        if self.gradient_checkpointing is not None or self.memory is None:
            return bool(self.gradient_checkpointing)
        return (
            self.memory.with_checkpointing is not None
            and self.memory.bytes(tokens, False) > MEMORY_FRACTION * self.free
        )

    def resolve(self, requested: int) -> tuple[int, bool]:
        """Return the micro-batch size of an update, ``requested`` or the default, and whether it uses gradient checkpointing."""
        tokens = requested or self.micro_batch_tokens
        if self.memory is not None and tokens > self.max_tokens:
            log.warning(
                "update may not fit the memory", role=self.role, micro_batch_tokens=tokens, max_tokens=self.max_tokens
            )
        return tokens, self.needs_checkpointing(tokens)

    def add_to(self, status: ServiceStatus) -> ServiceStatus:
        """Return ``status`` with the fields of this budget."""
        checkpointing = self.needs_checkpointing(self.micro_batch_tokens)
        return replace(
            status,
            micro_batch_tokens=self.micro_batch_tokens,
            micro_batch_tokens_held=self.max_tokens,
            gradient_checkpointing=checkpointing,
            token_bytes=self.memory.token_bytes(checkpointing) if self.memory else 0,
            free_bytes=self.free,
        )

    def _checkpointing_options(self) -> list[bool]:
        assert self.memory is not None
        options = [False, True] if self.gradient_checkpointing is None else [self.gradient_checkpointing]
        return [each for each in options if not each or self.memory.with_checkpointing is not None] or [False]


def find_budget(
    role: Role, config: TrainedModelConfig, memory: UpdateMemory, free: int, limits: UpdateLimits
) -> MemoryBudget:
    """Return the budget for ``free`` bytes.

    The engine's cache stays during updates if the longest sequence fits beside it; otherwise each update frees it, and the next
    generation allocates it and captures its graphs again. Raises ConfigError if the cache does not fit, or if the longest
    sequence does not fit and the config gives no micro-batch size.
    """
    configured, checkpointing = config.micro_batch_tokens, config.gradient_checkpointing
    if checkpointing and memory.with_checkpointing is None:
        raise ConfigError(
            f"{role}.gradient_checkpointing: this model's architecture does not support it; set it to false"
        )
    _check_cache(memory, free, limits)
    most = limits.max_micro_batch_tokens
    beside_cache = MemoryBudget(role, 0, checkpointing, memory, free - limits.cache, most)
    # An engine with a copy of the weights may generate during an update.
    frees_cache = limits.cache > 0 and not limits.copy and not beside_cache.max_tokens
    free -= 0 if frees_cache else limits.cache
    without_checkpointing = 0 if checkpointing else memory.max_tokens_within(most, free, False)
    tokens = configured or without_checkpointing or MemoryBudget(role, 0, checkpointing, memory, free, most).max_tokens
    if not tokens:
        raise ConfigError(_too_small(role, config, memory, free))
    budget = MemoryBudget(role, tokens, checkpointing, memory, free, most, frees_cache)
    log.info(
        "memory of updates",
        role=role,
        micro_batch_tokens=tokens,
        max_tokens=budget.max_tokens,
        gradient_checkpointing=budget.needs_checkpointing(tokens),
        free_bytes=free,
        cache_bytes=limits.cache,
        frees_cache=frees_cache,
    )
    return budget


def _check_cache(memory: UpdateMemory, free: int, limits: UpdateLimits) -> None:
    """Raise ConfigError if the engine's cache does not fit beside the optimizer's moments, two thirds of the state."""
    moments = 2 * memory.state // 3
    if limits.cache and limits.cache + moments > MEMORY_FRACTION * free:
        rows, columns = limits.cache_shape
        raise ConfigError(
            f"rollout.max_concurrent_sequences: a key-value cache for {rows} sequences of up to {columns} tokens needs "
            f"{_gib(limits.cache)} beside {_gib(moments)} of optimizer state; the limit is {_gib(MEMORY_FRACTION * free)}; lower "
            "rollout.max_concurrent_sequences, rollout.max_response_tokens or data.max_prompt_tokens, or generate on other GPUs "
            "(rollout.generators)"
        )


def free_bytes(model: Any, limits: UpdateLimits) -> int:
    """Return this service's share of the free memory on the model's device, in bytes."""
    device = device_of(model)
    free = free_gpu_bytes(device) if device.type == "cuda" else free_memory_bytes()
    if limits.share is None or device.type != "cuda":
        return max(0, free // limits.num_sharers - limits.copy)
    # A trained parameter in half precision also has a float32 master weight.
    loaded = sum(
        part.nbytes + (4 * part.numel() if parameter.requires_grad and part.element_size() < 4 else 0)
        # Shards of a model on a GPU may be in host memory.
        for parameter, part in ((parameter, local_tensor(parameter)) for parameter in model.parameters())
        if part is parameter or part.device == device
    )
    return max(0, min(free, limits.share.bytes(total_gpu_bytes(device)) - loaded) - limits.copy)


def _too_small(role: Role, config: TrainedModelConfig, memory: UpdateMemory, free: int) -> str:
    checkpointing = config.gradient_checkpointing is not False and memory.with_checkpointing is not None
    how = "even with gradient checkpointing" if checkpointing else "without gradient checkpointing"
    allow = f"set {role}.gradient_checkpointing to null, " if config.gradient_checkpointing is False else ""
    adapter = "" if config.lora else f"train an adapter ({role}.lora), "
    needed, state = _gib(memory.bytes(memory.longest, checkpointing)), _gib(memory.state)
    limit = f"{_gib(MEMORY_FRACTION * free)}, {MEMORY_FRACTION:.0%} of this service's share of the free memory"
    return (
        f"{role}.micro_batch_tokens: an update with one sequence of {memory.longest} tokens needs {needed} {how}, {state} of it "
        f"for gradients and optimizer; the limit is {limit}; {allow}lower rollout.max_response_tokens or data.max_prompt_tokens, "
        f"{adapter}free memory, or give a number to skip this check"
    )


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
