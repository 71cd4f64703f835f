"""Order of prompts over the steps of a run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
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
    """The prompts of all steps, one step after the other, for steps that take more than ``prompts_per_step``.

    A draw depends only on the order and on its arguments, so a resumed run that knows the number of consumed prompts sees the
    same ones. If every step takes ``prompts_per_step``, each gets the prompts that ``order`` has for it.
    """

    def __init__(self, order: StepPrompts, prompts_per_step: int) -> None:
        self._order, self._per_step = order, prompts_per_step

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
        for step in count(steps + 1):
            yield from self._order.of_step(step)[offset:]
            offset = 0
