"""The tested architectures: tiny configs of those that work, and the configs of those that are refused."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from tests.unit.models import tiny

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("initializer_range", "init_std"), 0.15),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "vocab_size": tiny.VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": tiny.EOS,
    "pad_token_id": tiny.EOS,
}
"""Sizes by the names that configs of transformers use. Each config takes those that it has."""

_SHARED_HEADS = {"num_key_value_heads": 4}
_OWN: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 4},
    "deepseek_v2": _SHARED_HEADS,
    "deepseek_v3": _SHARED_HEADS,
    "dots1": {**_SHARED_HEADS, "n_shared_experts": 1},
    "gemma4_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 8},
    "glm4_moe_lite": _SHARED_HEADS,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": ["attention", "attention"], "shared_intermediate_size": 24, "mamba_n_heads": 4},
    "minicpm3": _SHARED_HEADS,
    "mistral": {"sliding_window": 5},
    "youtu": _SHARED_HEADS,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_TOKENS_OF_IMAGES = {"image_token_index": 60, "boi_token_index": 58, "eoi_token_index": 59}

WORKING = (
    *("llama", "mistral", "mixtral", "ministral3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("gemma", "gemma2", "gemma3_text", "gemma3", "gemma4_text", "vaultgemma", "phi", "phi3", "phimoe"),
    *(
        "gpt2",
        "gpt-sw3",
        "gpt_bigcode",
        "gpt_neo",
        "gpt_neox",
        "gpt_neox_japanese",
        "gptj",
        "gpt_oss",
        "codegen",
        "opt",
    ),
    *("bloom", "falcon", "mpt", "stablelm", "starcoder2", "persimmon", "biogpt", "xglm", "ctrl"),
    *("olmo", "olmo2", "olmo3", "olmoe", "flex_olmo", "cohere", "cohere2", "cohere2_moe"),
    *(
        "granite",
        "granitemoe",
        "granitemoeshared",
        "granitemoehybrid",
        "deepseek_v2",
        "deepseek_v3",
        "minicpm3",
        "youtu",
    ),
    *("glm", "glm4", "glm4_moe", "glm4_moe_lite", "dots1", "nemotron", "smollm3", "llama4_text", "arcee", "afmoe"),
    *("apertus", "bitnet", "ernie4_5", "ernie4_5_moe", "exaone4", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe"),
    *(
        "jetmoe",
        "minimax_m2",
        "mimo_v2_flash",
        "modernbert-decoder",
        "nanochat",
        "seed_oss",
        "solar_open",
        "diffllama",
        "doge",
    ),
)
"""Model types that work, in the order of the table."""

REFUSED = (
    *(
        "mamba",
        "mamba2",
        "falcon_mamba",
        "rwkv",
        "xlstm",
        "jamba",
        "bamba",
        "zamba",
        "zamba2",
        "recurrent_gemma",
        "gemma3n_text",
    ),
    *("falcon_h1", "nemotron_h", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe", "minimax"),
    *("olmo_hybrid", "kimi_linear", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "openai-gpt", "xlnet", "xlm"),
    *("t5", "bart", "pegasus", "whisper", "bert", "roberta", "florence2"),
)
"""Model types that are refused as a policy."""


def tiny_config(kind: str, **changes: Any) -> Any:
    """Return the config of a tiny model of this type."""
    if kind == "gemma3":
        return transformers.Gemma3Config(
            text_config=tiny_config("gemma3_text").to_dict(),
            vision_config=_VISION,
            mm_tokens_per_image=1,
            **_TOKENS_OF_IMAGES,
            **changes,
        )
    default = transformers.AutoConfig.for_model(kind)
    known = default.to_dict().keys() | default.attribute_map.keys()
    # Two names of one setting must not both be given.
    twice = {name for name, other in default.attribute_map.items() if other in _SIZES}
    sizes = {name: value for name, value in _SIZES.items() if name in known - twice}
    return transformers.AutoConfig.for_model(kind, **{**sizes, **_OWN.get(kind, {}), **changes})


def causal_lm(kind: str) -> Any:
    """Return a tiny causal LM with random weights, in evaluation mode."""
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(tiny_config(kind)).eval()


def classifier(kind: str) -> Any | None:
    """Return a tiny classifier with one output and random weights, or None if the type has no decoder classifier."""
    if kind not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES or kind == "gemma3":
        return None
    torch.manual_seed(1)
    model = transformers.AutoModelForSequenceClassification.from_config(tiny_config(kind, num_labels=1)).eval()
    return model if isinstance(getattr(model, "score", None), torch.nn.Linear) else None


def default_config(kind: str) -> dict[str, Any]:
    """Return the config.json of a model of this type with the default sizes."""
    own = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2} if kind == "lfm2" else {}
    config: dict[str, Any] = transformers.AutoConfig.for_model(kind, **own).to_dict()
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, f"{kind.title().replace('_', '')}ForConditionalGeneration")
    return {**config, "architectures": [name]}
