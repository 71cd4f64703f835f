"""Training and validation prompts as token ids that the run's services accept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import structlog

from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.contract.trajectory import Prompt
from quartet.data.evaluation import read_training_prompts, read_validation_prompts
from quartet.data.evaluation_sets import read_evaluation_sets
from quartet.data.prompt_order import MixedPromptOrder, PromptOrder, StepPrompts, WeightedPrompts
from quartet.data.prompt_settings import NO_REVISIONS
from quartet.models.weights.tokenizer import load_tokenizer
from quartet.services.orchestrator.handshake import check_lengths
from quartet.services.orchestrator.service_clients import ServiceStatuses

log = structlog.get_logger()

_NO_TOKENS = np.zeros(1, np.int32)
AddNote = Callable[[str], None]
"""Function that receives a note for the user, such as the number of dropped prompts."""


def training_prompts(
    config: Config,
    statuses: ServiceStatuses,
    add_note: AddNote,
    show_phase: Callable[[str], None] = lambda _: None,
    revisions: Mapping[str, str] = NO_REVISIONS,
) -> StepPrompts:
    """Return the run's prompts in the order in which its steps take them. Those of users have no text yet. Raises ConfigError.

    ``show_phase`` gets a line of progress every few seconds while they are tokenized. ``revisions``: see
    ``read_training_prompts``.
    """

    if config.has_traffic:
        return _PromptsOfUsers(config.rollout.prompts_per_step)

    def report(line: str) -> None:
        log.info(line)
        show_phase(line)

    sets = read_training_prompts(config, _loader(config), statuses[Role.ACTOR].vocabulary_size, report, revisions)
    names = [f"{each.name}: " for each in config.data.sets] or [""]
    for name, encoded in zip(names, sets, strict=True):
        for line in encoded.notes:
            log.warning(f"{name}{line}")
            add_note(f"{name}{line}")
        _check(config, encoded.prompts, statuses)
    per_step, seed = config.rollout.prompts_per_step, config.run.seed
    if not config.data.sets:
        return PromptOrder(sets[0].prompts, per_step, seed)
    weighted = [
        WeightedPrompts(each.name, each.weight, encoded.prompts)
        for each, encoded in zip(config.data.sets, sets, strict=True)
    ]
    return MixedPromptOrder(weighted, per_step, seed)


class _PromptsOfUsers:
    """A place for each session of users that a step takes. Which sessions they are is known once they have a reward."""

    def __init__(self, prompts_per_step: int) -> None:
        self._per_step = prompts_per_step

    def of_step(self, step: int) -> list[Prompt]:
        """Return the places of a step. Each place is of one step only."""
        return [Prompt(index, _NO_TOKENS) for index in range((step - 1) * self._per_step, step * self._per_step)]


def validation_prompts(
    config: Config, statuses: ServiceStatuses, add_note: AddNote, revisions: Mapping[str, str] = NO_REVISIONS
) -> Sequence[Prompt]:
    """Return the prompts of the evaluations. ``revisions``: see ``read_validation_prompts``. Raises ConfigError."""
    encoded = read_validation_prompts(config, _loader(config), statuses[Role.ACTOR].vocabulary_size, revisions)
    for line in encoded.notes:
        add_note(f"validation: {line}")
    _check(config, encoded.prompts, statuses)
    return encoded.prompts


def evaluation_sets(
    config: Config, statuses: ServiceStatuses, add_note: AddNote, revisions: Mapping[str, str] = NO_REVISIONS
) -> list[Sequence[Prompt]]:
    """Return the prompts of each of ``evaluation.sets``. ``revisions``: see ``read_evaluation_sets``. Raises ConfigError."""
    sets = read_evaluation_sets(config, _loader(config), statuses[Role.ACTOR].vocabulary_size, revisions)
    for each, encoded in zip(config.evaluation.sets, sets, strict=True):
        for line in encoded.notes:
            add_note(f"{each.name}: {line}")
        _check(config, encoded.prompts, statuses)
    return [encoded.prompts for encoded in sets]


def _loader(config: Config) -> Callable[[], Any]:
    return lambda: load_tokenizer(config.actor.model)


def _check(config: Config, prompts: Sequence[Prompt], statuses: ServiceStatuses) -> None:
    longest = max(len(prompt.token_ids) for prompt in prompts)
    check_lengths(statuses, longest, config.rollout.max_response_tokens)
