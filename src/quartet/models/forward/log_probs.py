"""Log-probs and entropies of response tokens, computed in chunks to limit the memory for logits.

For a vocabulary of 150,000 the logits of 10,000 tokens are 6 GB in float32, and training would keep several copies. Larger
batches are computed in chunks of tokens. The backward pass recomputes the logits from the saved hidden states.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from quartet.model_files.memory import logit_rows
from quartet.models.forward.batching import MicroBatch
from quartet.models.forward.lora_dropout import dropout_off
from quartet.models.forward.model_capabilities import backbone, device_of, vocabulary_size
from quartet.models.forward.onednn_linear import same_linear
from quartet.models.forward.packing import hidden_states, logits_at_positions, select_positions
from quartet.ppo.distributions import entropy, token_log_probs

EntropyUse = Literal["none", "report", "train"]
_head_checks: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()

TokenOutputs = tuple[torch.Tensor, torch.Tensor | None]


def forward_log_probs(
    model: Any,
    micro_batch: MicroBatch,
    temperature: float,
    entropy_use: EntropyUse = "none",
    chunk_tokens: int | None = None,
) -> TokenOutputs:
    """Return log-probs and, if requested, entropies of one micro-batch's response tokens, in nats: float32 [n] each.

    Gradients follow the caller's mode. The entropy has gradients only for "train", because they double the cost of the backward
    pass. ``chunk_tokens``: tokens per chunk of logits. Defaults to ``logit_chunk_tokens``.
    """
    rows = chunk_tokens or logit_chunk_tokens(model)
    if len(micro_batch) <= rows or not head_is_separate(model):
        logits = logits_at_positions(
            model, micro_batch.input_ids, micro_batch.predicts, micro_batch.packing, use_cache=False
        )
        return _token_outputs(logits, micro_batch.targets, temperature, entropy_use)
    head = model.get_output_embeddings()
    # Some models, such as Mamba, add up their hidden states in float32.
    hidden = hidden_states(backbone(model), micro_batch.input_ids, micro_batch.packing).to(head.weight.dtype)

    def compute_chunk(states: torch.Tensor, targets: torch.Tensor) -> TokenOutputs:
        return _token_outputs(head(states), targets, temperature, entropy_use)

    results = [
        checkpoint(
            compute_chunk,
            states,
            targets,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), same_linear()),
        )
        for states, targets in zip(
            torch.split(select_positions(hidden, micro_batch.predicts), rows),
            torch.split(micro_batch.targets, rows),
            strict=True,
        )
    ]
    log_probs, entropies = zip(*results, strict=True)
    return torch.cat(log_probs), None if entropy_use == "none" else torch.cat(entropies)


def logit_chunk_tokens(model: Any) -> int:
    """Return the maximum number of tokens in a chunk of logits."""
    return logit_rows(vocabulary_size(model))


def _token_outputs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, entropy_use: EntropyUse
) -> TokenOutputs:
    log_probs = token_log_probs(logits, targets, temperature)
    if entropy_use == "none":
        return log_probs, None
    return log_probs, entropy(logits if entropy_use == "train" else logits.detach(), temperature)


def head_is_separate(model: Any) -> bool:
    """Return whether the logits are exactly the head's output for the last hidden states. Each model is tried once."""
    if model not in _head_checks:
        with dropout_off(model):
            _head_checks[model] = _compare_head(model)
    return _head_checks[model]


@torch.no_grad()
def _compare_head(model: Any) -> bool:
    head = model.get_output_embeddings()
    if head is None:
        return False
    ids = torch.zeros((1, 2), dtype=torch.int64, device=device_of(model))
    hidden = hidden_states(backbone(model), ids).to(head.weight.dtype)
    logits = model(input_ids=ids, use_cache=False).logits
    return torch.equal(logits, head(hidden).to(logits.dtype))
