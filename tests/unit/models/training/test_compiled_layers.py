"""Compiled layers: the updates of other passes up to rounding, few compilations, and no effect after their context."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.config.models import LoraConfig
from quartet.contract.update import ValueLossSettings
from quartet.errors import ConfigError
from quartet.models.forward import onednn_linear
from quartet.models.forward.log_probs import forward_log_probs
from quartet.models.forward.packing import supports_packing
from quartet.models.forward.scoring import response_log_probs
from quartet.models.training import compiled_layers as module
from quartet.models.training.activation_checkpointing import activation_checkpointing, transformer_layers
from quartet.models.training.compiled_layers import compiled_layers, try_compiled
from quartet.models.training.optimizer import create_optimizer
from quartet.models.training.update_memory import trial_batch
from quartet.models.training.updates import update_policy, update_value
from quartet.models.value_head import ValueModel
from quartet.models.weights.lora import add_adapter
from tests.unit.models import tiny, updates

TOLERANCE = 2e-5
"""Largest difference of a float32 weight to that of an update without compilation. Steps are of 1e-3, see ``rank.WEIGHTS``."""
KINDS = ("llama", "qwen2", "gpt2", "gpt_neox", "mistral")
NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="the compiled code of a CPU needs a C++ compiler"
)
Graphs = list[torch.fx.GraphModule]
Result = tuple[dict[str, float], list[torch.Tensor]]


def capture_only(backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch capture layers and give them to ``backend`` instead of a compiler."""
    torch._dynamo.reset()
    monkeypatch.setattr(module, "COMPILER", {"backend": backend})
    # It flushes the caches of the processor at every capture, to log a time.
    monkeypatch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """The captured parts of layers, in the order of their compilation. They are computed by torch, without a C++ compiler."""
    compiled: Graphs = []

    def compile_nothing(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    capture_only(compile_nothing, monkeypatch)
    return compiled


def update(model: Any, on: bool, recomputes: bool = False, max_tokens: int = 20) -> Result:
    """Return metrics and weights after an update with several mini-batches, and micro-batches of ``max_tokens``."""
    learned = copy.deepcopy(model)
    supports_packing(learned)  # A service tries this before it compiles the layers.
    optimizer = create_optimizer(learned, 1e-3, eps=1e-5)
    settings = updates.settings(learning_rate=1e-3)
    data = updates.experience(None if isinstance(learned, ValueModel) else learned)
    with activation_checkpointing(learned, recomputes), compiled_layers(learned, on):
        if isinstance(learned, ValueModel):
            metrics = update_value(learned, optimizer, data, settings, ValueLossSettings(), max_tokens)
        else:
            metrics = update_policy(learned, optimizer, data, settings, updates.LOSS, max_tokens)
    return metrics, [parameter.detach() for parameter in learned.parameters()]


def compare(result: Result, expected: Result) -> None:
    metrics, weights = result
    assert metrics == pytest.approx(expected[0], rel=1e-3, abs=1e-6)
    for value, other in zip(weights, expected[1], strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=TOLERANCE)


def model_of(kind: str, trained: str = "policy", lora: bool = False, num_hidden_layers: int = 2) -> Any:
    policy = tiny.causal(kind, seed=1, num_hidden_layers=num_hidden_layers)
    model = policy if trained == "policy" else ValueModel.of_causal_lm(policy)
    if lora:
        add_adapter(policy if trained == "policy" else policy.base_model, "base", LoraConfig(rank=2, alpha=4.0))
    return model


def test_an_update_with_captured_layers_computes_the_same(graphs: Graphs) -> None:
    model = model_of("gpt2")
    compare(update(model, True, max_tokens=80), update(model, False, max_tokens=80))
    assert graphs


def test_an_update_of_an_adapter_and_of_values_with_layers_that_are_recomputed_computes_the_same(
    graphs: Graphs,
) -> None:
    """torch captures nothing of a layer that it recomputes."""
    model = model_of("llama", "value", lora=True, num_hidden_layers=1)
    compare(update(model, True, recomputes=True, max_tokens=80), update(model, False, max_tokens=80))


@pytest.mark.slow
def test_layers_share_the_code_of_few_compilations_over_many_shapes_and_do_not_use_onednn(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn_linear, "is_needed", lambda: True)
    monkeypatch.setattr(onednn_linear, "_onednn", lambda *_: pytest.fail("oneDNN computes a linear layer"))
    model = tiny.causal("llama", num_hidden_layers=4)
    supports_packing(model)

    def passes(lengths: list[int]) -> None:
        batch = trial_batch(model, lengths)
        with torch.no_grad():
            forward_log_probs(model, batch, 1.0)
        forward_log_probs(model, batch, 1.0)[0].sum().backward()

    with compiled_layers(model), onednn_linear.onednn_linear():
        try_compiled(model, lambda batch: forward_log_probs(model, batch, 1.0)[0], "actor")
    assert 0 < len(graphs) <= 20
    graphs.clear()
    for number in range(12):
        with compiled_layers(model):
            passes([2 + number, *range(3, 3 + number % 7)])
    assert not graphs
    supports_packing(other := tiny.causal("llama", seed=3, num_hidden_layers=4))
    with compiled_layers(other):
        forward_log_probs(other, trial_batch(other, [4, 5]), 1.0)
    assert not graphs, "a restored model uses the code of the one before"


def test_scoring_outside_the_context_is_bit_identical_and_uses_no_compiled_code(graphs: Graphs) -> None:
    model = tiny.causal("llama", num_hidden_layers=1)
    data = updates.experience(model)
    expected = response_log_probs(model, data.batch, 0.8, 80)

    def fail() -> None:
        with compiled_layers(model):
            response_log_probs(model, data.batch, 0.8, 80)
            raise RuntimeError("loss")

    with pytest.raises(RuntimeError, match="loss"):
        fail()
    assert graphs
    graphs.clear()
    torch._dynamo.reset()
    assert (response_log_probs(model, data.batch, 0.8, 80) == expected).all()
    assert not graphs
    assert not any("forward" in vars(layer) for layer in transformer_layers(model))


def test_a_layer_that_cannot_be_compiled_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("No working C++ compiler\nmore")

    capture_only(refuse, monkeypatch)
    supports_packing(model := tiny.causal("llama"))
    message = r"^critic\.compile: torch.compile fails on cpu for .* LlamaForCausalLM: .*No working C\+\+ compiler; install a C"
    with pytest.raises(ConfigError, match=message), compiled_layers(model):
        try_compiled(model, lambda batch: forward_log_probs(model, batch, 1.0)[0], "critic")


def test_an_error_that_is_not_of_the_compiler_is_raised_by_a_trial(graphs: Graphs) -> None:
    def fail(_: Any) -> Any:
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match=r"^Connection closed"):
        try_compiled(tiny.causal("llama"), fail, "actor")


