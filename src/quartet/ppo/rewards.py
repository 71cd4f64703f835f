"""From one score per response to one reward per token, and what to do with responses that were cut off."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quartet.errors import InvalidRequest
from quartet.ppo.ragged import check_flat, check_lengths, last_token_index


def token_rewards(scores: Tensor, kl: Tensor, lengths: Tensor, kl_coefficient: float) -> Tensor:
    """-kl_coefficient * kl at every token, plus the score at the last response token, EOS included: [tokens].

    ``scores`` [sequences], ``kl`` [tokens] in nats, ``lengths`` [sequences]. Source: Ziegler et al. 2019, equation 2;
    numerics items 2 and 8. Raises InvalidRequest.
    """
    check_flat(kl=kl)
    check_flat(scores=scores, lengths=lengths)
    check_lengths(kl.shape[0], lengths)
    return (-kl_coefficient * kl).index_add(0, last_token_index(lengths), scores.to(kl.dtype))


def normalize_scores(scores: Tensor, mean: float, std: float) -> Tensor:
    """(scores - mean) / std, with the moments of the reward model on reference samples: [sequences] -> [sequences].

    Source: Ziegler et al. 2019, section 2.1; numerics item 16. Raises InvalidRequest.
    """
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise InvalidRequest(f"score moments mean {mean}, std {std}: expected finite numbers and a std above 0")
    return (scores - mean) / std


def penalize_truncated(scores: Tensor, truncated: Tensor, penalty: float) -> Tensor:
    """Scores with ``penalty`` taken off truncated responses: [sequences], bool [sequences] -> [sequences].

    Source: TRL's missing_eos_penalty; numerics item 14. Raises InvalidRequest.
    """
    _check_truncated(scores, truncated)
    if not penalty >= 0:
        raise InvalidRequest(f"penalty {penalty}: it is subtracted, so expected 0 or more")
    return torch.where(truncated, scores - penalty, scores)


def scale_truncated(scores: Tensor, truncated: Tensor, factor: float) -> Tensor:
    """Scores of truncated responses times ``factor``: [sequences], bool [sequences] -> [sequences].

    A factor below 1 lifts a negative score: meant for scores of 0 or more. Source: numerics item 14.

    Raises InvalidRequest.
    """
    _check_truncated(scores, truncated)
    return torch.where(truncated, scores * factor, scores)


def mask_truncated(truncated: Tensor, lengths: Tensor) -> Tensor:
    """0 for every token of a truncated response, else 1: bool [sequences], lengths [sequences] -> float32 [tokens].

    Source: numerics item 14. Raises InvalidRequest.
    """
    _check_truncated(lengths, truncated)
    check_lengths(int(lengths.sum()), lengths)
    return (~truncated).float().repeat_interleave(lengths)


def _check_truncated(scores: Tensor, truncated: Tensor) -> None:
    check_flat(sequences=scores, truncated=truncated)
    if truncated.dtype != torch.bool:
        raise InvalidRequest(f"truncated {truncated.dtype}: expected bool")
