"""Advantages of a distillation against the formula in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from quartet.errors import InvalidRequest
from quartet.ppo.distillation import distillation_advantages

LENGTHS = [3, 1, 7, 20]


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    student, teacher = (-3 * torch.rand(sum(LENGTHS), generator=generator) for _ in range(2))
    return student, teacher, torch.tensor(LENGTHS)


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.97, 1.0])
def test_each_token_gets_the_discounted_sum_of_the_terms_from_it_on(discount: float) -> None:
    student, teacher, lengths = inputs()
    result = distillation_advantages(student, teacher, lengths, 0.7, discount)
    assert result.dtype == torch.float32
    start = 0
    for length in LENGTHS:
        terms = [float(teacher[start + at]) - float(student[start + at]) for at in range(length)]
        for at in range(length):
            total = math.fsum(discount ** (later - at) * terms[later] for later in range(at, length))
            assert float(result[start + at]) == pytest.approx(0.7 * total, rel=1e-6, abs=1e-6)
        start += length


def test_without_a_discount_the_advantage_is_exactly_the_term() -> None:
    student, teacher, lengths = inputs()
    expected = (teacher.double() - student.double()).float()
    assert torch.equal(distillation_advantages(student, teacher, lengths, 1.0, 0.0), expected)


def test_other_responses_change_no_bit() -> None:
    student, teacher, _ = inputs()
    whole = distillation_advantages(student, teacher, torch.tensor(LENGTHS), 1.3, 0.9)
    first = distillation_advantages(student[:3], teacher[:3], torch.tensor([3]), 1.3, 0.9)
    assert torch.equal(whole[:3], first)


def test_other_shapes_are_refused() -> None:
    student, teacher, lengths = inputs()
    with pytest.raises(InvalidRequest):
        distillation_advantages(student, teacher[:-1], lengths, 1.0, 0.0)
    with pytest.raises(InvalidRequest):
        distillation_advantages(student, teacher, lengths[:-1], 1.0, 0.0)
