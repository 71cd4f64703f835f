"""Recordings of computations in torch: a replay repeats the calls on the tensors as they are then."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from quartet.models.generation.recording import NotRecordable, record


def test_a_replay_reads_inputs_and_weights_as_they_are_then() -> None:
    inputs, weight, result = torch.ones(2, 3), torch.nn.Parameter(torch.ones(4, 3)), torch.zeros(2, 4)

    @torch.inference_mode()
    def compute() -> None:
        result[:] = F.silu(F.linear(inputs, weight)).to(torch.float32)

    replay = record(compute)
    inputs[0] = 5.0
    weight.data[1] = -1.0
    result.zero_()
    replay()
    expected = F.silu(inputs @ weight.detach().T)
    assert torch.equal(result, expected)
    weight.data = torch.full((4, 3), 2.0)
    replay()
    assert torch.equal(result, F.silu(inputs @ weight.detach().T))


def test_operations_in_place_several_results_and_attributes_are_repeated() -> None:
    inputs, result = torch.arange(6.0).view(2, 3), torch.zeros(3)

    def compute() -> None:
        values = inputs.clone()
        values += 1
        values.mul_(2)
        largest, indices = values.T.max(dim=1)
        first, second = torch.split(largest[indices], [1, 2])
        torch.add(torch.cat((second, first)), torch.full((3,), 0.5), out=result)

    replay = record(compute)
    expected = result.clone()
    inputs[1] *= 10
    replay()
    changed = result.clone()
    compute()
    assert torch.equal(changed, result)
    assert not torch.equal(changed, expected)


@pytest.mark.parametrize(
    "read",
    [
        lambda values: values.sum().item(),
        lambda values: bool(values[0] > 0),
        lambda values: int(values[0]),
        lambda values: values.tolist(),
        lambda values: values.nonzero().tolist(),
        lambda values: torch.equal(values, values),
        lambda values: values.numpy(),
    ],
)
def test_a_computation_that_reads_values_is_refused(read: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(NotRecordable, match="reads"):
        record(lambda: read(torch.ones(3)))


def test_numbers_of_numpy_are_repeated_and_other_objects_refused() -> None:
    values, result = torch.ones(3), torch.zeros(3)
    replay = record(lambda: result.copy_(values * np.float64(1.5)))
    values.fill_(2.0)
    replay()
    assert result.tolist() == [3.0] * 3
    with pytest.raises(NotRecordable, match="type Generator"):
        record(lambda: torch.rand(3, generator=torch.Generator()))


def test_shapes_and_types_may_be_read() -> None:
    values, result = torch.ones(2, 3), torch.zeros(())

    def compute() -> None:
        size = values.shape[0] * values.size(1) * values.dim() * len(values)
        result.copy_(
            values.sum() * size if values.dtype is torch.float32 and values.is_floating_point() else values.sum()
        )

    replay = record(compute)
    values.fill_(2.0)
    replay()
    assert result == 2 * 6 * 24
