"""Token rewards from one score per response: normalization, clipping, length penalties, and truncated responses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quartet.errors import ComputationFailed, InvalidRequest
from quartet.ppo.ragged import check_flat, check_lengths, last_token_index


@dataclass(frozen=True, slots=True)
class EarlyRewards:
    """Parts of scores that belong to tokens before the last one: the environment's rewards of turns.

    ``index`` int64 [rewards]: their tokens. ``sequence`` int64 [rewards]: the sequences of these. ``values`` float32 [rewards].
    """

    index: Tensor
    sequence: Tensor
    values: Tensor


def token_rewards(
    scores: Tensor, kl: Tensor, lengths: Tensor, kl_coefficient: float, early: EarlyRewards | None = None
) -> Tensor:
    """Return -kl_coefficient * kl at every token, plus the score at the last response token (which may be EOS): [tokens].

    ``scores`` [sequences], ``kl`` [tokens] in nats, ``lengths`` [sequences]. The ``early`` parts of a score are at their own
    tokens and the rest at the last token, so that the sum stays the score. Source: Ziegler et al. 2019, equation 2; numerics
    items 2, 8 and 23. Raises InvalidRequest.
    """
    check_flat(kl=kl)
    check_flat(scores=scores, lengths=lengths)
    check_lengths(kl.shape[0], lengths)
    paid, last = -kl_coefficient * kl, scores.to(kl.dtype)
    if early is not None:
        values = early.values.to(kl.dtype)
        paid, last = paid.index_add(0, early.index, values), last.index_add(0, early.sequence, -values)
    return paid.index_add(0, last_token_index(lengths), last)


def normalize_scores(scores: Tensor, mean: float, std: float) -> Tensor:
    """Return (scores - mean) / std, with the moments of scores of reference samples: [sequences] -> [sequences].

    Source: Ziegler et al. 2019, section 2.1; numerics item 16. Raises InvalidRequest.
    """
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise InvalidRequest(f"score moments mean {mean}, std {std}: expected finite numbers and a std above 0")
    return (scores - mean) / std


class RunningMoments:
    """Mean and population standard deviation of all scores so far. They are part of every checkpoint.

    Batches are merged in float64 by their counts, means and sums of squared deviations. Source: Chan, Golub & LeVeque
    1979; numerics item 16.
    """

    def __init__(self) -> None:
        self._count, self._mean, self._squares = 0, 0.0, 0.0

    @property
    def count(self) -> int:
        """Number of scores so far."""
        return self._count

    @property
    def mean(self) -> float:
        """0 before the first score."""
        return self._mean

    @property
    def std(self) -> float:
        """1 while all scores are equal, so that such scores are only shifted."""
        return math.sqrt(self._squares / self._count) if self._squares else 1.0

    def update(self, scores: Tensor) -> None:
        """Add ``scores`` [sequences] to the moments. Raises InvalidRequest; ComputationFailed if one is not finite."""
        check_flat(scores=scores)
        exact = scores.detach().double()
        bad = int((~exact.isfinite()).sum())
        if bad:
            raise ComputationFailed(f"{bad} of {exact.numel()} scores are not finite: expected numbers")
        if not exact.numel():
            return
        # Relative to the first score, equal scores have deviations of exactly 0. A rounded mean would give tiny deviations.
        from_first = exact - exact[0]
        mean = float(exact[0] + from_first.mean())
        squares = float((from_first - from_first.mean()).square().sum())
        count = self._count + exact.numel()
        mean_difference = mean - self._mean if self._count else 0.0
        self._squares += squares + mean_difference**2 * self._count * exact.numel() / count
        self._mean = self._mean + mean_difference * exact.numel() / count if self._count else mean
        self._count = count

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint, as JSON values that restore it exactly."""
        return {"count": self._count, "mean": self._mean, "squares": self._squares}

    def load(self, state: dict[str, float]) -> None:
        """Restore ``state``. Raises InvalidRequest if it is malformed."""
        try:
            count, mean, squares = (float(state[name]) for name in ("count", "mean", "squares"))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest(f"score moments {state}: expected the numbers count, mean and squares") from error
        if not (count >= 0 and count.is_integer()) or not math.isfinite(mean) or not 0 <= squares < math.inf:
            raise InvalidRequest(f"score moments {state}: expected finite numbers; count and squares must be 0 or more")
        if (count < 2 and squares) or (count == 0 and mean):
            raise InvalidRequest(f"score moments {state}: mean and squares do not fit the count")
        self._count, self._mean, self._squares = int(count), mean, squares


