"""Settings of the run itself: its name, length and data, and when it is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from quartet.config.prompt_sets import PromptSetConfig
from quartet.config.section import Count, Fraction, Name, Section, WholeNumber
from quartet.config.template_inputs import TEMPLATE_KEYS, check_template_input


class RunConfig(Section):
    """Name, seed and length of the run, and the folder that holds it."""

    name: Name = "run"
    """Name of the run and of its folder: letters, digits, '.', '_' and '-'. Trajectory ids start with it."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of every random number of the run."""
    steps: Count = 100
    """Number of training steps."""
    directory: Path = Path("runs")
    """Folder of all runs. A run is stored in DIRECTORY/NAME."""


class DataConfig(Section):
    """Prompts to train on and to evaluate with."""

    prompts: Path | None = None
    """File of prompts: JSON Lines, CSV or Parquet. Each row has `prompt`, `text`, `messages` or `token_ids`. Reward functions get
    all fields of the row except `token_ids`. Null: `sets` has the prompts, or with environment.kind traffic users send them."""
    sets: tuple[PromptSetConfig, ...] = ()
    """List of sets of prompts, which are mixed by their weights. Each is a file or a data set of Hugging Face."""
    validation: Path | None = None
    """File of evaluation prompts in the same format as `prompts`. Null: none, or those of `validation_set`."""
    validation_set: PromptSetConfig | None = None
    """Set of evaluation prompts: a file or a data set of Hugging Face. Null: none, or those of `validation`."""
    max_prompt_tokens: Count = 512
    """Maximum length of a prompt in tokens. Longer prompts are dropped and counted, or truncated."""
    truncation: Literal["left", "right"] | None = None
    """left: cut the start of prompts that are too long, except a BOS token. right: cut their end, with the generation prompt of
    messages. Null: drop them."""
    max_dropped_fraction: Fraction = 0.5
    """Maximum fraction of prompts to drop because they are too long. The run does not start if there are more. With 1 it only
    needs one prompt that is short enough. Not checked if there are evaluation.max_prompts validation prompts."""
    continue_final_message: bool = False
    """Let the policy continue the last message of prompts that end with the assistant. False: such prompts are refused."""
    tools: tuple[dict[str, Any], ...] = ()
    """Tools that the chat template gets, as a list of JSON schemas. The column `tools` of a row replaces them."""
    documents: tuple[dict[str, Any], ...] = ()
    """Documents that the chat template gets, as a list of objects such as {title: ..., text: ...}. The column `documents` of a
    row replaces them."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """At most 64 further variables of the chat template, such as {enable_thinking: false}. Prompts, turns of environments,
    evaluations and `quartet generate` use them. The column `chat_template_kwargs` of a row replaces them, variable by
    variable."""

    @property
    def has_validation(self) -> bool:
        """Return whether there are evaluation prompts."""
        return self.validation is not None or self.validation_set is not None

    @field_validator(*TEMPLATE_KEYS)
    @classmethod
    def _reaches_templates(cls, value: Any, info: ValidationInfo) -> Any:
        check_template_input(str(info.field_name), value)
        return value

    @model_validator(mode="after")
    def _is_consistent(self) -> DataConfig:
        if self.prompts is not None and self.sets:
            raise ValueError("expected either prompts, the path of a file, or sets, a list of sets of prompts")
        if self.validation is not None and self.validation_set is not None:
            raise ValueError("validation, validation_set: expected at most one of them")
        names = [each.name for each in self.sets]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"sets: two sets have the name {repeated[0]}; rename one")
        return self


class CheckpointConfig(Section):
    """Frequency of checkpoints, and the number to keep."""

    every_steps: WholeNumber = 50
    """Steps between checkpoints. 0: write no checkpoints, only the final policy."""
    keep_last: Count = 2
    """Number of latest checkpoints to keep. Tagged checkpoints are kept as well."""
    best_metric: str | None = None
    """Metric of a step or of an evaluation, such as eval_reward_sampled. The checkpoint with the best value so far is kept and
    has the tag best. Null: no checkpoint is the best."""
    best_mode: Literal["max", "min"] = "max"
    """max: the largest value of best_metric is the best. min: the smallest."""

    @model_validator(mode="after")
    def _has_checkpoints(self) -> CheckpointConfig:
        if self.best_metric is not None and self.every_steps == 0:
            raise ValueError(
                f"best_metric {self.best_metric}: every_steps is 0, so there are no checkpoints; set every_steps above 0"
            )
        return self
