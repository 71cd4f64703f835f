"""Tiny multimodal models with random weights: a language model with towers for images or audio."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.unit.models import tiny

_TEXT: dict[str, Any] = {
    "vocab_size": tiny.VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,
    "bos_token_id": 0,
    "eos_token_id": tiny.EOS,
    "pad_token_id": tiny.EOS,
}
_TOKENS = {"image_token_index": 60, "boi_token_index": 58, "eoi_token_index": 59}
_QWEN_TOKENS = {"image_token_id": 60, "video_token_id": 59, "vision_start_token_id": 58, "vision_end_token_id": 57}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_PATCHES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4} | {
    "out_hidden_size": 32
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**_TEXT, "sliding_window": 4},
        "vision_config": _TOWER,
        "mm_tokens_per_image": 1,
        **_TOKENS,
    },
    "qwen2_5_vl": {
        "text_config": {**_TEXT, "rope_parameters": _SECTIONS},
        "vision_config": {**_PATCHES, "fullatt_block_indexes": [0]},
        **_QWEN_TOKENS,
    },
    "qwen3_vl": {
        "text_config": {**_TEXT, "rope_parameters": {**_SECTIONS, "mrope_interleaved": True}},
        "vision_config": {**_PATCHES, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        "tie_word_embeddings": True,
        **_QWEN_TOKENS,
    },
    "qwen3_5": {
        "text_config": {
            **_TEXT,
            "num_hidden_layers": 4,
            "layer_types": [*["linear_attention"] * 3, "full_attention"],
            **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "rope_parameters": {**_SECTIONS, "partial_rotary_factor": 1.0, "mrope_interleaved": True},
        },
        "vision_config": {**_PATCHES, "num_position_embeddings": 16},
        **_QWEN_TOKENS,
    },
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral", "sliding_window": None},
        "vision_config": {**_TOWER, "model_type": "pixtral", "head_dim": 8},
        "spatial_merge_size": 1,
        **_TOKENS,
    },
    "llama4": {
        "text_config": {
            **_TEXT,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "attention_chunk_size": 32,
            "moe_layers": [1],
        },
        "vision_config": {
            **_TOWER,
            **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 16),
            "pixel_shuffle_ratio": 0.5,
        },
        **_TOKENS,
    },
    "qwen2_audio": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "audio_config": {
            "d_model": 16,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 16,
            "max_source_positions": 8,
            "num_mel_bins": 8,
        },
        "audio_token_index": 60,
    },
}
KINDS = tuple(_CONFIGS)


def config(kind: str) -> Any:
    """Return the config of a multimodal model."""
    return transformers.AutoConfig.for_model(kind, **_CONFIGS[kind])


def model(kind: str, seed: int = 0) -> Any:
    """Return a multimodal model in fp32, in evaluation mode."""
    torch.manual_seed(seed)
    return transformers.AutoModelForMultimodalLM.from_config(config(kind)).eval()
