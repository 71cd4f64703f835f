"""Training and validation prompts as token ids that the run's services accept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import structlog

from quartet.config import Config
from quartet.data import PromptEncoder, PromptOrder, PromptSettings, encode_prompts, iterate_prompt_lines
from quartet.evaluation import read_validation_prompts
from quartet.services.orchestrator.service_clients import ServiceStatuses, check_lengths
from quartet.types import Prompt, Role

log = structlog.get_logger()

AddNote = Callable[[str], None]
"""Function that receives a note for the user, such as the number of dropped prompts."""


def training_prompts(config: Config, tokenizer: Any, statuses: ServiceStatuses, add_note: AddNote) -> PromptOrder:
    """Return the run's prompts in the order in which its steps take them. Raises ConfigError."""
    encoded = encode_prompts(
        PromptSettings.for_training(config),
        iterate_prompt_lines(config.data.prompts),
        PromptEncoder.of(tokenizer, config.actor.model),
        frozenset({tokenizer.eos_token_id} - {None}),
        statuses[Role.ACTOR].vocabulary_size,
    )
    for line in encoded.notes:
        log.warning(line)
        add_note(line)
    _check(config, encoded.prompts, statuses)
    return PromptOrder(encoded.prompts, config.rollout.prompts_per_step, config.run.seed)


def validation_prompts(
    config: Config, tokenizer: Any, statuses: ServiceStatuses, add_note: AddNote
) -> Sequence[Prompt]:
    """Return the prompts of the evaluations. Raises ConfigError."""
    encoded = read_validation_prompts(config, tokenizer, statuses[Role.ACTOR].vocabulary_size)
    for line in encoded.notes:
        add_note(f"validation: {line}")
    _check(config, encoded.prompts, statuses)
    return encoded.prompts


def _check(config: Config, prompts: Sequence[Prompt], statuses: ServiceStatuses) -> None:
    longest = max(len(prompt.token_ids) for prompt in prompts)
    check_lengths(statuses, longest, config.rollout.max_response_tokens)
