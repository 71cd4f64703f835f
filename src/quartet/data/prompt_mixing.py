"""Order of the prompts of several sets, which are mixed by weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor

from quartet.contract.random_streams import prompt_order
from quartet.contract.trajectory import Prompt
from quartet.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WeightedPrompts:
    """The usable prompts of a set, and its weight."""

    name: str
    weight: float
    prompts: Sequence[Prompt]


@dataclass(frozen=True, slots=True)
class _Position:
    """Number of passes over a set that have ended, and number of prompts that the current one has given."""

    passes: int = 0
    taken: int = 0


class MixedPromptOrder:
    """Order of prompts of several sets: passes over each set, each shuffled, as a pure function of seed and step.

    The number of prompts that a set gives to the steps 1 to s follows from the weights, up to rounding. Each set has its own
    passes. Prompts at the end of a pass that do not fill the set's part of a step are left out of that pass.
    """

    def __init__(self, sets: Sequence[WeightedPrompts], prompts_per_step: int, seed: int) -> None:
        """Raise ConfigError if a set cannot fill its part of a step."""
        self._sets, self._per_step, self._seed = sets, prompts_per_step, seed
        self._shares = shares_of_rest([each.weight for each in sets])
        for each, most in zip(sets, max_parts(self._shares, prompts_per_step), strict=True):
            if len(each.prompts) < most:
                raise ConfigError(
                    f"data.sets.{each.name}: has only {len(each.prompts)} usable prompts, and a step takes up to {most} of them; "
                    "give more prompts, lower its weight, or lower rollout.prompts_per_step"
                )
        self._known = (1, [_Position()] * len(sets))

    def of_step(self, step: int) -> list[Prompt]:
        """Return the prompts of a step, set by set. Steps count from 1."""
        positions = self._positions(step)
        prompts: list[Prompt] = []
        for each, count, position in zip(self._sets, self._parts(step), positions, strict=True):
            position = self._start(each, position, count)
            order = prompt_order(self._seed, position.passes, len(each.prompts), each.name)
            prompts += [each.prompts[index] for index in order[position.taken : position.taken + count]]
        return prompts

    def _parts(self, step: int) -> list[int]:
        """Return how many prompts each set gives to a step."""
        before, after = (cumulative_parts(self._shares, steps * self._per_step) for steps in (step - 1, step))
        return [end - start for start, end in zip(before, after, strict=True)]

    def _start(self, each: WeightedPrompts, position: _Position, count: int) -> _Position:
        """Return where a set's part of a step begins: in a new pass if the current one has too few prompts left."""
        return position if position.taken + count <= len(each.prompts) else _Position(position.passes + 1)

    def _positions(self, step: int) -> list[_Position]:
        """Return the positions in the passes before a step."""
        known, positions = self._known if self._known[0] <= step else (1, [_Position()] * len(self._sets))
        for earlier in range(known, step):
            parts = self._parts(earlier)
            starts = [self._start(*each) for each in zip(self._sets, positions, parts, strict=True)]
            positions = [
                _Position(start.passes, start.taken + count) for start, count in zip(starts, parts, strict=True)
            ]
        self._known = (step, positions)
        return positions


def shares_of_rest(weights: Sequence[float]) -> list[Fraction]:
    """Return the share of each set in the sum of its weight and those after it. Decimal weights such as 0.1 are exact."""
    exact = [Fraction(str(weight)) for weight in weights]
    return [weight / sum(exact[index:]) for index, weight in enumerate(exact)]


def cumulative_parts(shares: Sequence[Fraction], total: int) -> list[int]:
    """Divide ``total`` prompts. Every part grows with ``total``, and never by more.

    The first set gets its rounded share, the second set its rounded share of the rest, and so on.
    """
    parts = []
    for share in shares:
        part = (2 * share.numerator * total + share.denominator) // (2 * share.denominator)
        parts.append(part)
        total -= part
    return parts


def max_parts(shares: Sequence[Fraction], count: int) -> list[int]:
    """Return the most prompts that each part can grow by while the total grows by ``count``."""
    parts = []
    for share in shares:
        parts.append(ceil(share * count))
        # The rest grows by the most while this part grows by the least.
        count -= floor(share * count)
    return parts
