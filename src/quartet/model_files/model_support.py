"""The rule for models that Quartet cannot use, by their config.json. Does not import torch or transformers.

The checks before a run and the loader share it. docs/reference/architectures.md lists the tested architectures.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

TABLE = "the page Tested architectures of the documentation"

_STATE_LAYERS = {
    "mamba",
    "mamba2",
    "conv",
    "recurrent",
    "linear_attention",
    "hybrid",
    "hybrid_sliding",
    "indexed_attention",
    "deepseek_sparse_attention",
    "qwen_sparse_attention",
    "heavily_compressed_attention",
    "compressed_sparse_attention",
}
"""Values of layer_types whose layers keep more or other state than keys and values per token."""

_DEFAULT = "Qwen/Qwen3-1.7B (qwen3)"
_ALTERNATIVES = {
    "mamba": "EleutherAI/pythia-1.4b (gpt_neox)",
    "mamba2": "EleutherAI/pythia-1.4b (gpt_neox)",
    "rwkv": "EleutherAI/pythia-1.4b (gpt_neox)",
    "falcon_mamba": "tiiuae/Falcon3-7B-Base (llama)",
    "falcon_h1": "tiiuae/Falcon3-1B-Instruct (llama)",
    "bamba": "ibm-granite/granite-3.3-8b-instruct (granite)",
    "granitemoehybrid": "ibm-granite/granite-3.3-2b-instruct (granite)",
    "jamba": "mistralai/Mistral-7B-v0.3 (mistral)",
    "zamba": "mistralai/Mistral-7B-v0.3 (mistral)",
    "zamba2": "HuggingFaceTB/SmolLM3-3B (smollm3)",
    "recurrent_gemma": "google/gemma-2-2b (gemma2)",
    "nemotron_h": "nvidia/Nemotron-Mini-4B-Instruct (nemotron)",
    "qwen3_next": "Qwen/Qwen3-30B-A3B (qwen3_moe)",
    "qwen3_5": "Qwen/Qwen3-4B (qwen3)",
    "qwen3_5_text": "Qwen/Qwen3-4B (qwen3)",
    "qwen3_5_moe": "Qwen/Qwen3-30B-A3B (qwen3_moe)",
    "qwen3_5_moe_text": "Qwen/Qwen3-30B-A3B (qwen3_moe)",
    "lfm2": _DEFAULT,
    "lfm2_moe": "Qwen/Qwen3-30B-A3B (qwen3_moe)",
    "minimax": "MiniMaxAI/MiniMax-M2 (minimax_m2)",
    "olmo_hybrid": "allenai/OLMo-2-1124-7B (olmo2)",
    "kimi_linear": "deepseek-ai/DeepSeek-V2-Lite (deepseek_v2)",
    "bailing_hybrid": "deepseek-ai/DeepSeek-V2-Lite (deepseek_v2)",
    "deepseek_v32": "deepseek-ai/DeepSeek-V2-Lite (deepseek_v2)",
    "deepseek_v4": "deepseek-ai/DeepSeek-V2-Lite (deepseek_v2)",
    "glm_moe_dsa": "zai-org/GLM-4.5-Air (glm4_moe)",
    "xlstm": _DEFAULT,
    "axk2": _DEFAULT,
    "dots3_note": _DEFAULT,
    "dots3_note_text": _DEFAULT,
    "hy_v4": _DEFAULT,
    "inkling_text": _DEFAULT,
    "inkling2_text": _DEFAULT,
    "lfm3": _DEFAULT,
    "qwen4_exp": _DEFAULT,
    "qwen4_exp_text": _DEFAULT,
    "zaya": _DEFAULT,
}
"""Model types whose layers keep other state than keys and values per token, each with a transformer of its family or size. A
config.json with layer_types decides by these instead."""

_UNCACHED = {"openai-gpt", "reformer", "xlm", "xlnet", "cpmant"}
"""Model types whose generation has no cache of keys and values, or one with other contents."""

_DECODERS_OF_PAIRS = {
    "bart",
    "bigbird_pegasus",
    "blenderbot",
    "blenderbot-small",
    "marian",
    "mbart",
    "moshi",
    "musicgen",
    "musicgen_melody",
    "mvp",
    "pegasus",
    "plbart",
    "prophetnet",
    "trocr",
    "whisper",
}
"""Model types that are the decoder of an encoder-decoder model, even when loaded as a causal language model."""

_ENCODERS = {
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
}
"""Model types that are encoders unless their config.json says is_decoder."""

_MODALITIES = {"vision_config": "images", "audio_config": "audio", "speech_config": "audio", "video_config": "video"}


def unreadable_reason(config: dict[str, Any]) -> str | None:
    """Return why no service can load a model with this config.json and what to do, or None."""
    if config.get("quantization_config"):
        method = config["quantization_config"]
        name = method.get("quant_method", "unknown") if isinstance(method, dict) else method
        return (
            f"quantised weights (quantization_config: {name}), which cannot be trained; give the checkpoint in bfloat16 or "
            "float32 that it was made from, or dequantize it with transformers and save it with save_pretrained"
        )
    kind, known = config.get("model_type"), _names_in("auto_mappings.py", "CONFIG_MAPPING_NAMES")
    if isinstance(kind, str) and known and kind not in known and kind != "gpt-sw3":
        if config.get("auto_map"):
            return (
                f"model type {kind} needs Python code from its repository (auto_map), and Quartet never runs code of a "
                f"checkpoint; give a model of a type that transformers has, see {TABLE}"
            )
        return (
            f"model type {kind} is unknown to the installed transformers; give a model of a type that it has, see {TABLE}, or "
            "correct model_type in config.json"
        )
    return None


def not_causal_reason(config: dict[str, Any]) -> str | None:
    """Return why a model with this config.json cannot be a policy, reference or causal critic and what to do, or None."""
    kind = str(config.get("model_type", ""))
    if config.get("is_encoder_decoder") or kind in _DECODERS_OF_PAIRS:
        return (
            "an encoder-decoder model, whose prompts go to a separate encoder; Quartet trains models that read prompt and "
            f"response as one sequence: give a causal language model, such as {_DEFAULT}"
        )
    if (reason := encoder_reason(config)) is not None:
        return reason
    names = config.get("architectures")
    known = causal_names()
    if not isinstance(names, list) or not names or not known or any(name in known for name in names):
        return None
    extras = sorted({what for key, what in _MODALITIES.items() if config.get(key)})
    if extras:
        return (
            f"{', '.join(map(str, names))} reads {' and '.join(extras)}, too, and is in none of transformers' tables of models "
            f"that generate text; give a causal language model, such as {_DEFAULT}"
        )
    return None


def encoder_reason(config: dict[str, Any]) -> str | None:
    """Return why a model with this config.json cannot have a value per token and what to do, or None."""
    kind = str(config.get("model_type", ""))
    if kind not in _ENCODERS or config.get("is_decoder"):
        return None
    return (
        f"an encoder ({kind} without is_decoder: true), whose tokens attend to later tokens; give a causal language model, "
        f"such as {_DEFAULT}"
    )


def causal_names() -> frozenset[str]:
    """Return the architectures and types of causal language models in transformers. Empty without transformers.

    Those that read images or audio, too, are among them.
    """
    tables = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
    return frozenset().union(*(_names_in("modeling_auto.py", f"MODEL_FOR_{name}_MAPPING_NAMES") for name in tables))


def classifier_names() -> frozenset[str]:
    """Return the architectures and types of sequence classifiers in transformers. Empty without transformers."""
    return _names_in("modeling_auto.py", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES")


def uncacheable_reason(config: dict[str, Any]) -> str | None:
    """Return why the torch engine cannot generate with a model with this config.json and what to do, or None."""
    text = config.get("text_config")
    kinds = [config, text] if isinstance(text, dict) else [config]
    for part in kinds:
        kind, layers = str(part.get("model_type", "")), part.get("layer_types")
        if isinstance(layers, list) and layers:
            other = sorted(set(map(str, layers)) & _STATE_LAYERS)
        else:
            other = [kind] if kind in _ALTERNATIVES else []
        if other:
            return (
                f"its layers ({', '.join(other)}) keep other state than keys and values per token, so prompts of different "
                "lengths cannot be generated in one batch; give a transformer instead, such as "
                f"{_ALTERNATIVES.get(kind, _DEFAULT)}, or see {TABLE}"
            )
        if part.get("num_kv_shared_layers"):
            return (
                f"some of its layers use the keys and values of others (num_kv_shared_layers: {part['num_kv_shared_layers']}), "
                f"which generation does not support; give another model, such as google/gemma-3-4b-it (gemma3), or see {TABLE}"
            )
        if kind in _UNCACHED:
            return f"{kind} generates without a cache of keys and values; give a newer model, such as {_DEFAULT}, or see {TABLE}"
    return None


def positions_in(config: dict[str, Any]) -> int | None:
    """Return the number of positions that a config.json states, or None. Older model types call it n_positions."""
    return number_in(config, "max_position_embeddings") or number_in(config, "n_positions")


def number_in(config: dict[str, Any], name: str) -> int | None:
    """Return a positive whole number in a config.json or in its section on the text model, or None."""
    text = config.get("text_config")
    value = config.get(name, text.get(name) if isinstance(text, dict) else None)
    return value if isinstance(value, int) and value > 0 else None


@functools.cache
def _names_in(file: str, table: str) -> frozenset[str]:
    """Return every quoted name in a table of transformers' auto classes, read from its source. Empty if there is none.

    An import of transformers would take seconds.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return frozenset()
    try:
        source = (Path(spec.origin).parent / "models" / "auto" / file).read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    match = re.search(rf"^{table} = OrderedDict\(\n(.*?)^\)", source, re.MULTILINE | re.DOTALL)
    return frozenset(re.findall(r'"([^"]+)"', match[1])) if match else frozenset()
