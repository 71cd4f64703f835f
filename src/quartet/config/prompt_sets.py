"""Settings of a set of prompts: where its rows are, and how their columns become prompts."""

from __future__ import annotations

import re
from pathlib import Path
from string import Formatter
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from quartet.config.section import Count, Name, Positive, Section

PROMPT_KEYS = ("prompt", "text", "messages", "token_ids")
"""Keys of a prompt. A row has exactly one of them, unless a template makes the prompt."""
SET_FIELD = "prompt_set"
"""Field with the name of the set, which reward functions, environments and records get."""


def placeholders(template: str) -> list[str]:
    """Return the names in braces of a template. Raises ValueError for anything else than {NAME} in braces."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"expected {{COLUMN}} for values, and {{{{ and }}}} for braces ({error})") from None
    names = []
    for _, name, options, conversion in parts:
        if name is None:
            continue
        if options or conversion or name.isdecimal() or not re.fullmatch(r"[^.\[\]{}!:]+", name):
            raise ValueError(
                "expected {COLUMN} for values, without anything else in the braces; write {{ and }} for braces"
            )
        names.append(name)
    return names


def _template(value: str) -> str:
    placeholders(value)
    return value


Template = Annotated[str, AfterValidator(_template)]


class MessageConfig(Section):
    """A message that a template makes."""

    role: Annotated[str, Field(min_length=1)]
    """Role of the message: system, user or assistant."""
    content: Template
    """Text of the message. {COLUMN} stands for the value of a column; {{ and }} are braces."""


class PromptSetConfig(Section):
    """A set of prompts: a file, or a data set of Hugging Face."""

    name: Name
    """Name of the set. The field `prompt_set` of its prompts has it, and its metrics."""
    weight: Positive = 1.0
    """Share of the prompts of the steps, relative to the weights of the other sets."""
    path: Path | None = None
    """File of prompts: JSON Lines, CSV or Parquet. Null: `dataset` is set."""
    dataset: str | None = None
    """Data set of Hugging Face: an id on the hub, a folder with Parquet, JSON, CSV or Arrow files, or one that save_to_disk has
    written. Needs the extra quartet-rlhf[datasets]. Null: `path` is set."""
    config: str | None = None
    """Configuration (subset) of the data set. Null: the default one."""
    split: str = "train"
    """Split of the data set."""
    revision: str | None = None
    """Commit, branch or tag of a data set on the hub. Null: the newest commit when the run starts. A resumed run uses the commit
    that it has started with."""
    take: Count | None = None
    """Maximum number of rows to read, from the start. Later rows are not downloaded. Null: all."""
    columns: dict[str, str] = Field(default={})
    """Columns to rename, as NAME: COLUMN. `prompt: question` reads prompts from the column `question`."""
    ignore_columns: tuple[str, ...] = ()
    """Columns that are not read."""
    text_template: Template | None = None
    """Text of each prompt. {COLUMN} stands for the value of a column, after renaming; {{ and }} are braces. Null: a column has
    the prompt."""
    message_templates: tuple[MessageConfig, ...] = ()
    """Messages of each prompt, each with `role` and `content`. Empty: a column has the prompt."""

    @model_validator(mode="after")
    def _is_consistent(self) -> PromptSetConfig:
        if (self.path is None) == (self.dataset is None):
            raise ValueError(f"set {self.name}: expected either path, for a file, or dataset")
        if self.dataset is None:
            for name in ("config", "revision"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}: only used with dataset; remove it")
        if self.text_template is not None and self.message_templates:
            raise ValueError("text_template, message_templates: expected at most one of them")
        for name, column in self.columns.items():
            if column in self.ignore_columns:
                raise ValueError(
                    f"columns.{name}: the column {column} is in ignore_columns, too; remove it from one of them"
                )
            if name == SET_FIELD:
                raise ValueError(f"columns.{name}: this field has the name of the set; choose another name")
        return self
