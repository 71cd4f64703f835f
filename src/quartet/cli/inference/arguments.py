"""The arguments of `quartet generate`. Its modules are imported when it runs, so that other commands start fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quartet.errors import ConfigError


def generate(
    model: Annotated[str, typer.Argument(help="Directory of a model, run or checkpoint, or Hugging Face hub id.")],
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT...", help="Prompts to complete.")] = None,
    file: Annotated[Path | None, typer.Option(help="File of prompts, instead of PROMPT.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of a completion in tokens.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature. 0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus sampling probability. 1 disables it.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from this many most likely tokens. 0 disables it.")] = 0,
    min_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Least probability, relative to the likeliest token. 0 disables it.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float,
        typer.Option(max=100.0, help="Divisor of the logits of tokens in prompt or completion. 1 disables it."),
    ] = 1.0,
    presence_penalty: Annotated[
        float,
        typer.Option(min=-2.0, max=2.0, help="Subtract it from logits of tokens in the completion. 0 disables it."),
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(min=-2.0, max=2.0, help="The same, for each time that a token occurs. 0 disables it.")
    ] = 0.0,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="Text that ends a completion, which keeps it. Repeatable, at most 16 of 64 characters."
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Number of completions per prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    device: Annotated[str, typer.Option(help="Device, such as cpu or cuda:0.")] = "cpu",
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object per completion.")] = False,
    continue_final_message: Annotated[
        bool,
        typer.Option(
            "--continue-final-message", help="Continue the last message of prompts that end with the assistant."
        ),
    ] = False,
    chat_template_kwargs: Annotated[
        str,
        typer.Option(
            metavar="JSON",
            help="Variables of the chat template, such as '{\"enable_thinking\": false}', over the run's.",
        ),
    ] = "",
    as_chat: Annotated[
        bool, typer.Option("--chat", help="Chat through the model's chat template: answer each line of standard input.")
    ] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message of --chat.")] = None,
) -> None:
    """Complete prompts with a model, or chat with it."""
    from quartet.cli.inference.generate import chat
    from quartet.cli.inference.generate import generate as run
    from quartet.config.rollout import check_stop_strings
    from quartet.contract.generation import Penalties, SamplingParameters

    if top_p == 0:
        raise ConfigError("--top-p 0: expected more than 0 and at most 1")
    if repetition_penalty <= 0:
        raise ConfigError(f"--repetition-penalty {repetition_penalty:g}: expected more than 0 and at most 100")
    try:
        check_stop_strings(stop or ())
    except ValueError as error:
        raise ConfigError(f"--stop {error}") from None
    sampling = SamplingParameters(
        max_tokens,
        temperature,
        top_p,
        top_k,
        min_p=min_p,
        stop_strings=tuple(stop or ()),
        penalties=Penalties.of(repetition_penalty, presence_penalty, frequency_penalty),
    )
    if as_chat:
        if prompts or file or samples > 1:
            raise ConfigError("--chat: reads messages from standard input; remove PROMPT, --file and --samples")
        chat(model, system, sampling, seed, device, json_lines, chat_template_kwargs)
        return
    if system is not None:
        raise ConfigError("--system: only used with --chat")
    run(
        model,
        prompts or [],
        file,
        sampling,
        samples,
        seed,
        device,
        json_lines,
        continue_final_message,
        chat_template_kwargs,
    )
