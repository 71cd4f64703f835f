"""Checks of prompts files. Prompts are tokenized in a separate process, and then in the user's cache for the run."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quartet.adapter_files import adapter_chain
from quartet.config import Config
from quartet.data import (
    PromptSettings,
    PromptSummary,
    cached_prompts,
    iterate_prompt_lines,
    summarize_prompts,
)
from quartet.errors import ConfigError, DataError, ModelError, ServiceFailed
from quartet.hub_models import cached_snapshot
from quartet.missing_packages import explain_missing_package
from quartet.model_support import number_in, positions_in
from quartet.preflight.checking_process import checking_process
from quartet.tokenizer_check import has_tokenizer, tokenizer_location

Report = Callable[[str], None]
"""Function that gets a line of progress every few seconds."""


def check_prompts(config: Config, report: Report) -> list[str]:
    """Check that every prompt can be tokenized and fits the models. Return lines that report the result.

    Without the tokenizer on this machine, only the files are read. Raises ConfigError for the first problem, and ServiceFailed if
    the process that tokenizes them dies.
    """
    files = {"data.prompts": PromptSettings.for_training(config)}
    if (validation := PromptSettings.for_validation(config)) is not None:
        files["data.validation"] = validation
    vocabulary_size = number_in(_description(config.actor.model), "vocab_size")
    summaries = _summaries(list(files.values()), vocabulary_size, report)
    notes = []
    for number, (key, settings) in enumerate(files.items()):
        if summaries is None:
            num_prompts, num_messages = _read(settings)
            extra = ["they are tokenized when the run starts: the tokenizer is not on this machine"]
        else:
            summary = summaries[number]
            num_prompts, num_messages, extra = summary.num_prompts, summary.num_messages, summary.notes
            _check_positions(key, summary.max_length, config)
        of_chats = f", {num_messages} of them messages" if num_messages else ""
        notes.append(f"{key} {settings.path}: {num_prompts} prompts{of_chats}")
        for note in extra:
            is_warning = note.startswith("warning: ")
            notes.append(f"{'warning: ' if is_warning else ''}{key}: {note.removeprefix('warning: ')}")
        if key == "data.prompts" and num_prompts < config.rollout.prompts_per_step:
            raise ConfigError(
                f"rollout.prompts_per_step {config.rollout.prompts_per_step}: data.prompts {settings.path} has only "
                f"{num_prompts} usable prompts; lower it, or give more prompts"
            )
    return notes


def count_prompts(config: Config) -> int:
    """Return the number of usable prompts of data.prompts; without the tokenizer on this machine, of all. Raises ConfigError."""
    settings = PromptSettings.for_training(config)
    summaries = _summaries([settings], number_in(_description(config.actor.model), "vocab_size"), lambda _: None)
    return summaries[0].num_prompts if summaries is not None else _read(settings)[0]


def _read(settings: PromptSettings) -> tuple[int, int]:
    """Return the numbers of prompts in a file, and of those that are messages. Raises DataError."""
    num_prompts = num_messages = 0
    for line in iterate_prompt_lines(settings.path):
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
    rows = [{**asdict(settings), "path": str(settings.path)} for settings in files]
    message = _run_worker({"files": rows, "vocabulary_size": vocabulary_size}, report)
    if "missing" in message:
        error = explain_missing_package(ModuleNotFoundError(message["error"], name=message["missing"]))
        raise ConfigError(f"data.prompts {files[0].path}: cannot be tokenized: {error}")
    if "error" in message:
        kinds = {"DataError": DataError, "ModelError": ModelError, "ServiceFailed": ServiceFailed}
        raise kinds.get(message["kind"], ConfigError)(message["error"])
    return [PromptSummary(**result) for result in message["results"]]


def _run_worker(request: dict[str, Any], report: Report) -> dict[str, Any]:
    """Return the last message of a ``quartet.prompt_worker``. Raises ServiceFailed if it has died."""
    message: dict[str, Any] = {}
    # The tokenizer is on this machine, so the check needs no network.
    offline = {"HF_HUB_OFFLINE": "1"}
    with checking_process("quartet.prompt_worker", json.dumps(request), environment=offline) as (pipe, process):
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
