"""`quartet generate`: complete prompts with a model, in this process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import typer

from quartet.cli.inference.saved_policy import policy_in
from quartet.data import PromptEncoder, PromptLine, PromptSettings, encode_prompts, read_prompt_lines
from quartet.errors import ConfigError, InvalidRequest
from quartet.models.generation.torch_engine import TorchEngine
from quartet.models.weights.loading import load_causal_lm, stop_token_ids
from quartet.models.weights.tokenizer import load_tokenizer
from quartet.types import GenerationRequest, Prompt, SamplingParameters, Trajectory, TrajectoryId


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and its completion."""

    prompt: str
    text: str
    trajectory: Trajectory


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
    lines = read_prompt_lines(file) if file else [PromptLine(i, text) for i, text in enumerate(texts, 1)]
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


def complete(
    model: str,
    source: Path,
    lines: Sequence[PromptLine],
    sampling: SamplingParameters,
    samples: int = 1,
    seed: int = 0,
    device: str = "cpu",
    continue_final_message: bool = False,
) -> list[Completion]:
    """Return completions in the order of the prompts. Raises ModelError, DataError, InvalidRequest."""
    tokenizer = load_tokenizer(model)
    policy = load_causal_lm(model, "float32", device)
    stops = stop_token_ids(policy, tokenizer)
    vocabulary = int(policy.get_input_embeddings().weight.shape[0])
    settings = PromptSettings(source, model, np.iinfo(np.int32).max, continue_final_message=continue_final_message)
    prompts = encode_prompts(settings, lines, PromptEncoder.of(tokenizer, model), stops, vocabulary).prompts
    requests = [
        GenerationRequest(TrajectoryId("generate", 1, prompt.index, sample), prompt.token_ids)
        for prompt in prompts
        for sample in range(samples)
    ]
    engine = TorchEngine(policy, stops, max_concurrent_sequences=64)
    trajectories = {
        trajectory.id: trajectory for trajectory in engine.generate(requests, sampling, seed, 0, lambda: False)
    }
    by_index: dict[int, Prompt] = {prompt.index: prompt for prompt in prompts}
    return [
        Completion(
            prompt=by_index[request.id.prompt].text or tokenizer.decode(request.prompt_ids),
            text=tokenizer.decode(trajectories[request.id].response_ids, skip_special_tokens=True),
            trajectory=trajectories[request.id],
        )
        for request in requests
    ]
