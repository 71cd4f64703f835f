"""Linear layers with oneDNN, compared with those of torch: the same outputs, gradients and updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from quartet.contract.update import ValueLossSettings
from quartet.model_files import memory
from quartet.models.forward import onednn_linear as module
from quartet.models.forward.onednn_linear import is_needed, linear, onednn_linear
from quartet.models.forward.scoring import response_log_probs, response_values, sequence_scores
from quartet.models.generation.torch_engine import TorchEngine
from quartet.models.torch_settings import torch_threads
from quartet.models.training.activation_checkpointing import activation_checkpointing
from quartet.models.training.optimizer import create_optimizer
from quartet.models.training.updates import update_policy, update_value
from quartet.models.value_head import ValueModel
from tests.unit.models import tiny, updates

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch was built without oneDNN"
)

Matmuls = list[tuple[int, ...]]


@pytest.fixture(scope="module", autouse=True)
def _measured_once() -> None:
    """Let each engine and each model have its own trials."""


@pytest.fixture
def matmuls(monkeypatch: pytest.MonkeyPatch) -> Matmuls:
    """Enable oneDNN on any processor. Return a list that receives the shape of each matmul."""
    shapes: Matmuls = []
    original = module._onednn

    def record_shape(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        shapes.append((*left.shape, right.shape[0]))
        return original(left, right, bias)

    monkeypatch.setattr(module, "is_needed", lambda: True)
    monkeypatch.setattr(module, "_onednn", record_shape)
    return shapes


@given(
    rows=st.integers(1, 40),
    inputs=st.integers(1, 40),
    outputs=st.integers(1, 40),
    bias=st.booleans(),
    extra=st.booleans(),
)
def test_outputs_and_gradients_equal_those_of_a_torch_linear_layer(
    rows: int, inputs: int, outputs: int, bias: bool, extra: bool
) -> None:
    generator = torch.Generator().manual_seed(rows + 100 * inputs + 10_000 * outputs)

    def random_tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = [
        random_tensor(rows, inputs)[None] if extra else random_tensor(rows, inputs),
        random_tensor(outputs, inputs),
    ]
    tensors += [random_tensor(outputs)] if bias else []
    weights = random_tensor(*tensors[0].shape[:-1], outputs)

    def outputs_and_gradients(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        arguments = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        result = function(*arguments)
        (result * weights.to(dtype)).sum().backward()
        return [result.detach(), *(argument.grad for argument in arguments if argument.grad is not None)]

    result = outputs_and_gradients(linear, torch.float32)
    expected = outputs_and_gradients(functional.linear, torch.float64)
    assert len(result) == len(expected) == 1 + len(tensors)
    for one, other in zip(result, expected, strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_model_computes_the_same_inside_and_outside_the_context(kind: str, matmuls: Matmuls) -> None:
    ids, model = torch.arange(24).view(2, 12), tiny.causal(kind)

    def logits_and_gradients() -> Iterator[torch.Tensor]:
        model.zero_grad()
        logits = model(input_ids=ids).logits
        logits.logsumexp(-1).sum().backward()
        yield logits.detach()
        yield from (parameter.grad for parameter in model.parameters())

    plain = list(logits_and_gradients())
    assert not matmuls
    with onednn_linear():
        fast = list(logits_and_gradients())
    # Outputs, and the gradients of inputs and weight, of 7 layers in each of 2 blocks, and of the head.
    assert len(matmuls) == 3 * (2 * 7 + 1)
    for one, other in zip(fast, plain, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


def test_updates_scoring_and_generation_use_onednn(matmuls: Matmuls) -> None:
    model, reward_model = tiny.causal("llama"), tiny.classifier("llama")
    value_model, engine = ValueModel.of_causal_lm(tiny.causal("llama")), TorchEngine(model, frozenset({tiny.EOS}), 8)
    data, settings = updates.experience(None), updates.settings()
    uses: dict[str, Callable[[], object]] = {
        "policy": lambda: update_policy(model, updates.sgd(model), data, settings, updates.LOSS, 1000),
        "critic": lambda: update_value(
            value_model, updates.sgd(value_model), data, settings, ValueLossSettings(value_clip=0.2), 1000
        ),
        "log-probs": lambda: response_log_probs(model, data.batch, 1.0, 1000),
        "values": lambda: response_values(value_model, data.batch, 1000),
        "scores": lambda: sequence_scores(reward_model, data.batch, 1000),
        "generation": lambda: tiny.generated(engine, tiny.requests(4), max_response_tokens=4),
    }
    for name, use in uses.items():
        matmuls.clear()
        use()
        assert matmuls, name


@pytest.mark.parametrize("threads", [1, 2])
def test_the_other_rows_of_a_batch_do_not_change_the_bits_of_a_row(threads: int, matmuls: Matmuls) -> None:
    for inputs, outputs in [(128, 352), (352, 128), (512, 128), (100, 77), (128, 8), (8, 128), (128, 2), (16, 4)]:
        rows, weight = torch.randn(256, inputs), torch.randn(outputs, inputs)
        with torch_threads(threads), torch.no_grad():
            expected = linear(rows, weight)
            for count in (1, 2, 3, 4, 7, 8, 24, 33, 64, 100, 200):
                assert torch.equal(linear(rows[:count], weight), expected[:count]), (inputs, outputs, count)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_torch_engine_is_batch_invariant_with_onednn(kind: str, matmuls: Matmuls) -> None:
    engine = TorchEngine(tiny.causal(kind), frozenset({tiny.EOS}), 64)
    assert engine.batch_invariant
    assert engine._static is not None
    assert engine._static._recorded
    requests = tiny.requests(40)
    together, single = (
        [
            (item.id, item.response_ids.tobytes(), item.log_probs.tobytes())
            for part in parts
            for item in tiny.generated(engine, part, max_response_tokens=8)
        ]
        for parts in ([requests], [[request] for request in requests])
    )
    assert sorted(together) == sorted(single)


def test_the_backward_pass_skips_matmuls_for_tensors_without_gradients(matmuls: Matmuls) -> None:
    inputs, weight = torch.randn(6, 4), torch.randn(5, 4)
    linear(inputs, weight.requires_grad_()).sum().backward()
    assert matmuls == [(6, 4, 5), (4, 6, 5)], "outputs and the weight's gradient"
    matmuls.clear()
    linear(inputs.requires_grad_(), weight.detach()).sum().backward()
    assert matmuls == [(6, 4, 5), (6, 5, 4)], "outputs and the inputs' gradient"


def test_onednn_sees_at_most_sixteen_row_counts_per_power_of_two(matmuls: Matmuls) -> None:
    wide, narrow = torch.randn(8, 4).requires_grad_(), torch.randn(4, 8).requires_grad_()
    for rows in range(64, 256):
        linear(linear(torch.randn(rows, 4).requires_grad_(), wide), narrow).sum().backward()
    row_counts = {shape[0] for shape in matmuls} | {shape[1] for shape in matmuls}
    assert row_counts == {4, 8, *range(64, 128, 4), *range(128, 257, 8)}


def test_memory_for_generated_code_is_bounded(matmuls: Matmuls) -> None:
    weight, inputs = torch.randn(352, 128, requires_grad=True), torch.randn(1600, 128, requires_grad=True)

    def kilobytes_after(numbers: range) -> int:
        for rows in numbers:
            (linear(inputs[:rows], weight) * 2.0).sum().backward()
        return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0])

    # Each new number of rows permanently costs about 0.6 MB, for each of two matmuls.
    before = kilobytes_after(range(1000, 1600, 16))
    assert kilobytes_after(range(1001, 1600, 3)) - before < 60_000


def test_an_expanded_gradient_is_copied_before_the_matmul(matmuls: Matmuls) -> None:
    inputs, weight = torch.randn(33, 4), torch.randn(5, 4, requires_grad=True)
    strides = list[tuple[int, ...]]()
    result = linear(inputs, weight)
    result.register_hook(lambda gradient: strides.append(gradient.stride()))
    result.sum().backward()
    assert strides == [(0, 0)], "autograd returns an expanded tensor for a sum"
    assert weight.grad is not None
    assert torch.allclose(weight.grad, inputs.sum(0).expand(5, 4), atol=1e-5)


def test_torch_computes_other_dtypes_and_no_rows(matmuls: Matmuls) -> None:
    weight = torch.randn(3, 2)
    linear(torch.randn(4, 2, dtype=torch.bfloat16), weight.bfloat16())
    assert linear(torch.randn(0, 2), weight).shape == (0, 3)
    assert matmuls == []


@pytest.mark.parametrize(
    ("intel", "capability", "expected"),
    [(False, "AVX512", True), (False, "AVX2", True), (False, "DEFAULT", False), (True, "AVX512", False)],
)
def test_onednn_is_for_processors_of_other_vendors_with_avx2(
    intel: bool, capability: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "is_intel", lambda: intel)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert is_needed.__wrapped__() is expected


def test_the_context_changes_nothing_on_other_processors(matmuls: Matmuls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_needed", lambda: False)
    with onednn_linear():
        functional.linear(torch.randn(4, 2), torch.randn(3, 2))
    assert matmuls == []


@pytest.mark.parametrize("chunk_tokens", [None, 3])
def test_checkpointed_layers_and_logits_are_computed_again_with_onednn(
    chunk_tokens: int | None, matmuls: Matmuls, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunk_tokens:
        monkeypatch.setattr(memory, "MAX_LOGITS", chunk_tokens * tiny.VOCABULARY)
    results = []
    for recomputes in (False, True):
        model = tiny.causal("llama")
        experience = updates.experience(model)
        matmuls.clear()
        with activation_checkpointing(model, recomputes):
            update_policy(model, create_optimizer(model, 1e-3), experience, updates.settings(), updates.LOSS, 1000)
        results.append((len(matmuls), model.state_dict()))
    assert results[1][0] > results[0][0]
    assert all(torch.equal(value, results[1][1][name]) for name, value in results[0][1].items())
