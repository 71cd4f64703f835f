"""`quartet generate`: complete prompts with a model, or chat with it, in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import typer

from quartet.api.completions import complete
from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.trajectory import TrajectoryId
from quartet.data.chat_template import Message, TemplateInputs
from quartet.data.prompt_encoding import PromptEncoder, encode_prompts
from quartet.data.prompt_lines import prompt_of, read_prompt_lines
from quartet.data.prompt_settings import PromptSettings
from quartet.engines.stop_strings import token_decoder
from quartet.errors import ConfigError, DataError, InvalidRequest
from quartet.models.generation.torch_engine import TorchEngine
from quartet.models.weights.loading import load_causal_lm, stop_token_ids
from quartet.models.weights.tokenizer import load_tokenizer
from quartet.run_directory.selection import config_of_policy, policy_in


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
    if chat_template_kwargs and all(line.messages is None for line in lines):
        typer.echo("note: --chat-template-kwargs is not used: it is for messages, and all prompts are text", err=True)
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


RESET = "/reset"
"""Line that begins a new conversation."""
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def chat(
    model: str,
    system: str | None,
    sampling: SamplingParameters,
    seed: int,
    device: str,
    json_lines: bool = False,
    chat_template_kwargs: str = "",
) -> None:
    """Answer each line of standard input, with the conversation so far as context, until it ends.

    In a terminal it asks for messages, and prints tokens as they are sampled. Raises ConfigError for an invalid model or a
    tokenizer without a chat template, and DataError if a message is not valid text or the template refuses the messages.
    """
    path = policy_in(model)
    tokenizer = load_tokenizer(path)
    encoder = PromptEncoder.of(tokenizer, path)
    if encoder.render is None:
        raise ConfigError(
            f"generate --chat: the tokenizer of {path} has no chat template; complete text with quartet generate {model} "
            "PROMPT, or add a template to the tokenizer (chat_template.jinja)"
        )
    inputs = template_inputs(model, chat_template_kwargs)
    conversation = _Conversation(path, encoder, tokenizer, sampling, seed, device, inputs)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        typer.echo(f"{RESET} begins a new conversation, Ctrl-D ends", err=True)
    conversation.reset(system)
    for line in _lines(interactive):
        if line == RESET:
            conversation.reset(system)
            continue
        pieces = []
        try:
            for piece in conversation.answer(line):
                pieces.append(piece)
                if not json_lines:
                    typer.secho(piece, fg="green", nl=False)
        except InvalidRequest as error:
            typer.echo(f"error: {error}; {RESET} begins a new conversation", err=True)
            continue
        typer.echo(
            json.dumps({"prompt": line, "completion": "".join(pieces)}, ensure_ascii=False) if json_lines else ""
        )


def _lines(interactive: bool) -> Iterator[str]:
    """Yield the messages of the user that are not empty, until the input ends."""
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            if interactive:
                typer.echo()
            return
        except UnicodeDecodeError:
            raise DataError("generate --chat: standard input is not UTF-8; give text in UTF-8") from None
        if line:
            yield line


class _Conversation:
    """A model and the messages so far."""

    def __init__(
        self,
        model: str,
        encoder: PromptEncoder,
        tokenizer: Any,
        sampling: SamplingParameters,
        seed: int,
        device: str,
        inputs: TemplateInputs,
    ) -> None:
        self._encoder, self._tokenizer, self._sampling, self._seed = encoder, tokenizer, sampling, seed
        self._inputs = inputs
        policy = load_causal_lm(model, "float32", device)
        self._vocabulary = int(policy.get_input_embeddings().weight.shape[0])
        self._stops = stop_token_ids(policy, tokenizer)
        self._engine = TorchEngine(policy, self._stops, max_concurrent_sequences=1, decode=token_decoder(tokenizer))
        self._messages: list[Message] = []
        self._turns = 0

    def reset(self, system: str | None) -> None:
        """Begin a new conversation."""
        self._messages = [{"role": "system", "content": system}] if system else []

    def answer(self, text: str) -> Iterator[str]:
        """Yield the response to a message of the user in pieces, as it is sampled, and remember both.

        Raises InvalidRequest, with the message forgotten, if the conversation is too long for the model.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        self._turns += 1
        settings = PromptSettings(Path("<chat>"), self._encoder.model, np.iinfo(np.int32).max, inputs=self._inputs)
        line = prompt_of(messages, "generate --chat", self._turns)
        [prompt] = encode_prompts(settings, [line], self._encoder, self._stops, self._vocabulary).prompts
        request = GenerationRequest(TrajectoryId("chat", 1, self._turns, 0), prompt.token_ids)
        ids: list[int] = []
        shown = ""
        for token in self._engine.stream(request, self._sampling, self._seed):
            ids.append(token)
            decoded = self._tokenizer.decode(ids, skip_special_tokens=True)
            # A character may take several tokens.
            if not decoded.endswith(_INCOMPLETE):
                yield decoded[len(shown) :]
                shown = decoded
        response = self._tokenizer.decode(ids, skip_special_tokens=True)
        yield response[len(shown) :]
        self._messages = [*messages, {"role": "assistant", "content": response}]
