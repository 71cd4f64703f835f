"""Log-probs, values and scores of finished sequences, without gradients, and the forward pass of values for training."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from quartet.contract.arrays import FloatArray
from quartet.contract.trajectory import TokenBatch
from quartet.errors import ComputationFailed
from quartet.models.forward.batching import MicroBatch, micro_batches, right_pad
from quartet.models.forward.log_probs import forward_log_probs
from quartet.models.forward.model_capabilities import check_batch, device_of, is_encoder_classifier
from quartet.models.forward.onednn_linear import onednn_linear
from quartet.models.forward.packing import hidden_states
from quartet.models.forward.router_replay import check_routing, replayed_routing
from quartet.models.value_head import ValueModel
from quartet.models.workers.shares import share_of, share_rows
from quartet.models.workers.workers import SINGLE, Workers


def forward_values(value_model: ValueModel, micro_batch: MicroBatch) -> torch.Tensor:
    """Return the values of one micro-batch's response tokens, read at the positions that predict the tokens: float32 [n]."""
    values: torch.Tensor = value_model(micro_batch.input_ids, micro_batch.predicts, micro_batch.packing)
    return values


@onednn_linear()
def response_log_probs(
    model: Any, batch: TokenBatch, temperature: float, max_tokens: int, workers: Workers = SINGLE
) -> FloatArray:
    """Return the log-probs in nats of every response token at ``temperature``: float32 [response tokens], in the batch's order.

    ``max_tokens`` limits a micro-batch, pads included. The ``workers`` share the sequences, and all of them return all log-probs.
    The routers choose the experts of the batch, if it has any. Raises InvalidRequest; MismatchError for experts that the model
    does not have; ComputationFailed if a log-prob is not finite.
    """
    check_routing(model, batch)
    result = _by_token(
        model,
        batch,
        max_tokens,
        workers,
        lambda micro_batch: forward_log_probs(model, micro_batch, temperature)[0].float(),
    )
    return _finite(result, "log-probs", model)


@onednn_linear()
def response_values(
    value_model: ValueModel, batch: TokenBatch, max_tokens: int, workers: Workers = SINGLE
) -> FloatArray:
    """Return the value before every response token: float32 [response tokens], in the batch's order.

    The value of a response token is read at the position that predicts it, as its log-prob is. ``workers``: see
    ``response_log_probs``. Raises InvalidRequest; ComputationFailed if one is not finite.
    """
    result = _by_token(
        value_model, batch, max_tokens, workers, lambda micro_batch: forward_values(value_model, micro_batch)
    )
    return _finite(result, "values", value_model)


def _by_token(
    model: Any,
    batch: TokenBatch,
    max_tokens: int,
    workers: Workers,
    compute: Callable[[MicroBatch], torch.Tensor],
) -> FloatArray:
    """Return what ``compute`` returns for the response tokens of micro-batches, float32 [response tokens]."""
    check_batch(model, batch)
    result = np.zeros(int(batch.response_lengths.sum()), np.float32)
    with torch.inference_mode():
        for micro_batch, counts in share_of(workers, model, batch, max_tokens):
            with replayed_routing(model, micro_batch):
                values = workers.forward(partial(compute, micro_batch))
            if counts:
                result[micro_batch.token_indices.cpu().numpy()] = values.cpu().numpy()
        return workers.sum(torch.from_numpy(result)).float().numpy()


def sequence_scores(reward_model: Any, batch: TokenBatch, max_tokens: int, workers: Workers = SINGLE) -> FloatArray:
    """Return the reward model's score of every prompt + response: float32 [sequences]. See ``sequence_score_passes``."""
    passes = sequence_score_passes(reward_model, batch, max_tokens, workers)
    while True:
        try:
            next(passes)
        except StopIteration as end:
            scores: FloatArray = end.value
            return scores


def sequence_score_passes(
    reward_model: Any, batch: TokenBatch, max_tokens: int, workers: Workers = SINGLE
) -> Generator[None, None, FloatArray]:
    """Compute the reward model's score of every prompt + response: float32 [sequences]. Yields between two forward passes.

    The score of a decoder classifier is read at the last token, which the length determines. A search for pad ids would skip an
    EOS with the same id. An encoder classifier reads the whole sequence under an attention mask. ``workers``: see
    ``response_log_probs``. Raises InvalidRequest; ComputationFailed if a score is not finite.
    """
    check_batch(reward_model, batch)
    result = np.zeros(len(batch), np.float32)
    reads_whole = is_encoder_classifier(reward_model)
    passes = (_encoder_passes if reads_whole else _decoder_passes)(reward_model, batch, max_tokens, workers)
    with torch.inference_mode():
        following = next(passes, None)
    while following is not None:
        rows, compute, counts = following
        # Entered for each pass: the modes belong to the thread, which may do other work in between.
        with torch.inference_mode(), onednn_linear():
            scores = workers.forward(compute)
            if counts:
                result[rows] = scores.squeeze(-1).float().cpu().numpy()
            following = next(passes, None)
        if following is not None:
            yield
    with torch.inference_mode():
        result = workers.sum(torch.from_numpy(result)).float().numpy()
    return _finite(result, "scores", reward_model)


_Pass = tuple[list[int], Callable[[], torch.Tensor], bool]
"""Indices of sequences in the batch, the function that computes their scores [rows, 1], and whether they count."""


def _decoder_passes(reward_model: Any, batch: TokenBatch, max_tokens: int, workers: Workers) -> Iterator[_Pass]:
    def compute(part: MicroBatch) -> torch.Tensor:
        hidden = hidden_states(reward_model.base_model, part.input_ids, part.packing)
        scores: torch.Tensor = reward_model.score(hidden.flatten(0, 1)[part.last])
        return scores

    for part, counts in share_of(workers, reward_model, batch, max_tokens, include_last_token=True):
        yield part.rows, partial(compute, part), counts


def _encoder_passes(reward_model: Any, batch: TokenBatch, max_tokens: int, workers: Workers) -> Iterator[_Pass]:
    sequences, device = batch.sequences(), device_of(reward_model)

    def compute(rows: list[int]) -> torch.Tensor:
        input_ids = right_pad([sequences[row] for row in rows], device)
        lengths = torch.from_numpy(batch.lengths[rows].astype(np.int64)).to(device)
        mask = torch.arange(input_ids.shape[1], device=device) < lengths[:, None]
        logits: torch.Tensor = reward_model(input_ids=input_ids, attention_mask=mask.long()).logits
        return logits

    groups, padding = share_rows(
        workers,
        batch.lengths,
        np.arange(len(batch)),
        lambda rows: [rows[group].tolist() for group in micro_batches(batch.lengths[rows], max_tokens)],
    )
    for index, rows in enumerate(groups):
        yield rows, partial(compute, rows), index < len(groups) - padding


def _finite(values: FloatArray, name: str, model: nn.Module) -> FloatArray:
    bad = int(np.count_nonzero(~np.isfinite(values)))
    if bad:
        raise ComputationFailed(
            f"{type(model).__name__}: {bad} of {values.size} {name} are not finite; "
            "the weights have diverged, or the dtype is too narrow for them (try bfloat16 or float32)"
        )
    return values
