"""``quartet.generate``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet.api.run import Run
from quartet.config.rollout import check_stop_strings
from quartet.contract.arrays import FloatArray, IntArray
from quartet.contract.generation import Penalties, SamplingParameters
from quartet.data.chat_template import TemplateInputs
from quartet.data.prompt_lines import prompt_of
from quartet.errors import ConfigError, InvalidRequest
from quartet.run_directory.selection import config_of_policy, policy_in
from quartet.system.missing_packages import explain_missing_package


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and its completion.

    ``token_ids`` int32 [response tokens], with the EOS or the stop string if there is one. ``log_probs`` float32 [response
    tokens]: nats, at the sampling temperature. ``finish_reason`` is "eos", also after a stop string, or "length".
    """

    prompt: str
    text: str
    token_ids: IntArray
    log_probs: FloatArray
    finish_reason: str


def generate(
    model: Run | str | os.PathLike[str],
    prompts: str | Sequence[str | Sequence[Mapping[str, Any]]],
    *,
    max_tokens: int = 64,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    stop_strings: Sequence[str] = (),
    samples: int = 1,
    seed: int = 0,
    device: str = "cpu",
    continue_final_message: bool = False,
    tools: Sequence[dict[str, Any]] | None = None,
    documents: Sequence[dict[str, Any]] | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[Completion]:
    """Complete prompts with a model in this process, in the order of the prompts, ``samples`` for each.

    ``model`` is a run, or the directory of a run, a checkpoint or a model, or a Hugging Face hub id. A prompt is a text, or a
    list of chat messages with ``role`` and ``content``. ``temperature`` 0 is greedy; ``top_p`` 1, ``top_k`` 0 and ``min_p`` 0
    sample from all tokens. The penalties are those of the config; 1, 0 and 0 disable them. The token that completes one of
    ``stop_strings`` is the last of a completion. The same seed gives the same completions. ``continue_final_message`` continues
    messages that end with the assistant's. The chat template gets ``tools``, ``documents`` and ``chat_template_kwargs``, each as
    in the config of the model's run if it is not given. Needs the extra quartet-rlhf[train].

    Raises ConfigError, ModelError and DataError for invalid input.
    """
    if isinstance(prompts, str):
        prompts = [prompts]
    if isinstance(prompts, Mapping) or not isinstance(prompts, Sequence):
        raise ConfigError(
            f"generate: prompts is of type {type(prompts).__name__}; expected a text or a list of prompts"
        )
    if isinstance(prompts[0] if prompts else None, Mapping):
        raise ConfigError("generate: prompts is a list of messages; for one prompt, give a list with that list in it")
    if not isinstance(model, Run | str | os.PathLike):
        raise ConfigError(f"generate: model is of type {type(model).__name__}; expected a run, a directory or a hub id")
    if type(samples) is not int or samples < 1 or not prompts:
        raise ConfigError("generate: expected at least one prompt and samples of at least 1")
    if isinstance(stop_strings, str) or not all(isinstance(each, str) for each in stop_strings):
        raise ConfigError(f"generate: stop_strings {stop_strings!r}: expected a list of texts")
    try:
        check_stop_strings(stop_strings)
    except ValueError as error:
        raise ConfigError(f"generate: stop_strings: {error}") from None
    try:
        from quartet.api.completions import complete
    except ModuleNotFoundError as error:
        raise explain_missing_package(error) from None
    lines = [prompt_of(prompt, f"generate: prompt {number}", number) for number, prompt in enumerate(prompts, 1)]
    directory = str(model.directory) if isinstance(model, Run) else os.fspath(model)
    given = {"tools": tools, "documents": documents, "chat_template_kwargs": chat_template_kwargs}
    try:
        inputs = TemplateInputs.of_row(given)
    except ValueError as error:
        raise ConfigError(f"generate: {error}") from None
    if (config := config_of_policy(directory)) is not None:
        inputs = inputs.over(TemplateInputs.of_config(config))
    sampling = SamplingParameters(
        max_tokens,
        temperature,
        top_p,
        top_k,
        min_p=min_p,
        stop_strings=tuple(stop_strings),
        penalties=Penalties.of(repetition_penalty, presence_penalty, frequency_penalty),
    )
    source = Path("<prompts>")
    try:
        completions = complete(
            policy_in(directory), source, lines, sampling, samples, seed, device, continue_final_message, inputs
        )
    except InvalidRequest as error:
        raise ConfigError(f"generate: {error}") from None
    return [
        Completion(
            item.prompt,
            item.text,
            item.trajectory.response_ids,
            item.trajectory.log_probs,
            str(item.trajectory.finish_reason),
        )
        for item in completions
    ]
