"""The tested architectures: tiny configs of those that work, and the configs of those that are refused."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from quartet.model_files.model_support import not_causal_reason
from tests.unit.models import tiny

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth", "encoder_layers", "decoder_layers"), 2
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "num_heads",
            "n_heads",
            "attention_heads",
            "encoder_attention_heads",
            "decoder_attention_heads",
        ),
        4,
    ),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "context_length"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("initializer_range", "init_std"), 0.15),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "block_size"), 4),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("index_head_dim", "indexer_head_dim"), 16),
    "mamba_n_heads": 4,
    "index_n_heads": 16,  # Fewer would often all give 0, and equal indices make the choice of tokens arbitrary.
    **dict.fromkeys(("index_topk", "sliding_window", "attention_window_size"), 4),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "vocab_size": tiny.VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": tiny.EOS,
    "pad_token_id": tiny.EOS,
}
"""Sizes by the names that configs of transformers use. Each config takes those that it has."""

_SHARED_HEADS = {"num_key_value_heads": 4}
_DELTA = {
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
}
_LAYERS_OF_BOTH_KINDS = {"num_hidden_layers": 4, "layer_types": 2 * ["linear_attention", "full_attention"]}
_INKLING = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 4,
    "d_rel": 4,
    "num_hidden_layers": 2,
    "rel_extent": 8,
    "layer_types": ["hybrid", "hybrid_sliding"],
}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
_OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            *("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "gemma3_text", "kolibri1", "laguna"),
            *("mellum", "ministral", "olmo3"),
        ),
        _WINDOWS,
    ),
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 4},
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "axk1": _SHARED_HEADS,
    "axk2": _SHARED_HEADS,
    "bailing_hybrid": {**_SHARED_HEADS, **_LAYERS_OF_BOTH_KINDS},
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 3, "mamba_n_heads": 4, "mamba_d_state": 8},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {
        **_WINDOWS,
        "rope_parameters": {
            name: {"rope_type": "default", "rope_theta": 10000.0} for name in ("full_attention", "sliding_attention")
        },
    },
    "got_ocr2_vision": {
        "output_channels": 8,
        "image_size": 32,
        "patch_size": 16,
        "global_attn_indexes": [1],
        "mlp_dim": 16,
    },
    "emu3_vqgan": {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "attn_resolutions": []},
    "llama4_vision_model": dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 32),
    "emu3": {"vocabulary_map": {"<image>": 60}},
    "ctrl": {"dff": 48},
    "dbrx": {
        "attn_config": {"clip_qkv": 8, "rope_theta": 10000.0, "kv_n_heads": 2},
        "ffn_config": {"ffn_hidden_size": 24, "hidden_size": 32},
    },
    "dots3_note_text": {
        **_SHARED_HEADS,
        **{
            f"swa_{name}": value
            for name, value in {
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "q_lora_rank": 16,
                "kv_lora_rank": 16,
                "head_dim": 16,
                "qk_nope_head_dim": 8,
                "v_head_dim": 8,
            }.items()
        },
        "shared_experts_intermediate_size": 24,
        "num_hidden_layers": 3,
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
    },
    "dots3_note_vision_encoder": {
        "per_layer_config": {},
        "mlp_layer_types": ["dense", "dense"],
        "adapter_in_dim": 32,
        "adapter_out_dim": 32,
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "minimax_m3_vl_text": {
        "shared_intermediate_size": 24,
        "dense_intermediate_size": 48,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
        "index_n_heads": 2,
        "index_block_size": 2,
        "index_topk_blocks": 2,
    },
    "phi4_multimodal_audio": {
        "nemo_conv_channels": 16,
        "ext_pw_out_channel": 16,
        "depthwise_separable_out_channel": 16,
        "num_blocks": 1,
    },
    "deepseek_v2": _SHARED_HEADS,
    "deepseek_v3": _SHARED_HEADS,
    "deepseek_v32": _SHARED_HEADS,
    "deepseek_v4": {
        "num_hidden_layers": 4,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "o_groups": 2,
        "o_lora_rank": 8,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "layer_types": [
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "sliding_attention",
            "compressed_sparse_attention",
        ],
    },
    "dots1": {**_SHARED_HEADS, "n_shared_experts": 1},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_ssm": 64, "mamba_d_state": 8},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": 2 * ["sliding_attention", "full_attention"],
        "sliding_window": 5,
        "num_kv_shared_layers": 2,
        "pad_token_id": 0,
        "vocab_size_per_layer_input": 61,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
    },
    "gemma4_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 8},
    "gemma3": {"mm_tokens_per_image": 1, "image_token_index": 60, "boi_token_index": 58, "eoi_token_index": 59},
    "siglip_vision_model": {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14},
    "inkling_text": {**_INKLING, "mlp_layer_types": ["dense", "sparse"]},
    "inkling2_text": {**_INKLING, "swa_num_key_value_heads": 4},
    "glm4_moe_lite": _SHARED_HEADS,
    "glm_moe_dsa": {**_SHARED_HEADS, "indexer_types": ["full", "shared"]},
    "hy_v4": {"indexer_types": ["full", "shared"]},
    "flint": {**_WINDOWS, "mlp_only_layers": [0]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 24,
        "mamba_n_heads": 4,
        "mamba_d_state": 8,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "longcat_flash": {
        **_SHARED_HEADS,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 24,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**_SHARED_HEADS, **_LAYERS_OF_BOTH_KINDS, "linear_head_dim": 8, "linear_num_heads": 4},
    "lfm3": {"num_hidden_layers": 3, "layer_types": ["conv", "sliding_attention", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32},
    "qwen4_exp_text": {
        **_LAYERS_OF_BOTH_KINDS,
        "layer_types": 2 * ["linear_attention", "indexed_attention"],
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_budget": 4,
        "indexer_head_dim": 16,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 8,
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 32,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 2,
        "split_ngram_parts": 2,
        **{n: v for n, v in _DELTA.items() if n.startswith("linear_")},
    },
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 24,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "mlp", "moe"],
    },
    "minimax": {"num_hidden_layers": 2},
    "minicpm3": _SHARED_HEADS,
    "mistral": {"sliding_window": 5},
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
    "youtu": _SHARED_HEADS,
    "xlstm": {"hidden_size": 128},
    "zamba": {"layers_block_type": 2 * ["linear_attention", "hybrid"], "num_hidden_layers": 4},
    "zamba2": {"layers_block_type": 2 * ["mamba", "hybrid"], "num_hidden_layers": 4},
    "zaya": {
        "num_experts_per_tok": 1,
        "router_hidden_size": 16,
        "sliding_window": 4,
        "layer_types": ["hybrid", "hybrid_sliding"],
    },
}
NOT_TESTED = {
    "gemma3n": "its vision tower needs the package timm; `gemma3n_text` is its text model",
}
"""Types of causal language models without a tiny model, each with the reason."""


_STEP = "transformers raises a time step of Mamba to `time_step_min` in whole sequences, and not while it decodes"
_DELTA_RULE = "float32 rounds the delta rule differently token by token and in chunks of tokens"
TOLERANCES = {
    "nemotron_h": (1e-4, _STEP),
    "zamba2": (1e-4, _STEP),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"), (5e-5, _DELTA_RULE)),
}
"""Largest difference for types that differ more than ``comparison.TOLERANCE``, with the reason."""


def default_config(kind: str) -> dict[str, Any]:
    """Return the config.json of a model of this type with the default sizes."""
    try:
        config = transformers.AutoConfig.for_model(kind).to_dict()
    except StrictDataclassError:  # The defaults of a few types do not fit each other.
        config = {"model_type": kind}
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, f"{kind.title().replace('_', '')}ForConditionalGeneration")
    return {**config, "architectures": [names] if isinstance(names, str) else list(names)}


REFUSED = (
    *(kind for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if not_causal_reason({"model_type": kind})),
    *("t5", "florence2"),
)
"""Model types that are refused as a policy."""

WORKING = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - {*REFUSED, *NOT_TESTED}))
"""Model types that work."""


def tiny_config(kind: str, **changes: Any) -> Any:
    """Return the config of a tiny model of this type."""
    default = transformers.AutoConfig.for_model(kind)
    return transformers.AutoConfig.for_model(kind, **{**_sizes(default), **changes})


def _sizes(default: Any) -> dict[str, Any]:
    """Return the sizes of a tiny model by the names of this config and of the configs in it."""
    known = default.to_dict().keys() | default.attribute_map.keys()
    # Two names of one setting must not both be given.
    twice = {name for name, other in default.attribute_map.items() if other in _SIZES}
    # Without a window by default, no layer has one.
    without = {name for name in ("sliding_window",) if getattr(default, name, None) is None}
    sizes = {name: value for name, value in _SIZES.items() if name in known - twice - without}
    for name in default.sub_configs:
        if (part := getattr(default, name, None)) is not None:
            sizes[name] = {"model_type": part.model_type, **_sizes(part)}
    return {**sizes, **_OWN.get(default.model_type, {})}


def auto_class(kind: str) -> Any:
    """Return the class of transformers that loads a checkpoint as it is published: multimodal types with their towers."""
    is_multimodal = kind in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    return transformers.AutoModelForMultimodalLM if is_multimodal else transformers.AutoModelForCausalLM


def causal_lm(kind: str, **changes: Any) -> Any:
    """Return a tiny causal LM with random weights, in evaluation mode."""
    torch.manual_seed(0)
    return auto_class(kind).from_config(tiny_config(kind, **changes)).eval()


def classifier(kind: str) -> Any | None:
    """Return a tiny classifier with one output and random weights, or None if the type has no decoder classifier."""
    if kind not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES or kind == "gemma3":
        return None
    torch.manual_seed(1)
    model = transformers.AutoModelForSequenceClassification.from_config(tiny_config(kind, num_labels=1)).eval()
    return model if isinstance(getattr(model, "score", None), torch.nn.Linear) else None
