"""Tiny checkpoints and prompts for both sides: seeded Llamas as policy, reference, reward and value model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers

VOCABULARY = 256
PAD, EOS = 0, 1
MAX_PROMPT = 9
_CHANNEL = 4.0


@dataclass(frozen=True, slots=True)
class ScenarioModels:
    """Four checkpoint directories of one vocabulary, each with the tokenizer, and the prompts as token ids."""

    policy: Path
    reference: Path
    reward: Path
    critic: Path
    prompts: list[list[int]]

    def texts(self) -> list[str]:
        """Return the prompts as text. The tokenizer encodes each to the same ids again."""
        return [" ".join(f"t{token}" for token in prompt) for prompt in self.prompts]


def make_scenario_models(directory: Path, prompts: int, eos_logit: float, seed: int) -> ScenarioModels:
    """Write the checkpoints. ``eos_logit`` is added to the logit of EOS, and so controls the lengths of the responses.

    The probability of the pad token is close to 0, because Quartet and TRL recognise padding in different ways.
    """
    tokenizer = make_tokenizer()
    policy = _causal_lm(seed, eos_logit)
    reference = _with_noise(policy, seed + 1, 0.06)
    reward, critic = (_classifier(seed + offset) for offset in (2, 3))
    models = ScenarioModels(
        *(directory / name for name in ("policy", "reference", "reward", "critic")), _prompts(prompts, seed)
    )
    for path, model in zip(
        (models.policy, models.reference, models.reward, models.critic),
        (policy, reference, reward, critic),
        strict=True,
    ):
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    return models


def make_tokenizer() -> Any:
    """Return a tokenizer of the words t2, t3... with the ids 2, 3..., which pads on the left."""
    words = {"<pad>": PAD, "<eos>": EOS} | {f"t{token}": token for token in range(2, VOCABULARY)}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token=None))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )


def _prompts(count: int, seed: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(2, MAX_PROMPT, count)
    return [generator.integers(2, VOCABULARY, length).tolist() for length in lengths]


def _config(**changes: Any) -> Any:
    return transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
        **changes,
    )


def _causal_lm(seed: int, eos_logit: float) -> Any:
    """Return a Llama whose hidden states are constant in channel 0, so that column 0 of the head is a bias per token."""
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(_config())
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = _CHANNEL
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        model.lm_head.weight[:, 0] = 0
        model.lm_head.weight[[PAD, EOS]] = 0
        model.lm_head.weight[PAD, 0], model.lm_head.weight[EOS, 0] = -30, eos_logit
    return model


def _classifier(seed: int) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForSequenceClassification(_config(num_labels=1))


def _with_noise(model: Any, seed: int, scale: float) -> Any:
    """Return a copy with noise on every weight, so that the KL to it is not 0."""
    generator = torch.Generator().manual_seed(seed)
    other = transformers.LlamaForCausalLM(model.config)
    with torch.no_grad():
        for parameter, original in zip(other.parameters(), model.parameters(), strict=True):
            noise = torch.randn(original.shape, generator=generator)
            parameter.copy_(original * (1 + scale * noise))
    return other
