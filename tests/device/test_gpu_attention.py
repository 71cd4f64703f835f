"""Attention to packed rows on a GPU: which kernel, the same results as for separate sequences, and no sorting of indices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import structlog
import torch

from quartet.contract.trajectory import TokenBatch
from quartet.models.forward.batching import build_micro_batch
from quartet.models.forward.gpu_attention import Runs
from quartet.models.forward.log_probs import forward_log_probs
from quartet.models.forward.packing import Packing
from quartet.models.forward.scoring import response_log_probs
from quartet.models.generation.torch_engine import TorchEngine
from quartet.models.torch_settings import deterministic_update
from quartet.models.training.optimizer import create_optimizer
from quartet.models.training.updates import update_policy
from tests.device import flash_attention
from tests.device.conftest import on_gpu
from tests.device.pretended_gpu import STAND_INS, PretendedGpu, _values
from tests.unit.models import tiny
from tests.unit.models.updates import LOSS, experience, settings

GPU = torch.device("cuda", 0)
SHARED = [[0, 1, 2, 3, 4], [0, 1, 5, 6], [0, 1, 7], [0, 1], [8, 9, 10]]
"""Sequences with a common prompt, one of which has no other token."""


def shared_prompts() -> TokenBatch:
    """Return four samples of a prompt and two of another, of different lengths."""
    prompts, responses = np.array([6, 6, 6, 6, 3, 3], np.int32), np.array([9, 7, 4, 1, 8, 2], np.int32)
    generator = np.random.default_rng(0)
    first = [generator.integers(3, tiny.VOCABULARY, length) for length in (6, 3)]
    parts = [
        np.concatenate([first[int(row > 3)], generator.integers(3, tiny.VOCABULARY, length)])
        for row, length in enumerate(responses)
    ]
    return TokenBatch(np.concatenate(parts).astype(np.int32), prompts, responses)


def outputs_and_gradients(model: Any, batch: TokenBatch, device: Any) -> dict[str, torch.Tensor]:
    """Return the log-probs of the responses, and the gradients of all weights."""
    micro_batch = build_micro_batch(batch, range(len(batch)), device, packed=True)
    log_probs, _ = forward_log_probs(model, micro_batch, 1.0)
    (log_probs * torch.arange(len(log_probs), device=device)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    results = {"log-probs": log_probs.detach(), **gradients}
    return {name: _values(value).float() for name, value in results.items()}


def assert_close(results: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, value in expected.items():
        difference = (results[name] - value).abs().max() / value.abs().max()
        assert difference <= tolerance, (name, float(difference))


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_one_kernel_attends_to_all_sequences_in_half_precision(gpu: PretendedGpu, kind: str) -> None:
    model, batch = tiny.causal(kind).bfloat16(), shared_prompts()
    exact = outputs_and_gradients(tiny.causal(kind), batch, "cpu")
    result = outputs_and_gradients(on_gpu(model), batch, GPU)
    assert_close(result, exact, 0.1)
    # Those of a CPU in half precision are as far from the exact ones.
    assert_close(outputs_and_gradients(model, batch, "cpu"), exact, 0.1)
    assert gpu.attention_kernels["runs"] == 3  # Two layers, and the trial.
    assert not gpu.attention_kernels["math"]


@pytest.mark.parametrize(("kind", "static"), [("llama", True), ("qwen2", False)])
def test_no_attention_to_groups_of_heads_keeps_all_weights_in_float32(
    gpu: PretendedGpu, kind: str, static: bool
) -> None:
    model, batch = tiny.causal(kind), shared_prompts()
    there = on_gpu(model)
    assert_close(outputs_and_gradients(there, batch, GPU), outputs_and_gradients(model, batch, "cpu"), 1e-5)
    response_log_probs(there, batch, 1.0, 16)
    tiny.generated(TorchEngine(there, frozenset(), 4, static=static), tiny.requests(6))
    padded = build_micro_batch(batch, range(len(batch)), GPU, packed=False)
    forward_log_probs(there, padded, 1.0)
    assert gpu.attention_kernels["efficient"] > 0
    assert not gpu.attention_kernels["math"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_sorts_no_indices_in_its_layers(gpu: PretendedGpu, dtype: torch.dtype) -> None:
    counts = []
    for layers in (1, 3):
        model = tiny.causal("llama", num_hidden_layers=layers).to(dtype)
        data, there = experience(model), on_gpu(model)
        response_log_probs(there, data.batch, 1.0, 16)  # With the trials of the model and of the kernel.
        before = gpu.sorting_kernels
        with deterministic_update(GPU, "actor"):
            update_policy(there, create_optimizer(there, 0.01), data, settings(), LOSS, 16)
        counts.append(gpu.sorting_kernels - before)
    assert counts[0] == counts[1]


def test_the_gradients_of_an_update_are_summed_in_a_fixed_order(gpu: PretendedGpu) -> None:
    model = tiny.causal("llama").bfloat16()
    data, there = experience(model), on_gpu(model)
    response_log_probs(there, data.batch, 1.0, 16)  # With the trial of the kernel.
    trial = gpu.unordered_kernels
    with deterministic_update(GPU, "actor"):
        update_policy(there, create_optimizer(there, 0.01), data, settings(), LOSS, 16)
    assert gpu.unordered_kernels == trial
    update_policy(there, create_optimizer(there, 0.01), data, settings(), LOSS, 16)
    assert gpu.unordered_kernels > trial


@pytest.mark.parametrize("problem", ["raises", "differs"])
def test_a_kernel_that_does_not_work_here_is_not_used_and_the_log_says_why(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    def forward(query: torch.Tensor, *arguments: Any) -> flash_attention.Results:
        if problem == "raises":
            raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
        output, *others = flash_attention.forward(query, *arguments)
        return 1.2 * output, *others

    model, batch = tiny.causal("llama").bfloat16(), shared_prompts()
    monkeypatch.setitem(STAND_INS, flash_attention.FORWARD, forward)
    with structlog.testing.capture_logs() as lines:
        result = outputs_and_gradients(on_gpu(model), batch, GPU)
    assert_close(result, outputs_and_gradients(model, batch, "cpu"), 1e-6)
    assert len(lines) == 1
    assert ("Ampere" if problem == "raises" else "differ by 0.2") in lines[0]["reason"]


def test_a_lack_of_memory_in_the_trial_of_the_kernel_is_an_error(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(*_: Any) -> flash_attention.Results:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(STAND_INS, flash_attention.FORWARD, forward)
    with pytest.raises(torch.OutOfMemoryError):
        outputs_and_gradients(on_gpu(tiny.causal("llama").bfloat16()), shared_prompts(), GPU)


def test_runs_gather_and_pack_what_indices_do() -> None:
    sequences = [np.array(sequence) for sequence in SHARED]
    packing = Packing.of(sequences, "cpu")
    longest = [longest for rows, longest in packing.blocks for _ in range(rows)]
    runs = Runs.of(sequences, longest, "cpu")
    row = torch.arange(1.0, 12.0)[:, None].requires_grad_()
    padded = runs.gather(row, runs.padded)
    is_pad = padded == 0
    assert torch.equal(padded.where(~is_pad, 0), row.index_select(0, packing.sources).where(~is_pad, 0))
    assert torch.equal(runs.pack(padded), row)
    assert [bounds.tolist() for bounds in runs.bounds] == [[0, 5, 7, 8, 11], [0, 5, 9, 12, 15]]
    assert runs.longest == (5, 5)
    padded.sum().backward()
    assert row.grad is not None
    assert row.grad.squeeze().tolist() == [4, 4] + [1] * 9


def test_the_gradients_of_a_shared_prompt_are_added_in_float32() -> None:
    sequences = [np.array([0, index + 1]) for index in range(16)]
    runs = Runs.of(sequences, [2] * 16, "cpu")
    row = torch.ones(17, 1, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.tensor([1 + index / 128 for index in range(16)], dtype=torch.bfloat16).repeat_interleave(2)
    (runs.gather(row, runs.keys).squeeze() * weights).sum().backward()
    assert row.grad is not None
    assert float(row.grad[0]) == float(torch.tensor(16 + 120 / 128).bfloat16())


def test_a_row_of_separate_sequences_of_one_length_is_not_copied() -> None:
    runs = Runs.of([np.arange(4), np.arange(4, 8)], [4, 4], "cpu")
    row = torch.ones(8, 2, 3)
    assert runs.gather(row, runs.padded) is row
    assert runs.pack(row) is row
