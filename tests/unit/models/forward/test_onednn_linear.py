"""Linear layers with oneDNN, compared with those of torch: the same outputs, gradients and weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from quartet.errors import ConfigError
from quartet.models.forward import onednn_linear
from quartet.models.forward.onednn_linear import enable_onednn_linear, linear, use_onednn_linear
from quartet.models.weights.loading import load_causal_lm
from quartet.models.weights.lora import add_adapter
from tests.unit.models import tiny

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch was built without oneDNN"
)


@pytest.fixture
def matmuls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Enable oneDNN for matmuls of any size. Return a list that receives the shape of each matmul."""
    shapes: list[tuple[int, ...]] = []
    original = onednn_linear._onednn

    def record_shape(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        shapes.append((*left.shape, right.shape[0]))
        return original(left, right, bias)

    monkeypatch.setattr(onednn_linear, "MIN_MULTIPLICATIONS", 0)
    monkeypatch.setattr(onednn_linear, "_enabled", True)
    monkeypatch.setattr(onednn_linear, "_onednn", record_shape)
    return shapes


@settings(max_examples=60, deadline=None, derandomize=True)
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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onednn_linear, "MIN_MULTIPLICATIONS", 0)
        patch.setattr(onednn_linear, "_enabled", True)
        result = outputs_and_gradients(linear, torch.float32)
    expected = outputs_and_gradients(functional.linear, torch.float64)
    assert len(result) == len(expected) == 1 + len(tensors)
    for one, other in zip(result, expected, strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_converted_model_computes_the_same_and_keeps_its_weights(kind: str, matmuls: list[tuple[int, ...]]) -> None:
    ids, results = torch.arange(24).view(2, 12), []
    plain = tiny.causal(kind)
    fast = copy.deepcopy(plain)
    use_onednn_linear(fast)
    for model in (plain, fast):
        logits = model(input_ids=ids).logits
        logits.logsumexp(-1).sum().backward()
        results.append((logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}))
    assert matmuls
    assert torch.allclose(results[0][0], results[1][0], atol=1e-5)
    for name, gradient in results[0][1].items():
        assert torch.allclose(results[1][1][name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max())), name
    assert plain.state_dict().keys() == fast.state_dict().keys()


def test_the_backward_pass_skips_matmuls_for_tensors_without_gradients(
    matmuls: list[tuple[int, ...]],
) -> None:
    inputs, weight = torch.randn(6, 4), torch.randn(5, 4)
    linear(inputs, weight.requires_grad_()).sum().backward()
    assert matmuls == [(6, 4, 5), (4, 6, 5)], "outputs and the weight's gradient"
    matmuls.clear()
    linear(inputs.requires_grad_(), weight.detach()).sum().backward()
    assert matmuls == [(6, 4, 5), (6, 5, 4)], "outputs and the inputs' gradient"


def test_onednn_sees_at_most_sixteen_row_counts_per_power_of_two(matmuls: list[tuple[int, ...]]) -> None:
    wide, narrow = torch.randn(8, 4).requires_grad_(), torch.randn(4, 8).requires_grad_()
    for rows in range(64, 256):
        linear(linear(torch.randn(rows, 4).requires_grad_(), wide), narrow).sum().backward()
    row_counts = {shape[0] for shape in matmuls} | {shape[1] for shape in matmuls}
    assert row_counts == {4, 8, *range(64, 128, 4), *range(128, 257, 8)}


def test_an_expanded_gradient_is_copied_before_the_matmul(matmuls: list[tuple[int, ...]]) -> None:
    inputs, weight = torch.randn(33, 4), torch.randn(5, 4, requires_grad=True)
    strides = list[tuple[int, ...]]()
    result = linear(inputs, weight)
    result.register_hook(lambda gradient: strides.append(gradient.stride()))
    result.sum().backward()
    assert strides == [(0, 0)], "autograd returns an expanded tensor for a sum"
    assert weight.grad is not None
    assert torch.allclose(weight.grad, inputs.sum(0).expand(5, 4), atol=1e-5)


def test_torch_computes_small_matmuls_and_other_dtypes(
    matmuls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(3, 2)
    linear(torch.randn(4, 2, dtype=torch.bfloat16), weight.bfloat16())
    assert linear(torch.randn(0, 2), weight).shape == (0, 3)
    matmuls.clear()
    monkeypatch.setattr(onednn_linear, "MIN_MULTIPLICATIONS", 4 * 2 * 3 + 1)
    linear(torch.randn(4, 2), weight)
    assert matmuls == []
    linear(torch.randn(5, 2), weight)
    assert matmuls == [(5, 2, 3)]


def test_converted_layers_are_still_linear_layers_and_subclasses_are_not_converted(
    matmuls: list[tuple[int, ...]],
) -> None:
    class CustomLinear(nn.Linear):
        """Subclass, which may compute differently."""

    model = nn.Sequential(nn.Linear(2, 2), CustomLinear(2, 2), Conv1D(2, 2))
    use_onednn_linear(model)
    assert [type(layer) is kind for layer, kind in zip(model, (nn.Linear, CustomLinear, Conv1D), strict=True)] == [
        False,
        True,
        False,
    ]
    assert isinstance(model[0], nn.Linear)
    assert isinstance(model[2], Conv1D)


def test_an_adapter_can_be_added_to_converted_layers(matmuls: list[tuple[int, ...]]) -> None:
    model = tiny.causal("gpt2")
    use_onednn_linear(model)
    adapter = add_adapter(model, "base", rank=2, alpha=4.0, target_modules=[], seed=0)
    matmuls.clear()
    logits = model(input_ids=torch.arange(6)[None]).logits
    with adapter.off():
        assert torch.equal(model(input_ids=torch.arange(6)[None]).logits, logits), "the adapter must start at 0"
    assert matmuls


def test_loaded_checkpoints_have_converted_layers_if_enabled(
    tmp_path: Path, matmuls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = load_causal_lm(tiny.saved(tiny.causal("llama"), tmp_path / "model"))
    matmuls.clear()
    model(input_ids=torch.zeros(1, 3, dtype=torch.int64))
    assert len(matmuls) == 2 * 7 + 1
    monkeypatch.setattr(onednn_linear, "_enabled", False)
    plain: Any = load_causal_lm(tmp_path / "model")
    matmuls.clear()
    plain(input_ids=torch.zeros(1, 3, dtype=torch.int64))
    assert matmuls == []


def test_memory_for_generated_code_is_bounded(matmuls: list[tuple[int, ...]]) -> None:
    weight, inputs = torch.randn(352, 128, requires_grad=True), torch.randn(1600, 128, requires_grad=True)

    def kilobytes_after(numbers: range) -> int:
        for rows in numbers:
            (linear(inputs[:rows], weight) * 2.0).sum().backward()
        return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0])

    # Each new number of rows permanently costs about 0.6 MB, for each of two matmuls.
    before = kilobytes_after(range(1000, 1600, 16))
    assert kilobytes_after(range(1001, 1600, 3)) - before < 60_000


def test_the_layers_are_off_unless_the_process_enables_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn_linear, "_enabled", False)
    model = nn.Sequential(nn.Linear(2, 2))
    use_onednn_linear(model)
    assert type(model[0]) is nn.Linear
    enable_onednn_linear()
    use_onednn_linear(model)
    assert type(model[0]) is onednn_linear._Linear


def test_a_torch_without_the_operator_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn_linear, "_enabled", False)
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    with pytest.raises(ConfigError, match=r"run\.onednn_linear: this build of torch has no oneDNN linear operator"):
        enable_onednn_linear()
