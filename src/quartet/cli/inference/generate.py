"""`quartet generate`: complete prompts with a model, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from quartet.api.completions import complete
from quartet.contract.generation import SamplingParameters
from quartet.data.chat_template import TemplateInputs
from quartet.data.prompt_lines import prompt_of, read_prompt_lines
from quartet.errors import ConfigError, InvalidRequest
from quartet.run_directory.saved_policy import config_of_policy, policy_in


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
    chat_template_kwargs: str = "",
) -> None:
    """Print completions. ``chat_template_kwargs`` is JSON. Raises ConfigError for an invalid model or invalid prompts."""
    if bool(texts) == (file is not None):
        raise ConfigError("generate: expected either prompts as arguments or a file by --file")
    source = file or Path("<arguments>")
    lines = (
        read_prompt_lines(file)
        if file
        else [prompt_of(text, f"generate: prompt {number}", number) for number, text in enumerate(texts, 1)]
    )
    inputs = template_inputs(model, chat_template_kwargs)
    try:
        completions = complete(
            policy_in(model), source, lines, sampling, samples, seed, device, continue_final_message, inputs
        )
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


def template_inputs(model: str, chat_template_kwargs: str) -> TemplateInputs:
    """Return what the chat template gets: as in the run of the policy, with variables that replace those of the run.

    Raises ConfigError.
    """
    try:
        given = TemplateInputs.of_row({"chat_template_kwargs": chat_template_kwargs})
    except ValueError as error:
        raise ConfigError(f"--chat-template-kwargs {str(error).partition(': ')[2]}") from None
    config = config_of_policy(model)
    return given if config is None else given.over(TemplateInputs.of_config(config))