def test_layers_are_not_compiled_without_the_switch(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(module.CACHE_VARIABLE, raising=False)
    update(tiny.causal("llama"), False)
    assert not graphs
    assert module.CACHE_VARIABLE not in os.environ


def test_the_compiler_uses_a_directory_of_the_user(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(module.CACHE_VARIABLE, "/tmp/known")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for _ in range(2):
        with compiled_layers(tiny.causal("llama")):
            folder = Path(os.environ[module.CACHE_VARIABLE])
            assert (folder.parent, folder.stat().st_mode & 0o777) == (tmp_path, 0o700)
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="not a directory that only this user"), compiled_layers(tiny.causal("llama")):
        pass
    folder.rmdir()
    (tmp_path / "other").mkdir()
    folder.symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match="not a directory that only this user"), compiled_layers(tiny.causal("llama")):
        pass


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_with_compiled_layers_agrees_and_repeats_to_the_bit(kind: str) -> None:
    torch._dynamo.reset()
    model = model_of(kind)
    first, second = update(model, True), update(model, True)
    assert first[0] == second[0]
    assert all(map(torch.equal, first[1], second[1]))
    compare(first, update(model, False))


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("trained", ["policy", "value"])
def test_compiled_layers_can_be_recomputed_and_have_adapters(trained: str, lora: bool) -> None:
    torch._dynamo.reset()
    model = model_of("llama", trained, lora)
    expected = update(model, False)
    compare(update(model, True, recomputes=True), expected)
    compare(update(model, True, recomputes=False), expected)


@pytest.mark.slow
def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    program = """
from quartet.models.forward.log_probs import forward_log_probs
from quartet.models.training.compiled_layers import compiled_layers, try_compiled
from tests.unit.models import tiny
model = tiny.causal("llama")
with compiled_layers(model):
    try_compiled(model, lambda batch: forward_log_probs(model, batch, 1.0)[0], "actor")
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "CXX": "/missing/compiler", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "ConfigError: actor.compile: torch.compile fails on cpu" in result.stderr
    assert "/missing/compiler" in result.stderr.splitlines()[-1]
