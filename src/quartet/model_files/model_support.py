"""The rule for models that Quartet cannot use, by their config.json. Does not import torch or transformers.

The checks before a run and the loader share it. docs/reference/architectures.md lists the tested architectures.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

TABLE = "the page Tested architectures of the documentation"

_DEFAULT = "Qwen/Qwen3-1.7B (qwen3)"

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
    **dict.fromkeys(
        (
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
        ),
        ("is_decoder", True),
    ),
    **dict.fromkeys(("cpmant", "xlm", "xlnet")),
}
"""Model types whose tokens attend to later tokens, with the setting in config.json that makes them causal, if there is one."""

_DRAFTER = "a drafter, which reads the hidden states, keys and values of the model that it drafts for; give that model"
_INCOMPLETE = {
    "blt": (
        "transformers cannot generate with it: DynamicCache reads num_hidden_layers, which BltConfig lacks; give another causal "
        f"language model, such as {_DEFAULT}"
    ),
    "gemma4_assistant": _DRAFTER,
    "gemma4_unified_assistant": _DRAFTER,
    "reformer": (
        "transformers computes its gradients only in training mode, with dropout (ReformerLayer.backward_pass), and Quartet "
        f"trains without; give another causal language model, such as {_DEFAULT}"
    ),
}
"""Model types of which transformers lacks a part that Quartet needs, each with the reason and what to do."""

_LIMITS: dict[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth"), 1000),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 100_000),
    **dict.fromkeys(("num_experts_per_tok", "index_topk", "chunk_size", "mamba_chunk_size"), 2**20),
}
_MAY_BE_ZERO = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok"}
"""Largest numbers of modules, and of tokens of a choice or chunk, in a config.json; dense models may name 0 experts."""

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
    if kind is not None and not (isinstance(kind, str) and kind):
        return (
            f"config.json has model_type {kind!r}; expected the name of a type that transformers has, see {TABLE}: correct "
            "config.json"
        )
    if (reason := _size_reason(config)) is not None:
        return reason
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


def _size_reason(config: dict[str, Any]) -> str | None:
    """Return which number in a config.json no model has, or None. transformers would build that many modules."""
    for section in (config, config.get("text_config")):
        for name, value in section.items() if isinstance(section, dict) else ():
            limit = _LIMITS.get(name)
            if limit is None or not isinstance(value, int) or isinstance(value, bool):
                continue
            if not (name in _MAY_BE_ZERO and value == 0) and not 1 <= value <= limit:
                return f"config.json has {name} {value}; expected 1 to {limit:,}: correct config.json"
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
    if kind in _INCOMPLETE:
        return _INCOMPLETE[kind]
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
    setting = _ENCODERS.get(kind, ("model_type", kind))
    if not kind:
        return None  # The loader says that it is missing.
    if setting is not None and config.get(setting[0]) == setting[1]:
        return None
    without = f" without {setting[0]}: {json.dumps(setting[1])}" if setting else ""
    return f"an encoder ({kind}{without}), whose tokens attend to later tokens; give a causal language model, such as {_DEFAULT}"


def causal_names() -> frozenset[str]:
    """Return the architectures and types of causal language models in transformers. Empty without transformers.

    Those that read images or audio, too, are among them.
    """
    tables = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
    return frozenset().union(*(_names_in("modeling_auto.py", f"MODEL_FOR_{name}_MAPPING_NAMES") for name in tables))


def classifier_names() -> frozenset[str]:
    """Return the architectures and types of sequence classifiers in transformers. Empty without transformers."""
    return _names_in("modeling_auto.py", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES")


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
