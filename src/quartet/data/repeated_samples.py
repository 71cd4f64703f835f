"""pass@k and maj@k of several responses to one prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb
from statistics import fmean


def pass_at_k(num_samples: int, num_successes: int, k: int) -> float:
    """Return an unbiased estimate of the probability that at least one of ``k`` responses to a prompt is a success.

    It is 1 - C(n-c, k) / C(n, k): the share of all choices of k of the n samples that have one of the c successes (Chen et al.
    2021, "Evaluating Large Language Models Trained on Code", arXiv:2107.03374, equation 1). Raises ValueError for fewer than k
    samples.
    """
    if not 0 <= num_successes <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_successes} successes in {num_samples} samples is not defined")
    return 1.0 - comb(num_samples - num_successes, k) / comb(num_samples, k)


def majority_at_k(answers: Sequence[str | None], successes: Sequence[bool], k: int) -> float:
    """Return an unbiased estimate of the probability that the answer which most of ``k`` responses give is a success.

    The samples form groups of k in their order, without the rest, and the result is the share of groups whose majority is a
    success. Wang et al. 2022 (self-consistency, arXiv:2203.11171) define the vote. With k samples this is ``majority_vote`` after
    ``take_first_k`` of lm-evaluation-harness (lm_eval/filters/selection.py), and the vote of ``maj@k`` in verl
    (``calc_maj_val``), which draws its groups with replacement. Raises ValueError for fewer than k samples.
    """
    if not 1 <= k <= len(answers) or len(answers) != len(successes):
        raise ValueError(f"maj@{k} of {len(answers)} answers and {len(successes)} successes is not defined")
    starts = range(0, len(answers) - k + 1, k)
    return fmean(majority_is_success(answers[start : start + k], successes[start : start + k]) for start in starts)


def majority_is_success(answers: Sequence[str | None], successes: Sequence[bool]) -> bool:
    """Return whether the answer that occurs most often is a success; of several, the one that occurs first.

    A response without an answer (None) has no vote. Without any vote there is no success. As in verl, the first response with the
    answer decides whether it is a success.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return False
    # Of equal counts, the first one: a Counter is in the order in which its keys first occurred.
    (winner, _), *_ = votes.most_common(1)
    return successes[answers.index(winner)]
