"""Completions of prompts by a model that is loaded into this process. Needs the extra quartet-rlhf[train]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.trajectory import Prompt, Trajectory, TrajectoryId
from quartet.data.chat_template import NO_INPUTS, TemplateInputs
from quartet.data.prompt_encoding import PromptEncoder, encode_prompts
from quartet.data.prompt_lines import PromptLine
from quartet.data.prompt_settings import PromptSettings
from quartet.engines.stop_strings import token_decoder
from quartet.models.generation.torch_engine import TorchEngine
from quartet.models.weights.loading import load_causal_lm, stop_token_ids
from quartet.models.weights.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and its completion."""

    prompt: str
    text: str
    trajectory: Trajectory


def complete(
    model: str,
    source: Path,
    lines: Sequence[PromptLine],
    sampling: SamplingParameters,
    samples: int = 1,
    seed: int = 0,
    device: str = "cpu",
    continue_final_message: bool = False,
    inputs: TemplateInputs = NO_INPUTS,
) -> list[Completion]:
    """Return completions in the order of the prompts. ``inputs`` are what the chat template gets, unless a prompt has others.

    Raises ModelError, DataError, InvalidRequest.
    """
    tokenizer = load_tokenizer(model)
    policy = load_causal_lm(model, "float32", device)
    stops = stop_token_ids(policy, tokenizer)
    vocabulary = int(policy.get_input_embeddings().weight.shape[0])
    settings = PromptSettings(
        source, model, np.iinfo(np.int32).max, continue_final_message=continue_final_message, inputs=inputs
    )
    prompts = encode_prompts(settings, lines, PromptEncoder.of(tokenizer, model), stops, vocabulary).prompts
    requests = [
        GenerationRequest(TrajectoryId("generate", 1, prompt.index, sample), prompt.token_ids)
        for prompt in prompts
        for sample in range(samples)
    ]
    engine = TorchEngine(policy, stops, max_concurrent_sequences=64, decode=token_decoder(tokenizer))
    trajectories = {trajectory.id: trajectory for trajectory in engine.trajectories(requests, sampling, seed)}
    by_index: dict[int, Prompt] = {prompt.index: prompt for prompt in prompts}
    return [
        Completion(
            prompt=by_index[request.id.prompt].text or tokenizer.decode(request.prompt_ids),
            text=tokenizer.decode(trajectories[request.id].response_ids, skip_special_tokens=True),
            trajectory=trajectories[request.id],
        )
        for request in requests
    ]
