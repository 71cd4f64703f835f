"""Gradients in half precision on a GPU: they add up in float32."""

from __future__ import annotations

import torch

from quartet.models.training.optimizer import create_optimizer
from quartet.models.training.update_memory import measure_policy
from tests.device.conftest import on_gpu
from tests.device.pretended_gpu import PretendedGpu
from tests.unit.models import tiny


def test_gradients_of_micro_batches_add_up_in_float32(gpu: PretendedGpu) -> None:
    weights = torch.nn.Linear(4, 1, bias=False, dtype=torch.bfloat16).to("cuda:0")
    create_optimizer(weights, 0.1)  # Its gradients must not go to an optimizer that is gone.
    optimizer = create_optimizer(weights, 0.1)
    for count in range(16):
        weights(torch.full((1, 4), 1 + count / 128, dtype=torch.bfloat16, device="cuda:0")).sum().backward()
    [master] = optimizer.stepped_parameters()
    assert weights.weight.grad is None
    assert master.grad is not None
    assert master.grad.tolist() == [[16 + 120 / 128] * 4]
    optimizer.zero_grad()
    assert master.grad is None


def test_the_memory_of_an_update_counts_gradients_in_float32(gpu: PretendedGpu) -> None:
    model = on_gpu(tiny.causal("llama").bfloat16())
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert measure_policy(model, 20, "report").state == (4 + 8) * weights
