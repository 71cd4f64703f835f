"""Tiny models with random weights, built from configs. They have the code of real models and are small enough for every test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers

from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.trajectory import TokenBatch, Trajectory, TrajectoryId

VOCABULARY = 61
EOS = 1
KINDS = ("llama", "gpt2", "gpt_neox", "qwen2")
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss")
"""Mixture-of-experts models. Their experts are parameters with three dimensions."""


def config(kind: str, **changes: Any) -> Any:
    """Return a config with two layers, hidden size 32 and four heads. The pad id is the EOS id, as in many checkpoints."""
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "bos_token_id": 0,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "max_position_embeddings": 64,
        "initializer_range": 0.25,
    }
    own = {
        "llama": {"intermediate_size": 48, "num_key_value_heads": 2, "attention_dropout": 0.5},
        "qwen2": {"intermediate_size": 48, "num_key_value_heads": 2, "tie_word_embeddings": True},
        "qwen3": {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8},
        "phi3": {"intermediate_size": 48, "num_key_value_heads": 2},
        "phi": {"intermediate_size": 48, "partial_rotary_factor": 0.5, "qk_layernorm": True},
        "mistral": {"intermediate_size": 48, "num_key_value_heads": 2, "sliding_window": 5},
        "gpt_neox": {"intermediate_size": 48, "hidden_dropout": 0.5},
        "gpt2": {"n_inner": 48},
        "bloom": {},
        "bert": {"intermediate_size": 48},
        "mixtral": {"intermediate_size": 24, "num_key_value_heads": 2, "num_local_experts": 4},
        "qwen2_moe": {
            "intermediate_size": 48,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "num_key_value_heads": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        "qwen3_moe": {
            "intermediate_size": 48,
            "moe_intermediate_size": 24,
            "head_dim": 8,
            "num_key_value_heads": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        "gpt_oss": {
            "intermediate_size": 24,
            "head_dim": 8,
            "num_key_value_heads": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        "qwen3_5_text": {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 48,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        "olmo_hybrid": {
            "layer_types": ["linear_attention", "full_attention"],
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        "lfm2": {
            "layer_types": ["conv", "full_attention"],
            "num_key_value_heads": 2,
            "intermediate_size": 48,
        },
        # With fewer heads of the index, more of its scores would be equal.
        "deepseek_v32": {
            "intermediate_size": 48,
            "moe_intermediate_size": 24,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "index_topk": 16,
            "index_n_heads": 32,
            "index_head_dim": 16,
        },
        "falcon_h1": {
            "intermediate_size": 48,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 16,
        },
        "recurrent_gemma": {
            "intermediate_size": 48,
            "head_dim": 8,
            "lru_width": 32,
            "block_types": ["recurrent", "attention"],
        },
        "mamba": {"state_size": 8},
        "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "state_size": 8, "n_groups": 2, "chunk_size": 8},
        "zamba2": {
            "layers_block_type": ["mamba", "hybrid", "hybrid"],
            "num_hidden_layers": 3,
            "num_mem_blocks": 1,
            "adapter_rank": 4,
            "intermediate_size": 48,
            "mamba_d_state": 8,
            "mamba_ngroups": 2,
            "n_mamba_heads": 4,
            "mamba_expand": 2,
            "chunk_size": 8,
            "initializer_range": 0.1,
        },
        "rwkv": {"num_hidden_layers": 2, "rescale_every": 1},
        "minimax": {
            "layer_types": ["linear_attention", "full_attention"],
            "num_key_value_heads": 2,
            "intermediate_size": 24,
            "num_local_experts": 4,
        },
    }[kind]
    return transformers.AutoConfig.for_model(kind, **{**common, **own, **changes})


def causal(kind: str, seed: int = 0, **changes: Any) -> Any:
    """Return a causal LM in fp32, in evaluation mode."""
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config(kind, **changes)).eval()


def classifier(kind: str, seed: int = 0, **changes: Any) -> Any:
    """Return a sequence classifier with one output, in evaluation mode."""
    torch.manual_seed(seed)
    changes = {"num_labels": 1, **changes}
    return transformers.AutoModelForSequenceClassification.from_config(config(kind, **changes)).eval()


def saved(model: Any, directory: Path) -> Path:
    """Save the model to ``directory`` and return the directory."""
    model.save_pretrained(directory)
    return directory


def tokenizer(eos: str = "w1") -> Any:
    """Return a word-level tokenizer with the words w0, w1, ..."""
    words = {f"w{index}": index for index in range(VOCABULARY)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w2"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos, unk_token="w2")


def batch(prompts: list[int], responses: list[int], seed: int = 0) -> TokenBatch:
    """Return a batch of random tokens with these lengths."""
    generator = np.random.default_rng(seed)
    return TokenBatch(
        token_ids=generator.integers(0, VOCABULARY, sum(prompts) + sum(responses)).astype(np.int32),
        prompt_lengths=np.array(prompts, np.int32),
        response_lengths=np.array(responses, np.int32),
    )


def routed(batch: TokenBatch, layers: int = 2, experts: int = 4, top_k: int = 2, seed: int = 3) -> TokenBatch:
    """Return the batch with random experts: different ones for each token, and at most by accident those of a router."""
    order = np.random.default_rng(seed).random((len(batch.token_ids) - len(batch), layers, experts)).argsort(-1)
    return replace(batch, routed_experts=order[..., :top_k].astype(np.uint8))


def requests(count: int, step: int = 0, seed: int = 0, lengths: tuple[int, int] = (1, 12)) -> list[GenerationRequest]:
    """Return requests with random prompts of different lengths."""
    generator = np.random.default_rng(seed)
    return [
        GenerationRequest(
            TrajectoryId("run", step, index, 0),
            generator.integers(2, VOCABULARY, generator.integers(*lengths)).astype(np.int32),
        )
        for index in range(count)
    ]


def generated(engine: Any, requests_: list[GenerationRequest], seed: int = 0, **sampling: Any) -> list[Trajectory]:
    """Return the generated trajectories, ordered by id."""
    parameters = SamplingParameters(**{"max_response_tokens": 12, **sampling})
    result: list[Trajectory] = engine.trajectories(requests_, parameters, seed)
    return result
