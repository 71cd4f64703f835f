"""Errors of libraries as domain exceptions. Imports no torch."""

from __future__ import annotations

import re
import sys

from quartet import errors

OUT_OF_MEMORY_TEXT = (
    "out of GPU memory; lower the role's micro_batch_tokens, rollout.max_concurrent_sequences or rollout.max_response_tokens; "
    "the service's log has the cause"
)
_OUT_OF_MEMORY_SIGNS = re.compile(
    "CUDA error: out of memory"
    "|(CUBLAS|CUDNN|CUSOLVER)_STATUS_ALLOC_FAILED"
    # NCCL allocates buffers for its communicators outside torch's allocator.
    "|Cuda failure (2 )?'out of memory'"
)


def domain_error(error: BaseException) -> errors.QuartetError | None:
    """Return ``error`` as a domain exception, or None for an unforeseen one."""
    if isinstance(error, errors.QuartetError):
        return error
    # Not imported, because a process without a model must not load torch.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return errors.OutOfMemory(OUT_OF_MEMORY_TEXT)
    # CUDA and its libraries report their own failed allocations as a RuntimeError.
    if isinstance(error, RuntimeError) and _OUT_OF_MEMORY_SIGNS.search(str(error)):
        return errors.OutOfMemory(OUT_OF_MEMORY_TEXT)
    return None
