"""Checks of prompts files. Prompts are tokenized in a separate process, and then in the user's cache for the run."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quartet.config.root import Config
from quartet.config.template_inputs import TEMPLATE_KEYS
from quartet.data.prompt_cache import cached_prompts
from quartet.data.prompt_datasets import cached_rows_file, on_the_hub, rows_file
from quartet.data.prompt_encoding import PromptSummary, summarize_prompts
from quartet.data.prompt_files import check_regular_file
from quartet.data.prompt_lines import iterate_prompts
from quartet.data.prompt_order import max_parts, shares_of_rest
from quartet.data.prompt_settings import PromptSettings
from quartet.errors import ConfigError, DataError, ModelError, ServiceFailed
from quartet.model_files.adapter_files import adapter_chain
from quartet.model_files.hub_models import cached_snapshot
from quartet.model_files.model_support import number_in, positions_in
from quartet.model_files.tokenizer_check import has_tokenizer, tokenizer_location
from quartet.preflight.checking_process import checking_process
from quartet.preflight.findings import Finding, collect, has_error
from quartet.run_directory.identity import Identity
from quartet.run_directory.run_files import RunFiles
from quartet.system.missing_packages import explain_missing_package

Report = Callable[[str], None]
"""Function that gets a line of progress every few seconds."""


def check_prompts(config: Config, report: Report, tokenizes: bool = True) -> Iterator[Finding]:
    """Check that every prompt can be tokenized and fits the models.

    Without the tokenizer on this machine, or without ``tokenizes``, only the files are read. Raises ConfigError, and
    ServiceFailed if the process that tokenizes them dies.
    """
    # A resumed run uses the commits that it has recorded.
    identity = Identity.read(RunFiles(config.run_directory).identity)
    revisions = identity.revisions if identity is not None else {}
    files = PromptSettings.for_training(config, revisions)
    needed = dict(zip((settings.key for settings in files), _needed(config), strict=True))
    if (validation := PromptSettings.for_validation(config, revisions)) is not None:
        files.append(validation)
    files += PromptSettings.for_evaluation_sets(config, revisions)
    found = [
        each
        for settings in files
        if settings.dataset is None
        for each in collect(check_regular_file, settings.path, settings.key)
    ]
    yield from found
    if has_error(found):
        return
    vocabulary_size = number_in(_description(config.actor.model), "vocab_size")
    summaries = _summaries(files, vocabulary_size, report) if tokenizes else None
    has_messages = False
    for number, settings in enumerate(files):
        key = settings.key
        if summaries is None:
            num_prompts, num_messages = _read(settings)
            extra = ["they are tokenized when the run starts: the tokenizer is not on this machine"]
        else:
            summary = summaries[number]
            num_prompts, num_messages, extra = summary.num_prompts, summary.num_messages, summary.notes
            yield from collect(_check_positions, key, summary.max_length, config)
        has_messages |= num_messages > 0
        of_chats = f", {num_messages} of them messages" if num_messages else ""
        yield Finding("ok", f"{key} {settings}", f"{num_prompts} prompts{of_chats}")
        for note in extra:
            text = note.removeprefix("warning: ")
            yield Finding("ok" if text == note else "warning", key, text)
        if num_prompts < needed.get(key, 0):
            yield Finding(
                "error",
                f"rollout.prompts_per_step {config.rollout.prompts_per_step}",
                f"{key} {settings} has only {num_prompts} usable prompts, and a step needs {needed[key]}; lower it, or give more "
                "prompts",
            )
    inputs = ", ".join(f"data.{key}" for key in TEMPLATE_KEYS if getattr(config.data, key))
    # The template of an environment opens the response, so it gets them for its turns.
    if inputs and not has_messages and not config.has_traffic and files[0].opens_response:
        reason = "not used: they are for the chat template, and no prompt is a list of messages"
        yield Finding("warning", inputs, reason)


def count_prompts(config: Config) -> int:
    """Return the number of usable training prompts; without the tokenizer on this machine, of all. Raises ConfigError."""
    files = PromptSettings.for_training(config)
    summaries = _summaries(files, number_in(_description(config.actor.model), "vocab_size"), lambda _: None)
    if summaries is None:
        return sum(_read(settings)[0] for settings in files)
    return sum(summary.num_prompts for summary in summaries)


def _needed(config: Config) -> list[int]:
    """Return how many prompts a step needs at most of data.prompts, or of each of data.sets; none if users send them."""
    if config.has_traffic:
        return []
    weights = [each.weight for each in config.data.sets] or [1.0]
    return max_parts(shares_of_rest(weights), config.rollout.prompts_per_step)


def _read(settings: PromptSettings) -> tuple[int, int]:
    """Return the numbers of prompts in a set, and of those that are messages. Raises DataError."""
    num_prompts = num_messages = 0
    for line in iterate_prompts(settings, rows_file(settings).path):
        num_prompts += 1
        num_messages += line.messages is not None
    return num_prompts, num_messages


def _summaries(files: list[PromptSettings], vocabulary_size: int | None, report: Report) -> list[PromptSummary] | None:
    """Return what the run will use of each file, or None if the prompts cannot be tokenized here."""
    cached = [cached_prompts(settings) for settings in files]
    if all(encoded is not None for encoded in cached):
        return [
            summarize_prompts(encoded, settings, vocabulary_size)
            for encoded, settings in zip(cached, files, strict=True)
            if encoded is not None
        ]
    location = Path(tokenizer_location(files[0].model))
    if not (location.is_dir() and has_tokenizer(location)) and cached_snapshot(str(location)) is None:
        return None
    request = {"files": [settings.to_json() for settings in files], "vocabulary_size": vocabulary_size}
    needs_hub = any(on_the_hub(settings) and cached_rows_file(settings) is None for settings in files)
    message = _run_worker(request, needs_hub, report)
    if "missing" in message:
        error = explain_missing_package(ModuleNotFoundError(message["error"], name=message["missing"]))
        raise ConfigError(f"{files[0].key} {files[0]}: cannot be tokenized: {error}")
    if "error" in message:
        kinds = {"DataError": DataError, "ModelError": ModelError, "ServiceFailed": ServiceFailed}
        raise kinds.get(message["kind"], ConfigError)(message["error"])
    return [PromptSummary(**result) for result in message["results"]]


def _run_worker(request: dict[str, Any], needs_hub: bool, report: Report) -> dict[str, Any]:
    """Return the last message of a ``quartet.preflight.prompt_worker``. Raises ServiceFailed if it has died."""
    message: dict[str, Any] = {}
    # The tokenizer is on this machine, so only prompts from the hub need the network.
    offline = {} if needs_hub else {"HF_HUB_OFFLINE": "1"}
    with checking_process("quartet.preflight.prompt_worker", json.dumps(request), environment=offline) as (
        pipe,
        process,
    ):
        for line in pipe:
            message = json.loads(line)
            if "progress" in message:
                report(message["progress"])
        if "results" in message or "error" in message:
            return message
        code = process.wait()
    end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    hint = "; its memory may not suffice: free memory, and try again" if code == -signal.SIGKILL else ""
    raise ServiceFailed(f"data.prompts: the process that tokenizes the prompts {end}{hint}")


def _check_positions(key: str, longest: int, config: Config) -> None:
    """Check that the longest sequence fits every model whose files are here. Raises ConfigError."""
    response = config.rollout.max_response_tokens
    for name, model in config.models.items():
        description = _description(model)
        positions = positions_in(description)
        if positions and longest + response > positions:
            raise ConfigError(
                f"rollout.max_response_tokens {response}: with the longest prompt of {key}, of {longest} tokens, exceeds the "
                f"{positions} positions of {name} {model}; lower it, or data.max_prompt_tokens"
            )


def _description(model: str) -> dict[str, Any]:
    """Return the config.json of a model or of the base model of an adapter. Empty if it is not here or not valid."""
    try:
        base, _ = adapter_chain(model)
        directory = Path(base) if Path(base).is_dir() else cached_snapshot(base)
        if directory is None:
            return {}
        value = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, ModelError):
        return {}
    return value if isinstance(value, dict) else {}
