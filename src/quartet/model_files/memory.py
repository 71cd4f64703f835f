"""Bytes of parameters, gradients, optimizer, activations and logits of a model in training. Imports no torch.

The services (`update_memory`), `quartet doctor` and `quartet plan` share this arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quartet.model_files.shape import FLOAT32_BYTES, ModelShape

MEMORY_FRACTION = 0.8
"""Fraction of the free memory for the memory counted here. The rest is for gradients of activations and for fragmentation."""
LOGIT_COPIES = 5
"""Temporary float32 copies of a chunk of logits besides the saved ones: scaled, as probabilities, as gradients."""
MAX_LOGITS = 2**26
"""Number of logits in a chunk: 256 MiB in float32."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PREFILL_TOKENS = 8192
"""Maximum number of prompt tokens in one forward pass of the torch engine, pads included."""
CACHE_COLUMNS = 64
"""The torch engine rounds the columns of its key-value cache up to a multiple of this number. For a GPU see ``graph_columns``."""
ADAMW_MOMENT_BYTES = 2 * FLOAT32_BYTES
"""Bytes of AdamW's two moments of a parameter."""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Bytes of the parameters of a model, and of what an optimizer keeps for those that it trains.

    ``step_gradients``: further bytes at an optimizer step, which converts gradients of half precision to float32.
    """

    parameters: float
    master_weights: float
    gradients: float
    moments: float
    step_gradients: float

    @property
    def kept(self) -> float:
        """Bytes between two optimizer steps."""
        return self.parameters + self.master_weights + self.gradients + self.moments

    def without_temporary_gradients(self) -> TrainingState:
        """Return the state on a GPU, where the gradients of micro-batches are added up in float32 (ADR 35)."""
        return replace(self, gradients=self.gradients + self.step_gradients, step_gradients=0.0)


def training_state(
    parameters: int,
    trained: int,
    dtype_bytes: int,
    trained_bytes: int | None = None,
    moment_bytes: float = ADAMW_MOMENT_BYTES,
) -> TrainingState:
    """Return the state of a model with ``parameters``, of which ``trained`` are trained, on one device.

    Mixed precision with float32 master weights (Micikevicius et al. 2018) and the two moments of AdamW: 16 bytes per trained
    parameter in both precisions, and 18 at a step in half precision. ``trained_bytes``: bytes of a trained element, if it has
    another precision than the others. Adapters are float32. ``moment_bytes``: bytes of the moments of a trained element.
    """
    size = trained_bytes or dtype_bytes
    return TrainingState(
        parameters=dtype_bytes * (parameters - trained) + size * trained,
        master_weights=FLOAT32_BYTES * trained if size < FLOAT32_BYTES else 0,
        gradients=size * trained,
        moments=moment_bytes * trained,
        step_gradients=(FLOAT32_BYTES - size) * trained,
    )


def graph_columns(columns: int) -> int:
    """Return the columns of the torch engine's cache that a captured graph reads if ``columns`` are in use.

    A multiple of CACHE_COLUMNS, at most an eighth more. There are eight sizes from each power of 2 to the next, so 40 sizes up to
    8,192 columns instead of 128.
    """
    step = max(CACHE_COLUMNS, 1 << max(0, (columns - 1).bit_length() - 4))
    return -(-columns // step) * step


def logit_rows(vocabulary: int) -> int:
    """Return the maximum number of tokens in a chunk of logits."""
    return max(1, MAX_LOGITS // vocabulary)


def activation_bytes(
    shape: ModelShape,
    dtype_bytes: int,
    tokens: int,
    longest: int,
    checkpointing: bool,
    tensor: int = 1,
) -> float:
    """Return the bytes saved for the backward pass of a micro-batch of ``tokens`` tokens, without logits.

    Samples that share a prompt need less.

    With ``checkpointing`` each layer saves its input, and the backward pass recomputes one layer at a time (Chen et al. 2016).
    """
    layer = shape.saved_layer_bytes(dtype_bytes, longest, tensor)
    per_token = shape.saved_model_bytes(dtype_bytes)
    per_token += shape.layers * dtype_bytes * shape.hidden + layer if checkpointing else shape.layers * layer
    return tokens * per_token


def logit_bytes(shape: ModelShape, dtype_bytes: int, response_tokens: int, copies: int = 1 + LOGIT_COPIES) -> float:
    """Return the peak bytes of the logits of a micro-batch with ``response_tokens``: saved, temporary, and in other precision.

    ``copies``: float32 copies of a chunk of logits in the forward pass, see ``cpu_logit_copies``. The weight gradient of
    the vocabulary projection is a temporary of its size, which the backward pass adds to the gradient.
    """
    logits = min(response_tokens, logit_rows(shape.vocabulary)) * shape.vocabulary
    in_half = dtype_bytes if dtype_bytes < FLOAT32_BYTES else 0
    forward = logits * (FLOAT32_BYTES * copies + in_half)
    backward = logits * FLOAT32_BYTES + shape.head_parameters * dtype_bytes
    return max(forward, backward)


def cpu_logit_copies(dtype_bytes: int, temperature: float, trains_entropy: bool) -> int:
    """Return the float32 copies of a chunk of logits in the forward pass on a CPU.

    These are the log-probs and the float32 logits, and the logits divided by a temperature other than 1. A CPU computes entropies
    in small parts (``quartet.ppo.distributions``). If the entropy is trained, three of its operations each save a copy, and the
    float32 copy of logits of half precision is gone by then.
    """
    divided = temperature != 1 and (dtype_bytes == FLOAT32_BYTES or not trains_entropy)
    return 2 + divided + 3 * trains_entropy


def backward_bytes(shape: ModelShape, dtype_bytes: int, tokens: int) -> float:
    """Return the bytes of gradients of activations in one layer: of the MLP's intermediate states and of the residual stream."""
    return tokens * dtype_bytes * (3 * shape.intermediate + 2 * shape.hidden)
