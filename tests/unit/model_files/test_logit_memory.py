"""The planned float32 copies of logits on a CPU, compared with the allocations of the log-probs and entropies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.plan_cases import Case
from quartet.contract.status import Role
from quartet.model_files.memory import cpu_logit_copies
from quartet.planner.device_memory import trained_memory
from quartet.planner.gpus import CPU, GPUS, Device
from quartet.planner.roofline import Parallel
from quartet.ppo.distributions import entropy, token_log_probs

ROWS, VOCABULARY = 128, 2**15
COPY = 4 * ROWS * VOCABULARY
CASE = Case("llama", 64, 1, VOCABULARY)


def peak_bytes(function: Callable[[], Any]) -> int:
    """Return the most bytes that ``function`` has allocated at a time, from torch's memory events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    del result
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("trains_entropy", [False, True], ids=["entropy reported", "entropy trained"])
def test_a_cpu_makes_the_planned_copies_of_logits(dtype: torch.dtype, temperature: float, trains_entropy: bool) -> None:
    logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()

    def outputs() -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = token_log_probs(logits, torch.zeros(ROWS, dtype=torch.int64), temperature)
        return log_probs, entropy(logits if trains_entropy else logits.detach(), temperature)

    # The logits exist before, in their data type.
    made = cpu_logit_copies(dtype.itemsize, temperature, trains_entropy) - (dtype is torch.float32)
    # The parts in which entropies are computed add an eighth of a copy.
    assert peak_bytes(outputs) == pytest.approx(made * COPY, abs=0.2 * COPY)


def logits_of(device: Device, case: Case = CASE, temperature: float = 1.0, trains_entropy: bool = False) -> float:
    load = replace(case.load(), temperature=temperature)
    work = load.role(Role.ACTOR)
    assert work is not None
    work = replace(work, trains_entropy=trains_entropy)
    return trained_memory(work, load, device, Parallel(), case.tokens, False, offload=False)["logits"]


def test_a_plan_counts_the_copies_of_its_device() -> None:
    rows = CASE.tokens * CASE.response // (CASE.prompt + CASE.response)
    copy = 4 * rows * VOCABULARY
    assert logits_of(CPU) == 2 * copy
    assert logits_of(CPU, temperature=0.7) == 3 * copy
    assert logits_of(CPU, trains_entropy=True) == 5 * copy
    assert logits_of(CPU, replace(CASE, dtype="bfloat16")) == 2.5 * copy
    assert logits_of(GPUS["H100-80GB"]) == logits_of(GPUS["H100-80GB"], trains_entropy=True) == 6 * copy
