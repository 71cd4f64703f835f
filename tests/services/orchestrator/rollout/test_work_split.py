"""Split of a step's trajectories over generators: by rule, or by load."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from quartet.contract.generation import GenerationRequest, requests_of
from quartet.contract.trajectory import Prompt
from quartet.contract.work_split import by_expected_length, split_by_rule, take_by_load


def requests(prompts: int, samples: int) -> list[GenerationRequest]:
    """Return requests whose prompts have different lengths."""
    lengths = np.random.default_rng(0).permutation(prompts) + 1
    return requests_of("run", 1, [Prompt(i, np.ones(n, np.int32)) for i, n in enumerate(lengths.tolist())], samples)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_a_split_by_rule_deals_the_prompts_in_turn(parts: int) -> None:
    everything = requests(5, 3)
    split = split_by_rule(everything, parts)
    assert len(split) == parts
    assert sorted(request.id for part in split for request in part) == [request.id for request in everything]
    assert [sorted({request.id.prompt for request in part}) for part in split] == [
        list(range(part, 5, parts)) for part in range(parts)
    ]


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_shares_by_load_become_smaller_and_keep_the_samples_of_a_prompt_together(parts: int) -> None:
    everything = requests(64, 4)
    waiting, shares = by_expected_length(everything), []
    while waiting:
        shares.append(take_by_load(waiting, parts))
    taken = [request for share in shares for request in share]
    assert sorted(request.id for request in taken) == [request.id for request in everything]
    assert [len(request.prompt_ids) for request in taken] == sorted(
        (len(request.prompt_ids) for request in everything), reverse=True
    )
    assert all(first >= second for first, second in pairwise(map(len, shares)))
    assert all(len(share) % 4 == 0 for share in shares)
    # The first shares leave enough for the others, and the last ones are small.
    assert len(shares[0]) <= len(everything) / parts
    assert len(shares[-1]) == 4
