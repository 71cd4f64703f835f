"""Contents of the sets of prompts, which a run records so that a resumed run sees the same rows."""

from __future__ import annotations

from collections.abc import Mapping

from quartet.config.root import Config
from quartet.contract.trajectory import PromptSetContent
from quartet.data.prompt_cache import FileDigest
from quartet.data.prompt_datasets import Report, rows_file
from quartet.data.prompt_settings import NO_REVISIONS, PromptSettings


def set_contents(
    config: Config, revisions: Mapping[str, str] = NO_REVISIONS, report: Report = lambda _: None
) -> dict[str, PromptSetContent]:
    """Return the content of every set, by key of the config. Empty without sets.

    ``revisions`` of data sets on the hub, by key. Data sets are read if they are not in the user's cache. Raises DataError.
    """
    sets = PromptSettings.for_training(config, revisions) if config.data.sets else []
    validation = PromptSettings.for_validation(config, revisions)
    if config.data.validation_set is not None and validation is not None:
        sets.append(validation)
    contents = {}
    for settings in sets:
        rows = rows_file(settings, report)
        contents[settings.key] = PromptSetContent(FileDigest.of(rows.path).sha256, rows.revision)
    return contents