def clip_scores(scores: Tensor, limit: float) -> Tensor:
    """Clip scores to [-limit, limit]: [sequences] -> [sequences]. Raises InvalidRequest."""
    if not limit > 0:
        raise InvalidRequest(f"score limit {limit}: expected more than 0")
    return scores.clamp(-limit, limit)


def penalize_length(scores: Tensor, lengths: Tensor, per_token: float, free_tokens: int) -> Tensor:
    """Subtract ``per_token`` for each response token beyond ``free_tokens``: [sequences], [sequences] -> [sequences].

    Raises InvalidRequest.
    """
    check_flat(scores=scores, lengths=lengths)
    if not per_token >= 0 or free_tokens < 0:
        raise InvalidRequest(
            f"{per_token} per token beyond {free_tokens}: it is subtracted, so expected 0 or more of both"
        )
    return scores - per_token * (lengths - free_tokens).clamp(min=0).to(scores.dtype)


def penalize_overlong(scores: Tensor, lengths: Tensor, max_tokens: int, buffer_tokens: int, penalty: float) -> Tensor:
    """Subtract a penalty for the last ``buffer_tokens`` below ``max_tokens``: [sequences], [sequences] -> [sequences].

    The penalty is 0 up to max - buffer tokens, rises linearly to ``penalty`` at max, and stays there. A buffer of 0 disables it.
    Source: Yu et al. 2025 (DAPO), equation 13. Raises InvalidRequest.
    """
    check_flat(scores=scores, lengths=lengths)
    if not 0 <= buffer_tokens <= max_tokens:
        raise InvalidRequest(f"overlong buffer of {buffer_tokens} tokens: expected 0 (off) to {max_tokens}, the limit")
    if not penalty >= 0:
        raise InvalidRequest(f"overlong penalty {penalty}: it is subtracted, so expected 0 or more")
    if buffer_tokens == 0:
        return scores
    into_buffer = (lengths - (max_tokens - buffer_tokens)).clamp(0, buffer_tokens).to(scores.dtype)
    return scores - penalty * (into_buffer / buffer_tokens)


def penalize_truncated(scores: Tensor, truncated: Tensor, penalty: float) -> Tensor:
    """Subtract ``penalty`` from the scores of truncated responses: [sequences], bool [sequences] -> [sequences].

    Source: TRL's missing_eos_penalty; numerics item 14. Raises InvalidRequest.
    """
    _check_truncated(scores, truncated)
    if not penalty >= 0:
        raise InvalidRequest(f"penalty {penalty}: it is subtracted, so expected 0 or more")
    return torch.where(truncated, scores - penalty, scores)


def scale_truncated(scores: Tensor, truncated: Tensor, factor: float) -> Tensor:
    """Multiply the scores of truncated responses by ``factor``: [sequences], bool [sequences] -> [sequences].

    Use it for scores of 0 or more: a factor below 1 raises a negative score. Source: numerics item 14.

    Raises InvalidRequest.
    """
    _check_truncated(scores, truncated)
    return torch.where(truncated, scores * factor, scores)


def mask_truncated(truncated: Tensor, lengths: Tensor) -> Tensor:
    """Return 0 for every token of a truncated response, else 1: bool [sequences], lengths [sequences] -> float32 [tokens].

    Source: numerics item 14. Raises InvalidRequest.
    """
    _check_truncated(lengths, truncated)
    check_lengths(int(lengths.sum()), lengths)
    return (~truncated).float().repeat_interleave(lengths)


def _check_truncated(scores: Tensor, truncated: Tensor) -> None:
    check_flat(sequences=scores, truncated=truncated)
    if truncated.dtype != torch.bool:
        raise InvalidRequest(f"truncated {truncated.dtype}: expected bool")
