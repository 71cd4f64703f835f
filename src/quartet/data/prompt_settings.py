"""Settings that decide which prompts a file or a data set gives, and which token ids they have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from quartet.data.chat_template import NO_INPUTS, TemplateInputs
from quartet.data.prompt_files import location

if TYPE_CHECKING:
    from quartet.config.prompt_sets import PromptSetConfig
    from quartet.config.root import Config

NO_REVISIONS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RowMapping:
    """Rules by which the columns of a row become a prompt and its fields. See ``quartet.config.prompt_sets.PromptSetConfig``.

    ``columns`` are pairs of name and column, ``messages`` pairs of role and template. ``take``: maximum number of rows to read.
    ``set_name``: name of the set, empty for prompts that belong to none.
    """

    columns: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    text: str | None = None
    messages: tuple[tuple[str, str], ...] = ()
    take: int | None = None
    set_name: str = ""

    def column(self, name: str) -> str:
        """Return the column that is read as ``name``."""
        return dict(self.columns).get(name, name)

    def label(self, name: str) -> str:
        """Return ``name`` for messages, with its column if that has another name."""
        column = self.column(name)
        return name if column == name else f"{name} (column {column})"


@dataclass(frozen=True, slots=True)
class DatasetSource:
    """A split of a data set of Hugging Face. See ``quartet.config.prompt_sets.PromptSetConfig``."""

    name: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None

    def __str__(self) -> str:
        config = f"{self.config}, " if self.config is not None else ""
        return f"{self.name} ({config}{self.split})"


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """Settings of one set of prompts. See ``quartet.config.run.DataConfig``.

    ``path`` is the file, or the name of the data set if ``dataset`` is set. ``model`` has the tokenizer. ``limit``: maximum
    number of prompts; later lines are not read. ``opens_response``: messages end with the opening of a response; False leaves it
    to an environment, and ``has_turn_template`` says that it has a template of its own. ``for_agents``: agents get the prompts,
    and the policy does not. ``key`` is the setting that names the prompts. ``inputs`` are what the chat template gets besides the
    messages, unless a row has others.
    """

    path: Path
    model: str
    max_prompt_tokens: int
    truncation: str | None = None
    max_dropped_fraction: float = 1.0
    continue_final_message: bool = False
    limit: int | None = None
    opens_response: bool = True
    mapping: RowMapping = RowMapping()
    dataset: DatasetSource | None = None
    key: str = "data.prompts"
    inputs: TemplateInputs = NO_INPUTS
    has_turn_template: bool = False
    for_agents: bool = False

    def __str__(self) -> str:
        return str(self.path if self.dataset is None else self.dataset)

    def location(self, row: int) -> str:
        """Return where a prompt is, for messages. ``row`` counts from 1."""
        return location(self.path, row) if self.dataset is None else f"prompts {self.dataset} row {row}"

    def to_json(self) -> dict[str, Any]:
        """Return the settings as a JSON object."""
        return {**asdict(self), "path": str(self.path)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PromptSettings:
        """Return the settings of ``to_json``."""
        mapping, dataset = value["mapping"], value["dataset"]
        pairs = {name: tuple(tuple(pair) for pair in mapping[name]) for name in ("columns", "messages")}
        rows = RowMapping(**{**mapping, **pairs, "ignored": tuple(mapping["ignored"])})
        inputs = TemplateInputs.of_row(value["inputs"])
        given = {**value, "path": Path(value["path"]), "mapping": rows, "inputs": inputs}
        return cls(**{**given, "dataset": None if dataset is None else DatasetSource(**dataset)})

    @classmethod
    def for_training(cls, config: Config, revisions: Mapping[str, str] = NO_REVISIONS) -> list[PromptSettings]:
        """Return the settings of data.prompts or of each of data.sets. ``revisions`` of data sets on the hub, by key."""
        if config.data.prompts is not None:
            return [cls._of(config, config.data.prompts, None)]
        return [cls._of_set(config, each, f"data.sets.{each.name}", None, revisions) for each in config.data.sets]

    @classmethod
    def for_validation(cls, config: Config, revisions: Mapping[str, str] = NO_REVISIONS) -> PromptSettings | None:
        """Return the settings of data.validation or data.validation_set, or None without both."""
        data, limit = config.data, config.evaluation.max_prompts
        if data.validation_set is not None:
            return cls._of_set(config, data.validation_set, "data.validation_set", limit, revisions)
        if data.validation is None:
            return None
        return replace(cls._of(config, data.validation, limit), key="data.validation")

    @classmethod
    def for_evaluation_sets(cls, config: Config, revisions: Mapping[str, str] = NO_REVISIONS) -> list[PromptSettings]:
        """Return the settings of each of evaluation.sets."""
        evaluation = config.evaluation
        return [
            cls._of_set(
                config, each, f"evaluation.sets.{each.name}", each.max_prompts or evaluation.max_prompts, revisions
            )
            for each in evaluation.sets
        ]

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
            inputs=TemplateInputs.of_config(config),
            has_turn_template=config.has_environment and config.environment.chat_template is not None,
            for_agents=config.has_agents,
        )

    @classmethod
    def _of_set(
        cls, config: Config, given: PromptSetConfig, key: str, limit: int | None, revisions: Mapping[str, str]
    ) -> PromptSettings:
        mapping = RowMapping(
            tuple(sorted(given.columns.items())),
            given.ignore_columns,
            given.text_template,
            tuple((message.role, message.content) for message in given.message_templates),
            given.take,
            given.name,
        )
        dataset = None
        if given.dataset is not None:
            dataset = DatasetSource(given.dataset, given.config, given.split, revisions.get(key) or given.revision)
        settings = cls._of(config, given.path or Path(given.dataset or ""), limit)
        return replace(settings, mapping=mapping, dataset=dataset, key=key)
