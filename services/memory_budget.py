"""How the updates of a model are split so that they fit its memory: looked at once, when the service starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import structlog

from quartet.config import MAX_MICRO_BATCH_TOKENS, TrainedModelConfig
from quartet.errors import ConfigError
from quartet.models.forward.inspection import device_of
from quartet.models.training.update_memory import MEMORY_FRACTION, UpdateMemory, free_gpu_bytes
from quartet.topology import free_memory_bytes
from quartet.types import Role, ServiceStatus

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class UpdateLimits:
    """What a run asks of updates at most, and leaves them of the memory that is free.

    ``longest``: tokens of a sequence. ``part``: of the free memory, where an engine keeps the rest. ``shared_by``: model services
    that share the device's memory, itself counted.
    """

    longest: int
    trains_entropy: bool = False
    part: float = 1.0
    shared_by: int = 1


@dataclass(frozen=True, slots=True)
class Budget:
    """``micro_batch_tokens`` of an update that does not say otherwise. ``memory`` None, ``free`` bytes 0: nobody looked."""

    role: Role
    micro_batch_tokens: int
    gradient_checkpointing: bool | None = None
    memory: UpdateMemory | None = None
    free: int = 0

    @property
    def held(self) -> int:
        """Most tokens of a micro-batch that the memory holds, as far as anybody looked."""
        if self.memory is None:
            return 0
        return max(_most_tokens(self.memory, self.free, recomputes) for recomputes in self._ways())

    def recomputes(self, tokens: int) -> bool:
        """Whether an update in micro-batches of so many tokens is to use gradient checkpointing. It decides no bits."""
        if self.gradient_checkpointing is not None or self.memory is None:
            return bool(self.gradient_checkpointing)
        return (
            self.memory.with_checkpointing is not None
            and self.memory.bytes(tokens, False) > MEMORY_FRACTION * self.free
        )

    def settle(self, asked: int) -> tuple[int, bool]:
        """Most tokens of an update's micro-batches, ``asked`` or its own, and whether it is to use gradient checkpointing."""
        tokens = asked or self.micro_batch_tokens
        if self.memory is not None and tokens > self.held:
            log.warning("update may not fit the memory", role=self.role, micro_batch_tokens=tokens, held=self.held)
        return tokens, self.recomputes(tokens)

    def told_in(self, status: ServiceStatus) -> ServiceStatus:
        """``status``, which tells of it, too."""
        again = self.recomputes(self.micro_batch_tokens)
        return replace(
            status,
            micro_batch_tokens=self.micro_batch_tokens,
            micro_batch_tokens_held=self.held,
            gradient_checkpointing=again,
            token_bytes=self.memory.token_bytes(again) if self.memory else 0,
            free_bytes=self.free,
        )

    def _ways(self) -> list[bool]:
        assert self.memory is not None
        ways = [False, True] if self.gradient_checkpointing is None else [self.gradient_checkpointing]
        return [again for again in ways if not again or self.memory.with_checkpointing is not None] or [False]


def find_budget(role: Role, config: TrainedModelConfig, memory: UpdateMemory, free: int) -> Budget:
    """The budget of ``free`` bytes. Raises ConfigError where they do not hold the longest sequence, unless a number is given."""
    asked, again = config.micro_batch_tokens, config.gradient_checkpointing
    if again and memory.with_checkpointing is None:
        raise ConfigError(
            f"{role}.gradient_checkpointing: this model's architecture has no layers that can be computed again; set it to false"
        )
    plain = 0 if again else _most_tokens(memory, free, False)
    tokens = asked or plain or Budget(role, 0, again, memory, free).held
    if not tokens:
        raise ConfigError(_too_small(role, config, memory, free))
    found = Budget(role, tokens, again, memory, free)
    log.info(
        "memory of updates",
        role=role,
        micro_batch_tokens=tokens,
        held=found.held,
        gradient_checkpointing=found.recomputes(tokens),
        free_bytes=free,
    )
    return found


def free_bytes(model: Any, limits: UpdateLimits) -> int:
    """This service's part of the memory that is free where ``model`` is."""
    device = device_of(model)
    free = free_gpu_bytes(device) if device.type == "cuda" else free_memory_bytes()
    return int(limits.part * free) // limits.shared_by


def _most_tokens(memory: UpdateMemory, free: int, recomputes: bool) -> int:
    return memory.most_tokens(MAX_MICRO_BATCH_TOKENS, free, recomputes)


def _too_small(role: Role, config: TrainedModelConfig, memory: UpdateMemory, free: int) -> str:
    may = config.gradient_checkpointing is not False and memory.with_checkpointing is not None
    how = "even with gradient checkpointing" if may else "without gradient checkpointing"
    more = f"set {role}.gradient_checkpointing to null, " if config.gradient_checkpointing is False else ""
    adapter = "" if config.lora else f"train an adapter ({role}.lora), "
    return (
        f"{role}.micro_batch_tokens: an update with one sequence of {memory.longest} tokens needs "
        f"{_gib(memory.bytes(memory.longest, may))} {how}, {_gib(memory.state)} of it for gradients and optimizer, and may take "
        f"{_gib(MEMORY_FRACTION * free)}: {MEMORY_FRACTION:.0%} of this service's part of the memory that is free; {more}lower "
        f"rollout.max_response_tokens or data.max_prompt_tokens, {adapter}leave it more memory, or give a number and nobody looks"
    )


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
