"""Compiled transformer layers: torch.compile in the forward and backward passes of updates.

See docs/adr/0042-speed-of-updates.md.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from quartet.errors import ConfigError
from quartet.models.forward.batching import MicroBatch
from quartet.models.forward.model_capabilities import device_of
from quartet.models.forward.onednn_linear import without_onednn
from quartet.models.forward.packing import uncompiled_attention
from quartet.models.training.activation_checkpointing import transformer_layers
from quartet.models.training.update_memory import trial_batch
from quartet.models.workers.workers import SINGLE, Workers

COMPILER: dict[str, Any] = {"backend": "inductor", "options": {"deterministic": True}}
"""Compiler of the layers. Deterministic: it chooses kernels without measuring them, so that a restarted process gets the same."""
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
TRIAL_LENGTHS = ([24, 40, 24], [7, 12])
"""Tokens of the sequences in two trial micro-batches. The second shows a shape that the code of the first does not cover."""


@contextmanager
def compiled_layers(model: Any, on: bool = True) -> Iterator[None]:
    """Compute the transformer layers of a model, or value model, with compiled code inside the context, if ``on``.

    Results differ from those of other passes by rounding. Outside the context, the layers compute as before. Both the forward and
    the backward pass must be inside the context, and no other thread may use the model. Hooks of a layer, such as those of FSDP,
    and attention to packed sequences stay as they are. Linear layers do not use oneDNN: the compiler does not support it.
    """
    if not on:
        yield
        return
    _use_private_directory()
    layers = transformer_layers(model)
    with without_onednn(), uncompiled_attention():
        try:
            for layer in layers:
                # Packing gives every micro-batch another shape.
                layer.forward = torch.compile(layer.forward, dynamic=True, **COMPILER)
            yield
        finally:
            for layer in layers:
                vars(layer).pop("forward", None)


def try_compiled(
    model: Any, forward: Callable[[MicroBatch], torch.Tensor], role: str, workers: Workers = SINGLE
) -> None:
    """Compile the layers of a model in trial passes, with and without gradients. The gradients are left to the caller.

    Use it in ``compiled_layers``. All ``workers`` must call it. ``forward`` returns log-probs or values of a micro-batch.
    ``role`` is the config section of the model. Raises ConfigError if a layer cannot be compiled.
    """
    try:
        for lengths in TRIAL_LENGTHS:
            micro_batch = trial_batch(model, lengths)
            with torch.no_grad():
                workers.forward(lambda batch=micro_batch: forward(batch))  # type: ignore[misc]
            workers.end_trial()
            outputs = workers.forward(lambda batch=micro_batch: forward(batch))  # type: ignore[misc]
            outputs.sum().backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        # Any other error, such as a lost rank, is not the compiler's. Processes that compile nothing may not have its module.
        if not isinstance(error, torch._dynamo.exc.TorchDynamoException):
            raise
        device = device_of(model)
        needs = "a C++ compiler (g++, or the one that CXX names)" if device.type == "cpu" else "Triton and a C compiler"
        inner = getattr(error, "inner_exception", error)
        cause = f"{type(inner).__name__}: {next(filter(None, map(str.strip, str(inner).splitlines())), '')}"
        raise ConfigError(
            f"{role}.compile: torch.compile fails on {device} for the layers of this {type(model).__name__}: {cause}; install "
            f"{needs}, or set {role}.compile false"
        ) from error


def _use_private_directory() -> None:
    """Let the compiler read and write a directory of this user. Raises ConfigError if it belongs to another user.

    By default, torch loads code and pickles from a directory with a known name in /tmp, which any user can create.
    """
    folder = Path(tempfile.gettempdir()) / f"quartet-compiled-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"compile: {folder} is not a directory that only this user may use, and torch.compile would load code from it; "
            "delete it, or set TMPDIR to another directory"
        )
    os.environ[CACHE_VARIABLE] = str(folder)
