"""Mixtures of experts in vLLM: their weights arrive whole, and the experts of tokens are reported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quartet.weight_transfer.tensors import WeightSet, combined_digest
from tests.detached_engines.test_contract import log_probs, requests, run
from tests.detached_engines.tiny_checkpoint import expected_digests, weight_set
from tests.detached_engines.triton_interpreter import environment

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: make engines", allow_module_level=True)

from tests.detached_engines.vllm_engine import BreakableVLLM, vllm_engine

LAYERS, EXPERTS, TOP_K, VOCABULARY = 3, 8, 2, 96


def save_mixture(folder: Path, seed: int) -> Any:
    """Save a Qwen3-MoE with random weights, and return it."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def plain(model: Any, prompt: Any, response: Any) -> tuple[list[float], np.ndarray[Any, Any]]:
    """Return the log-probs of a response, and the experts of all tokens but the last one, by transformers."""
    import torch

    chosen: list[Any] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _module, _inputs, output: chosen.append(output[2]))
        for layer in model.model.layers
    ]
    ids = torch.tensor(np.concatenate([prompt, response]).astype(np.int64))
    with torch.no_grad():
        every = model(input_ids=ids[None, :-1]).logits[0].log_softmax(-1)[len(prompt) - 1 :]
    for hook in hooks:
        hook.remove()
    return every.gather(1, ids[len(prompt) :, None])[:, 0].tolist(), torch.stack(chosen, 1).numpy()


def versions(folder: Path, seed: int) -> tuple[Any, WeightSet]:
    from safetensors.numpy import load_file

    model = save_mixture(folder / str(seed), seed)
    return model, weight_set(load_file(folder / str(seed) / "model.safetensors"), version=seed)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BreakableVLLM, Path]]:
    folder = tmp_path_factory.mktemp("mixture")
    save_mixture(folder / "1", 1)
    engine = vllm_engine(folder / "1", vocabulary_size=VOCABULARY)
    yield engine, folder
    engine.close()


def test_each_version_of_the_experts_arrives_whole_and_is_computed_with(mixture: tuple[BreakableVLLM, Path]) -> None:
    """On a CPU vLLM packs experts for its kernel once, and would compute later versions as if they were packed."""
    engine, folder = mixture
    for seed in (1, 2, 3):
        model, weights = versions(folder, seed)
        assert engine.load_weights(weights, weights.tensors.keys()) == expected_digests(weights)
        for response in run(engine, requests(4), temperature=1.0):
            expected, _ = plain(model, response.request.prompt_ids, response.token_ids)
            assert np.allclose(log_probs(response), expected, atol=1e-3)


def test_a_bit_that_changes_in_an_expert_changes_its_digest(mixture: tuple[BreakableVLLM, Path]) -> None:
    engine, folder = mixture
    _, weights = versions(folder, 1)
    engine.load_weights(weights, weights.tensors.keys())
    engine.flip("model.layers.1.mlp.experts.routed_experts", "w13_weight")
    digests = engine.held_digests(weights.tensors.keys())
    changed = {name for name, digest in expected_digests(weights).items() if digests[name] != digest}
    assert len(changed) == 1
    assert "model.layers.1.mlp.experts." in changed.pop()
    assert combined_digest(digests) != weights.digest


def test_the_experts_of_every_token_are_those_of_transformers(tmp_path: Path) -> None:
    model, file = save_mixture(tmp_path / "model", 1), tmp_path / "responses.npz"
    module = "tests.detached_engines.expert_generation"
    subprocess.run(
        [sys.executable, "-m", module, str(tmp_path / "model"), "float32", "6", "12", str(file)],
        env={**os.environ, **environment(tmp_path / "triton")},
        check=True,
        timeout=600,
    )
    found = np.load(file)
    for index in range(6):
        prompt, response = found[f"prompt-{index}"], found[f"response-{index}"]
        expected, chosen = plain(model, prompt, response)
        assert np.allclose(found[f"log_probs-{index}"], expected, atol=1e-3)
        experts = found[f"experts-{index}"]
        assert experts.dtype == np.uint8
        assert experts.shape == (len(prompt) + len(response) - 1, LAYERS, TOP_K)
        # Rounding may give the experts of a token in another order.
        assert np.array_equal(np.sort(experts, -1), np.sort(chosen, -1))
