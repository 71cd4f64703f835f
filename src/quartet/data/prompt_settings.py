"""Settings that decide which prompts a file gives, and which token ids they have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quartet.config import Config


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """Settings of one prompts file. See ``quartet.config.DataConfig``.

    ``model`` has the tokenizer. ``limit``: maximum number of prompts; later lines are not read. ``opens_response``: messages end
    with the opening of a response; False leaves it to an environment.
    """

    path: Path
    model: str
    max_prompt_tokens: int
    truncation: str | None = None
    max_dropped_fraction: float = 1.0
    continue_final_message: bool = False
    limit: int | None = None
    opens_response: bool = True

    @classmethod
    def for_training(cls, config: Config) -> PromptSettings:
        """Return the settings of data.prompts."""
        return cls._of(config, config.data.prompts, None)

    @classmethod
    def for_validation(cls, config: Config) -> PromptSettings | None:
        """Return the settings of data.validation, or None without it."""
        path = config.data.validation
        return None if path is None else cls._of(config, path, config.evaluation.max_prompts)

    @classmethod
    def _of(cls, config: Config, path: Path, limit: int | None) -> PromptSettings:
        data = config.data
        return cls(
            path,
            config.actor.model,
            data.max_prompt_tokens,
            data.truncation,
            data.max_dropped_fraction,
            data.continue_final_message,
            limit,
            not (config.has_environment and config.environment.observations == "chat"),
        )
