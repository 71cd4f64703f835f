"""Split of a step's trajectories over generators."""

from __future__ import annotations

from collections.abc import Sequence

from quartet.contract.generation import GenerationRequest

SHARES = 4
"""Number of shares of each generator, if the split follows the load. Later shares are smaller."""


def split_by_rule(requests: Sequence[GenerationRequest], parts: int) -> list[list[GenerationRequest]]:
    """Return the requests of each of ``parts`` generators: the prompts in turn, with all samples of a prompt together.

    A generator computes a prompt once for all its samples. Parts may be empty.
    """
    prompts = {request.id.prompt: None for request in requests}
    owner = {prompt: index % parts for index, prompt in enumerate(prompts)}
    result: list[list[GenerationRequest]] = [[] for _ in range(parts)]
    for request in requests:
        result[owner[request.id.prompt]].append(request)
    return result


def take_by_load(waiting: list[GenerationRequest], parts: int) -> list[GenerationRequest]:
    """Remove and return the next share of the ``waiting`` requests for one of ``parts`` generators.

    A share is a fraction of what is left, so that shares become smaller and all generators end at about the same time (guided
    self-scheduling; Polychronopoulos and Kuck 1987). The longest prompts come first. All samples of a prompt stay together.
    """
    count = max(1, -(-len(waiting) * 2 // (SHARES * parts)))
    last = waiting[min(count, len(waiting)) - 1].id.prompt
    while count < len(waiting) and waiting[count].id.prompt == last:
        count += 1
    share, waiting[:] = waiting[:count], waiting[count:]
    return share


def by_expected_length(requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
    """Return the requests with the longest prompts first, the samples of a prompt together."""
    return sorted(requests, key=lambda request: (-len(request.prompt_ids), request.id))
