"""`quartet generate`: complete prompts with a model, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from quartet.completions import complete
from quartet.data import prompt_of, read_prompt_lines
from quartet.errors import ConfigError, InvalidRequest
from quartet.run_directory.saved_policy import policy_in
from quartet.types import SamplingParameters


def generate(
    model: str,
    texts: list[str],
    file: Path | None,
    sampling: SamplingParameters,
    samples: int,
    seed: int,
    device: str,
    json_lines: bool,
    continue_final_message: bool = False,
) -> None:
    """Print completions. Raises ConfigError for an invalid model or invalid prompts."""
    if bool(texts) == (file is not None):
        raise ConfigError("generate: expected either prompts as arguments or a file by --file")
    source = file or Path("<arguments>")
    lines = (
        read_prompt_lines(file)
        if file
        else [prompt_of(text, f"generate: prompt {number}", number) for number, text in enumerate(texts, 1)]
    )
    try:
        completions = complete(policy_in(model), source, lines, sampling, samples, seed, device, continue_final_message)
    except InvalidRequest as error:
        raise ConfigError(f"generate: {error}") from None
    for item in completions:
        if json_lines:
            record: dict[str, Any] = {
                "prompt": item.prompt,
                "completion": item.text,
                "tokens": len(item.trajectory.response_ids),
                "finish_reason": item.trajectory.finish_reason,
            }
            typer.echo(json.dumps(record, ensure_ascii=False))
        else:
            typer.echo(f"{item.prompt}{typer.style(item.text, fg='green')}")
    if all(line.messages is None for line in lines) and not any(item.text for item in completions):
        typer.echo("note: all responses are empty; a model that was trained on messages answers with --chat", err=True)
