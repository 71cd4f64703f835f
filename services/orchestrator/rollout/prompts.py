"""The prompts that a run learns from and is evaluated on, as token ids that its services can take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import structlog

from quartet.config import Config
from quartet.data import PromptEncoder, PromptOrder, encode_prompts, iterate_prompt_lines
from quartet.evaluation import read_validation_prompts
from quartet.services.orchestrator.service_clients import Statuses, check_lengths
from quartet.types import Prompt, Role

log = structlog.get_logger()

Note = Callable[[str], None]
"""Takes something that a user should know, such as how many prompts were dropped."""


def training_prompts(config: Config, tokenizer: Any, statuses: Statuses, note: Note) -> PromptOrder:
    """The run's prompts in the order in which its steps take them. Raises ConfigError."""
    found = encode_prompts(
        config.data.prompts,
        iterate_prompt_lines(config.data.prompts),
        PromptEncoder.of(tokenizer, config.actor.model),
        frozenset({tokenizer.eos_token_id} - {None}),
        statuses[Role.ACTOR].vocabulary_size,
        config.data.max_prompt_tokens,
    )
    for line in found.notes:
        log.warning(line)
        note(line)
    _check(config, found.prompts, statuses)
    return PromptOrder(found.prompts, config.rollout.prompts_per_step, config.run.seed)


def validation_prompts(config: Config, tokenizer: Any, statuses: Statuses, note: Note) -> Sequence[Prompt]:
    """The prompts that evaluations are on. Raises ConfigError."""
    found = read_validation_prompts(config, tokenizer, statuses[Role.ACTOR].vocabulary_size)
    for line in found.notes:
        note(f"validation: {line}")
    _check(config, found.prompts, statuses)
    return found.prompts


def _check(config: Config, prompts: Sequence[Prompt], statuses: Statuses) -> None:
    longest = max(len(prompt.token_ids) for prompt in prompts)
    check_lengths(statuses, longest, config.rollout.max_response_tokens)
