"""Order of prompts over the steps of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quartet.errors import ConfigError
from quartet.random_streams import prompt_order
from quartet.types import Prompt


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
