"""Aggregation of a loss over tokens and responses. The gradient of the aggregate is the weight of each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from quartet.ppo.losses import loss_weights, weighted_sum
from tests.parity.losses.batch import Batch, with_gradient
from tests.parity.losses.case import Case, Group, Results, unique
from tests.parity.losses.peers import openrlhf, verl


def _mask(batch: Batch) -> Tensor:
    return batch.mask


def _mask_without_a_response(batch: Batch) -> Tensor:
    """Return the mask, and 0 at all tokens of the third response."""
    mask = batch.mask.clone()
    start = int(batch.lengths[:2].sum())
    mask[start : start + int(batch.lengths[2])] = 0
    return mask


def _ours(aggregation: str, mask: Callable[[Batch], Tensor], **settings: Any) -> Callable[[Batch], Results]:
    def run(batch: Batch) -> Results:
        weights = loss_weights(mask(batch), batch.lengths, aggregation, **settings)  # type: ignore[arg-type]
        return with_gradient(lambda values: weighted_sum(values, weights), batch.values, batch)

    return run


def _cases() -> list[Case]:
    cases = []
    for name, theirs in (("token_mean", "token-mean"), ("sequence_mean", "seq-mean-token-mean")):
        for remark, mask in (("", _mask), ("one response is masked", _mask_without_a_response)):
            ours = _ours(name, mask)
            cases.append(Case(name, verl.NAME, theirs, ours, verl.aggregation(theirs, mask), remark))
            level = name == "token_mean"
            setting = f"token_level_loss={level}"
            cases.append(Case(name, openrlhf.NAME, setting, ours, openrlhf.aggregation(level, mask), remark))
    for name, theirs in (("token_sum", "token-sum"), ("sequence_mean_token_sum", "seq-mean-token-sum")):
        ours = _ours(name, _mask_without_a_response)
        theirs_of = verl.aggregation(theirs, _mask_without_a_response)
        cases.append(Case(name, verl.NAME, theirs, ours, theirs_of, "one response is masked"))
    name, theirs = "sequence_mean_token_sum_norm", "seq-mean-token-sum-norm"
    peer = verl.aggregation(theirs, _mask, loss_scale_factor=16)
    cases.append(Case(name, verl.NAME, theirs, _ours(name, _mask, divisor=16.0), peer, "divisor 16"))
    return cases


GROUP = Group("Aggregation over tokens and responses", "aggregations", unique(_cases()))
