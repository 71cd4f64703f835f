"""The trial of batch invariance: what a torch engine declares about itself, and on which processor it was measured."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from quartet.contract.generation import GenerationRequest
from quartet.contract.trajectory import TrajectoryId
from quartet.models.forward.model_capabilities import device_of, has_experts, keeps_states, vocabulary_size
from quartet.system.failpoints import InjectedFault, failpoint

CPU_INFO = Path("/proc/cpuinfo")
LIMITS = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
)
"""Environment variables that choose the code of matmuls."""


class LogitDigests:
    """Digest of the logits of each response. Log-probs would hide differences of models with small logits."""

    def __init__(self) -> None:
        self._digests: dict[TrajectoryId, xxhash.xxh3_64] = {}

    def __call__(self, rows: Sequence[GenerationRequest], alive: NDArray[np.bool_], logits: torch.Tensor) -> None:
        """Add the logits [rows, vocabulary] of the next token. Rows that are not ``alive`` have ended."""
        for index in np.flatnonzero(alive).tolist():
            digest = self._digests.setdefault(rows[index].id, xxhash.xxh3_64())
            digest.update(logits[index].float().contiguous().numpy().data)

    def digests(self) -> dict[TrajectoryId, bytes]:
        """Return the digest of each response."""
        return {id: digest.digest() for id, digest in self._digests.items()}


class TrialResult(NamedTuple):
    """Result of a trial, see ``EngineProperties.trial``."""

    passed: bool
    text: str
    digest: str


def trial_result(
    untried: str, passes: Callable[[], bool], bits: Callable[[], Mapping[TrajectoryId, bytes]]
) -> TrialResult:
    """Run a trial with ``passes``. ``bits``: digests of a few responses. ``untried``: reason for no trial, or ""."""
    if untried:
        return TrialResult(False, f"not run: {untried}", "")
    try:
        failpoint("engine.trial")
        passed = passes()
    except InjectedFault:
        passed = False
    digest = xxhash.xxh3_64()
    for _, of_response in sorted(bits().items()):
        digest.update(of_response)
    return TrialResult(passed, f"{'passed' if passed else 'failed'} on {processor()}", digest.hexdigest())


def untried_reason(model: Any, not_static: str) -> str:
    """Return why an engine is not batch-invariant without a trial, or "". ``not_static``: why it does not decode statically."""
    if device_of(model).type != "cpu":
        return "on a GPU"
    # Few tokens may not show that the rows of experts depend on the batch.
    if has_experts(model):
        return "the model is a mixture of experts"
    # Its prompts are computed without pads beside others of their length, so that any length may round in another way.
    if keeps_states(model):
        return "the model keeps states"
    return not_static and f"decodes without static buffers: {not_static}"


def trial_requests(model: Any, lengths: Sequence[int]) -> list[GenerationRequest]:
    """Return requests with prompts of these lengths, always the same ones for a vocabulary."""
    generator = np.random.default_rng(0)
    size = vocabulary_size(model)
    return [
        GenerationRequest(TrajectoryId("trial", 0, index, 0), generator.integers(0, size, length).astype(np.int32))
        for index, length in enumerate(lengths)
    ]


def processor() -> str:
    """Return the processor, the instruction set that torch uses, the number of threads, and what limits their choice."""
    threads = torch.get_num_threads()
    limits = [f"{name}={os.environ[name]}" for name in LIMITS if os.environ.get(name)]
    instructions = torch.backends.cpu.get_cpu_capability()
    return ", ".join([_model_name(), instructions, f"{threads} thread{'s' if threads > 1 else ''}", *limits])


def _model_name() -> str:
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), "") or platform.processor() or platform.machine()
