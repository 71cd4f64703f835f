"""Order of prompts over the steps of a run: those of one file, or of several sets that are mixed by weight."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from math import ceil, floor
from typing import Protocol

from quartet.contract.random_streams import prompt_order
from quartet.contract.trajectory import Prompt
from quartet.errors import ConfigError


class StepPrompts(Protocol):
    """The prompts of every step of a run."""

    def of_step(self, step: int) -> list[Prompt]:
        """Return the prompts of a step. Steps count from 1."""


class PromptOrder:
    """Order of prompts: passes over the data set, each shuffled, as a pure function of seed and step.

    Prompts at the end of a pass that do not fill a step are left out of that pass. A resumed run needs no saved state, because
    the prompts of a step do not depend on earlier steps.
    """

    def __init__(self, prompts: Sequence[Prompt], prompts_per_step: int, seed: int) -> None:
        """Raise ConfigError if the data set cannot fill one step."""
        if len(prompts) < prompts_per_step:
            raise ConfigError(
                f"rollout.prompts_per_step {prompts_per_step}: data.prompts has only {len(prompts)} usable prompts; "
                "lower it or give more prompts"
            )
        self._prompts, self._per_step, self._seed = prompts, prompts_per_step, seed
        self._steps_per_pass = len(prompts) // prompts_per_step

    def of_step(self, step: int) -> list[Prompt]:
        """Return the prompts of a step. Steps count from 1."""
        number, index_in_pass = divmod(step - 1, self._steps_per_pass)
        order = prompt_order(self._seed, number, len(self._prompts))
        chosen = order[index_in_pass * self._per_step : (index_in_pass + 1) * self._per_step]
        return [self._prompts[index] for index in chosen]


@dataclass(frozen=True, slots=True)
class PromptDraw:
    """Prompts taken from a ``PromptSequence``. ``consumed``: number of its prompts that are used up after this draw."""

    prompts: list[Prompt]
    consumed: int


class PromptSequence:
    """The prompts of steps, one step after the other, for steps that take more than ``prompts_per_step``.

    A draw depends only on the order and on its arguments, so a resumed run that knows the number of consumed prompts sees the
    same ones. If every step takes ``prompts_per_step``, each gets the prompts that ``order`` has for it.
    """

    def __init__(self, order: StepPrompts, prompts_per_step: int, first: int = 1, stride: int = 1) -> None:
        """The sequence has the prompts of step ``first`` and of every ``stride``-th step after it."""
        self._order, self._per_step, self._first, self._stride = order, prompts_per_step, first, stride

    def draw(self, consumed: int, number: int, excluded: Collection[int] = ()) -> PromptDraw:
        """Return the next ``number`` different prompts after the first ``consumed`` ones.

        Prompts whose index is in ``excluded`` are passed over and count as consumed. Returns fewer prompts if it has to pass over
        ``prompts_per_step`` prompts in a row, and none if it finds none within two passes over the excluded ones: the data set is
        too small.
        """
        patience = 2 * (self._per_step + len(excluded))
        drawn: dict[int, Prompt] = {}
        skipped = 0
        for prompt in self._after(consumed):
            consumed += 1
            if prompt.index in drawn or prompt.index in excluded:
                skipped += 1
            else:
                drawn[prompt.index], skipped = prompt, 0
            if len(drawn) == number or skipped == (self._per_step if drawn else patience):
                break
        return PromptDraw([*drawn.values()], consumed)

    def _after(self, consumed: int) -> Iterator[Prompt]:
        steps, offset = divmod(consumed, self._per_step)
        for step in count(self._first + steps * self._stride, self._stride):
            yield from self._order.of_step(step)[offset:]
            offset = 0


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
        for each, number, position in zip(self._sets, self._parts(step), positions, strict=True):
            position = self._start(each, position, number)
            order = prompt_order(self._seed, position.passes, len(each.prompts), each.name)
            prompts += [each.prompts[index] for index in order[position.taken : position.taken + number]]
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
