"""A tiny policy as weights, for engines that run as servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers

from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.trajectory import TrajectoryId
from quartet.engines.engine import Engine, EngineResponse, ServedModel
from quartet.weight_transfer.tensors import AdapterSettings, HostTensor, WeightSet, combined_digest, tensor_digest

VOCABULARY = 96
EOS = 32
POSITIONS = 2048
RANK = 4
ALPHA = 8
TARGETS = ("q_proj", "v_proj", "down_proj")


def policy(seed: int) -> Any:
    """Return a Llama with random weights. vLLM on a CPU needs heads of at least 32."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.3,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    model.eval()
    with torch.no_grad():
        # The stop token is likely, so that some responses end early.
        model.lm_head.weight[EOS] *= 1.5
    return model


def adapted(model: Any, seed: int) -> Any:
    """Return the model with a random LoRA adapter."""
    settings = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    result = peft.get_peft_model(model, settings).eval()
    change_adapter(result, seed)
    return result


def change_adapter(model: Any, seed: int) -> None:
    """Give the adapter other weights, as an update does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3, generator=generator)


def served(folder: Path) -> ServedModel:
    """Return the description of the checkpoint in ``folder``."""
    return ServedModel(str(folder), "float32", frozenset({EOS}), VOCABULARY, POSITIONS)


def weight_set(model: Any, version: int = 1) -> WeightSet:
    """Return the weights of a policy, with its adapter if it has one."""
    adapter = None
    if isinstance(model, peft.PeftModel):
        adapter = AdapterSettings(RANK, ALPHA, TARGETS)
        base = {
            name.replace(".base_layer.", "."): value
            for name, value in model.get_base_model().state_dict().items()
            if "lora_" not in name
        }
        state = base | peft.get_peft_model_state_dict(model)
    else:
        state = model.state_dict()
    tensors = {
        name: HostTensor("F32", tuple(value.shape), value.detach().numpy().copy().reshape(-1).view(np.uint8))
        for name, value in state.items()
    }
    return WeightSet(
        version, combined_digest({name: tensor_digest(tensor) for name, tensor in tensors.items()}), tensors, adapter
    )


def requests(count: int, first: int = 0, length: int = 0, step: int = 0) -> list[GenerationRequest]:
    """Return requests with random prompts, of several lengths or of ``length`` tokens."""
    generator = np.random.default_rng(0)
    prompts = [
        generator.integers(3, VOCABULARY, length or generator.integers(1, 40)).astype(np.int32)
        for _ in range(first + count)
    ]
    return [GenerationRequest(TrajectoryId("run", step, i, 0), prompts[i]) for i in range(first, first + count)]


def run(engine: Engine, batch: list[GenerationRequest], seed: int = 0, **sampling: Any) -> list[EngineResponse]:
    """Generate, and return the responses in the order of the requests."""
    parameters = SamplingParameters(**{"max_response_tokens": 12, "temperature": 0.8, **sampling})
    responses = {response.request.id: response for response in engine.generate(batch, parameters, seed, lambda: False)}
    return [responses[request.id] for request in batch]


def tokens(responses: list[EngineResponse]) -> list[list[int]]:
    """Return the token ids of each response."""
    return [list(response.token_ids) for response in responses]


def greedy(model: Any, batch: list[GenerationRequest], limit: int = 12) -> list[list[int]]:
    """Return the greedy responses, computed without cache and batching."""
    responses = []
    for request in batch:
        ids = request.prompt_ids.tolist()
        for _ in range(limit):
            with torch.no_grad():
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == EOS:
                break
        responses.append(ids[len(request.prompt_ids) :])
    return responses


def log_probs(model: Any, response: EngineResponse, temperature: float) -> np.ndarray:
    """Return the log-probs of a response's tokens over the whole distribution, float32 [tokens]."""
    prompt, ids = response.request.prompt_ids.tolist(), list(response.token_ids)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    chosen = torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(ids)[:, None])
    return chosen[:, 0].numpy()
