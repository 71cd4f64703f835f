"""The optimizer's state in host memory: the bits of a step that keeps it on the GPU."""

from __future__ import annotations

from pathlib import Path

import torch

from quartet.models.training.optimizer import create_optimizer, load_optimizer, snapshot_optimizer
from quartet.models.training.update_memory import measure_policy
from quartet.models.training.updates import update_policy
from tests.device.conftest import on_gpu
from tests.device.pretended_gpu import GpuTensor, PretendedGpu, to_host
from tests.unit.models import tiny
from tests.unit.models.updates import LOSS, experience, settings


def places(optimizer: torch.optim.Optimizer) -> set[bool]:
    """Return whether the moments are on the GPU."""
    return {
        isinstance(entry[name], GpuTensor) for entry in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")
    }


def test_updates_with_moments_in_host_memory_are_bit_identical(gpu: PretendedGpu, tmp_path: Path) -> None:
    model = tiny.causal("llama").to(torch.bfloat16)
    data, results = experience(model), []
    for offload in (False, True):
        there = on_gpu(model)
        optimizer = create_optimizer(there, 0.01, weight_decay=0.1, offload=offload)
        update_policy(there, optimizer, data, settings(), LOSS, 16)
        assert places(optimizer) == {not offload}
        snapshot_optimizer(optimizer)(tmp_path)
        del optimizer
        again = create_optimizer(there, 0.01, weight_decay=0.1, offload=offload)
        load_optimizer(again, tmp_path / "optimizer.safetensors")
        assert places(again) == {not offload}
        update_policy(there, again, data, settings(), LOSS, 16)
        results.append((to_host(there), (tmp_path / "optimizer.safetensors").read_bytes()))
    (weights, saved), (weights_of_offload, saved_of_offload) = results
    assert saved == saved_of_offload
    assert all(torch.equal(value, weights_of_offload[name]) for name, value in weights.items())


def test_a_model_on_the_cpu_is_updated_as_without_offload() -> None:
    results = []
    for offload in (False, True):
        model = tiny.causal("llama")
        data = experience(model)
        optimizer = create_optimizer(model, 0.01, offload=offload)
        update_policy(model, optimizer, data, settings(), LOSS, 16)
        results.append(model.state_dict())
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def test_the_memory_of_an_update_counts_the_moments_of_one_parameter(gpu: PretendedGpu) -> None:
    model = on_gpu(tiny.causal("llama"))
    sizes = [parameter.numel() for parameter in model.parameters()]
    assert measure_policy(model, 20, "report").state == 12 * sum(sizes)
    assert measure_policy(model, 20, "report", offload=True).state == 4 * sum(sizes) + 8 * max(sizes)
