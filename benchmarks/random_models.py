"""Models with the shapes of published ones and random weights, and prompts of random words, for the benchmarks on a GPU.

python -m benchmarks.random_models OUT writes OUT/policy, OUT/reward and OUT/prompts.jsonl, for configs/gpu. The speed does not
depend on the values of the weights. Responses almost never end with EOS, so every run does the same work. Every word is a token.
`model_of` makes a policy in memory, on any device.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers

from benchmarks import machine
from benchmarks.options import parser_of
from quartet.config.loading import load_config
from quartet.errors import ConfigError

VOCABULARY = 151_936
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2-0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}
"""Sizes of published models. Those of 8B fit one GPU with all layers for decoding, and with a few for an update."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PROMPTS, WORDS = 1024, 128


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("random_models", __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2-0.5b")
    parser.add_argument("--layers", type=int, help="number of layers, by default that of the shape")
    parser.add_argument("--device", default="cpu", help="device that draws the weights, for example cuda:0")
    parser.add_argument("--policy-only", action="store_true", help="write no reward model")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of the written weights")
    parser.add_argument(
        "--for",
        dest="config",
        type=Path,
        help="require the GPU that this config needs",
    )
    options = parser.parse_args(arguments)
    try:
        if options.config:
            machine.device_of(load_config(options.config), options.config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    words = tokenizer(options.vocabulary)
    kinds = {"policy": "AutoModelForCausalLM", "reward": "AutoModelForSequenceClassification"}
    for name, kind in kinds.items():
        if name == "reward" and options.policy_only:
            continue
        model = model_of(
            options.shape, options.device, options.layers, options.vocabulary, DTYPES[options.dtype], kind=kind
        )
        model.save_pretrained(options.out / name)
        words.save_pretrained(options.out / name)
    lines = [json.dumps({"text": text}) + "\n" for text in prompts(options.vocabulary)]
    (options.out / "prompts.jsonl").write_text("".join(lines))
    print(
        f"{options.out}: policy{'' if options.policy_only else ' and reward model'} with {model.num_parameters() / 1e6:.0f}M "
        f"weights{'' if options.policy_only else ' each'}, {PROMPTS} prompts"
    )
    return 0


def model_of(
    name: str,
    device: str,
    layers: int | None = None,
    vocabulary: int = VOCABULARY,
    dtype: torch.dtype = torch.bfloat16,
    kind: str = "AutoModelForCausalLM",
) -> Any:
    """Return a model of a shape with random weights, in evaluation mode. ``layers``: see ``shape``."""
    torch.manual_seed(0)
    with torch.device(device):
        return getattr(transformers, kind).from_config(shape(name, layers, vocabulary), dtype=dtype).eval()


def shape(name: str, layers: int | None = None, vocabulary: int = VOCABULARY) -> Any:
    """Return the config of a shape, with its own number of ``layers`` if None."""
    sizes = SHAPES[name] if layers is None else {**SHAPES[name], "num_hidden_layers": layers}
    return transformers.AutoConfig.for_model(
        **sizes,
        vocab_size=vocabulary,
        max_position_embeddings=32_768,
        use_sliding_window=False,
        num_labels=1,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def tokenizer(vocabulary: int) -> Any:
    """Return a tokenizer of EOS, an unknown token, and the words w2, w3, ..."""
    words = {"</s>": 0, "<unk>": 1, **{f"w{index}": index for index in range(2, vocabulary)}}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def prompts(vocabulary: int) -> list[str]:
    """Return PROMPTS texts of WORDS words each."""
    numbers = np.random.default_rng(0).integers(2, vocabulary, (PROMPTS, WORDS))
    return [" ".join(f"w{number}" for number in row) for row in numbers]


if __name__ == "__main__":
    sys.exit(main())
