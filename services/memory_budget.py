"""Micro-batch size of updates that fits into the free memory, measured once at the start of the service."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import structlog

from quartet.config import MAX_MICRO_BATCH_TOKENS, TrainedModelConfig
from quartet.errors import ConfigError
from quartet.models.forward.model_capabilities import device_of
from quartet.models.training.update_memory import UpdateMemory, free_gpu_bytes
from quartet.planner.memory import MEMORY_FRACTION
from quartet.topology import free_memory_bytes
from quartet.types import Role, ServiceStatus

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class UpdateLimits:
    """The largest update of a run, and the share of the free memory that it may use.

    ``max_sequence_tokens``: prompt and response of the longest sequence. ``num_sharers``: model services on the same device,
    including this one.
    """

    max_sequence_tokens: int
    trains_entropy: bool = False
    num_sharers: int = 1


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Default micro-batch size of updates, and the measurement that it is based on.

    ``free`` is the free memory in bytes. ``memory`` is None and ``free`` 0 if nothing was measured.
    """

    role: Role
    micro_batch_tokens: int
    gradient_checkpointing: bool | None = None
    memory: UpdateMemory | None = None
    free: int = 0

    @property
    def max_tokens(self) -> int:
        """Largest micro-batch that fits the memory, in tokens; 0 if not measured."""
        if self.memory is None:
            return 0
        return max(
            _max_tokens_within(self.memory, self.free, recomputes) for recomputes in self._checkpointing_options()
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


def find_budget(role: Role, config: TrainedModelConfig, memory: UpdateMemory, free: int) -> MemoryBudget:
    """Return the budget for ``free`` bytes.

    Raises ConfigError if the longest sequence does not fit and the config gives no micro-batch size.
    """
    configured, checkpointing = config.micro_batch_tokens, config.gradient_checkpointing
    if checkpointing and memory.with_checkpointing is None:
        raise ConfigError(
            f"{role}.gradient_checkpointing: this model's architecture does not support it; set it to false"
        )
    without_checkpointing = 0 if checkpointing else _max_tokens_within(memory, free, False)
    tokens = configured or without_checkpointing or MemoryBudget(role, 0, checkpointing, memory, free).max_tokens
    if not tokens:
        raise ConfigError(_too_small(role, config, memory, free))
    budget = MemoryBudget(role, tokens, checkpointing, memory, free)
    log.info(
        "memory of updates",
        role=role,
        micro_batch_tokens=tokens,
        max_tokens=budget.max_tokens,
        gradient_checkpointing=budget.needs_checkpointing(tokens),
        free_bytes=free,
    )
    return budget


def free_bytes(model: Any, limits: UpdateLimits) -> int:
    """Return this service's share of the free memory on the model's device, in bytes."""
    device = device_of(model)
    free = free_gpu_bytes(device) if device.type == "cuda" else free_memory_bytes()
    return free // limits.num_sharers


def _max_tokens_within(memory: UpdateMemory, free: int, recomputes: bool) -> int:
    return memory.max_tokens_within(MAX_MICRO_BATCH_TOKENS, free, recomputes)


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
