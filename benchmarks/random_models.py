"""Models with the shape of Qwen2 0.5B and random weights, and prompts of random words, for the benchmarks on a GPU.

python -m benchmarks.random_models OUT writes OUT/policy, OUT/reward and OUT/prompts.jsonl, for configs/gpu. The speed does not
depend on the values of the weights. Responses almost never end with EOS, so every run does the same work. Every word is a token.
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
from quartet.config import load_config
from quartet.errors import ConfigError

VOCABULARY = 151_936
LAYERS = 24
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PROMPTS, WORDS = 1024, 128


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("random_models", __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=LAYERS)
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
        torch.manual_seed(0)
        model = getattr(transformers, kind).from_config(
            shape(options.layers, options.vocabulary), dtype=DTYPES[options.dtype]
        )
        model.save_pretrained(options.out / name)
        words.save_pretrained(options.out / name)
    lines = [json.dumps({"text": text}) + "\n" for text in prompts(options.vocabulary)]
    (options.out / "prompts.jsonl").write_text("".join(lines))
    print(
        f"{options.out}: policy and reward model with {model.num_parameters() / 1e6:.0f}M weights each, {PROMPTS} prompts"
    )
    return 0


def shape(layers: int = LAYERS, vocabulary: int = VOCABULARY) -> Any:
    """Return the config of Qwen2 0.5B with another number of layers."""
    return transformers.Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
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
