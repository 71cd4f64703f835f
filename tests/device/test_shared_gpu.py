"""A GPU that several processes share: exclusive mode, memory between phases, and copies of a model."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from quartet.config.deployment import ServiceConfig
from quartet.errors import ConfigError
from quartet.models.gpu_settings import release_gpu_memory
from quartet.models.weights.device_copy import copy_to_device
from quartet.models.weights.lora import add_adapter
from quartet.services import factories
from tests.device.conftest import on_gpu
from tests.device.pretended_gpu import GpuTensor, PretendedGpu
from tests.unit.models import tiny


def test_a_gpu_that_another_process_holds_is_an_error_that_says_what_to_do(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = ServiceConfig(devices=(0,))
    assert factories.device_of(service) == "cuda:0"
    message = "CUDA error: all CUDA-capable devices are busy or unavailable"

    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(torch, "zeros", refused)
    with pytest.raises(ConfigError, match=r"devices \[0\]: another process holds .* nvidia-smi -i 0 -c DEFAULT"):
        factories.device_of(service)
    message = "CUDA error: unknown"
    with pytest.raises(RuntimeError, match="unknown"):
        factories.device_of(service)


def test_unused_memory_is_given_back(gpu: PretendedGpu) -> None:
    release_gpu_memory()
    assert gpu.emptied == 1


def test_a_model_is_copied_to_another_device_tensor_by_tensor(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = on_gpu(tiny.causal("qwen2"))
    adapter = add_adapter(model, "base", rank=2, alpha=4.0)
    on_the_gpu: list[Any] = []

    def cloned(self: Any, memo: Any) -> Any:
        on_the_gpu.append(self)
        return self

    monkeypatch.setattr(GpuTensor, "__deepcopy__", cloned)
    copied, adapter_copy = copy_to_device((model, adapter), model, "cpu")
    assert not on_the_gpu
    assert adapter_copy.model is copied
    assert {parameter.device.type for parameter in copied.parameters()} == {"cpu"}
    assert copied.lm_head.weight is copied.get_input_embeddings().weight
    names = [name for name, _ in copied.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]
    assert [p.requires_grad for p in copied.parameters()] == [p.requires_grad for p in model.parameters()]


def test_a_copy_computes_what_its_model_does() -> None:
    model = tiny.causal("llama")
    copied, _ = copy_to_device((model, None), model, "cpu")
    ids = torch.arange(5)[None]
    assert torch.equal(copied(input_ids=ids).logits, deepcopy(model)(input_ids=ids).logits)
    with torch.no_grad():
        copied.lm_head.weight.zero_()
    assert model.lm_head.weight.any()
