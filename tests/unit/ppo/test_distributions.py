"""Log-probs and entropies, compared with a float64 softmax in plain Python."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from quartet.errors import InvalidRequest
from quartet.ppo.distributions import entropy, token_log_probs
from tests.unit.ppo.batches import seeds

temperatures = st.floats(0.1, 5)


def probabilities(row: list[float], temperature: float) -> list[float]:
    weights = [math.exp((x - max(row)) / temperature) for x in row]
    return [w / math.fsum(weights) for w in weights]


@given(st.integers(1, 6), st.integers(1, 9), seeds, temperatures)
def test_log_probs_and_entropies_follow_the_softmax(rows: int, vocabulary: int, seed: int, temperature: float) -> None:
    random = np.random.default_rng(seed)
    logits = torch.tensor(random.normal(0, 2, (rows, vocabulary)), dtype=torch.float32)
    ids = torch.tensor(random.integers(0, vocabulary, rows), dtype=torch.int32)
    expected = [probabilities(row, temperature) for row in logits.tolist()]
    log_probs = token_log_probs(logits, ids, temperature).tolist()
    assert log_probs == pytest.approx(
        [math.log(p[token]) for p, token in zip(expected, ids.tolist(), strict=True)], rel=1e-4, abs=1e-5
    )
    entropies = [-math.fsum(x * math.log(x) for x in p) for p in expected]
    assert entropy(logits, temperature).tolist() == pytest.approx(entropies, rel=1e-4, abs=1e-5)


def test_temperature_divides_the_logits() -> None:
    # Logits [ln 4, 0] give probabilities 0.8 and 0.2. At temperature 2 they are [ln 2, 0], which give 2/3 and 1/3.
    logits = torch.tensor([[math.log(4), 0.0]])
    assert token_log_probs(logits, torch.tensor([0]), 1.0).exp().item() == pytest.approx(0.8)
    assert token_log_probs(logits, torch.tensor([0]), 2.0).exp().item() == pytest.approx(2 / 3)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_uniform_distribution_has_the_logarithm_of_the_vocabulary_as_entropy(temperature: float) -> None:
    assert entropy(torch.full((2, 32), 3.0), temperature).tolist() == pytest.approx([math.log(32)] * 2)


def test_half_precision_logits_are_normalised_in_fp32() -> None:
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    ids = torch.tensor([0, 1, 2, 999])
    exact = torch.log_softmax(logits.double() / 0.7, 1)
    log_probs, entropies = token_log_probs(logits, ids, 0.7), entropy(logits, 0.7)
    assert log_probs.dtype == entropies.dtype == torch.float32
    assert log_probs.tolist() == pytest.approx(exact[range(4), ids].tolist(), abs=1e-5)
    assert entropies.tolist() == pytest.approx((-(exact.exp() * exact).sum(1)).tolist(), abs=1e-5)


def test_large_logits_do_not_lose_precision() -> None:
    logits = torch.tensor([[10000.0, 10001.0], [-10000.0, -10001.0]])
    expected = [-math.log1p(math.e), -math.log1p(math.exp(-1))]
    assert token_log_probs(logits, torch.tensor([0, 0]), 1.0).tolist() == pytest.approx(expected, rel=1e-5)


def test_impossible_tokens_add_no_entropy_and_no_gradient() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    (result,) = entropy(logits, 1.0)
    assert result.item() == pytest.approx(math.log(2))
    result.backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == [pytest.approx([0.0, 0.0, 0.0], abs=1e-7)]


@given(seeds, temperatures)
def test_log_probs_and_entropies_are_differentiable(seed: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    ids, weights = torch.tensor([0, 4, 2]), torch.randn(3, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: entropy(x, temperature), [logits])
    (expected,) = torch.autograd.grad(
        (torch.log_softmax(logits / temperature, 1).gather(1, ids[:, None])[:, 0] * weights).sum(), logits
    )
    result = token_log_probs(logits, ids, temperature)
    (gradient,) = torch.autograd.grad((result * weights).sum(), logits, retain_graph=True)
    assert torch.allclose(gradient, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(result.sum(), logits)


@given(seeds)
def test_other_rows_do_not_change_the_result(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 11, generator=generator)
    ids = torch.randint(0, 11, (6,), generator=generator)
    assert torch.equal(token_log_probs(logits, ids, 0.7)[:2], token_log_probs(logits[:2], ids[:2], 0.7))
    assert torch.equal(entropy(logits, 0.7)[:2], entropy(logits[:2], 0.7))


def test_invalid_logits_and_temperatures_are_refused() -> None:
    logits, ids = torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)
    with pytest.raises(InvalidRequest, match="temperature"):
        token_log_probs(logits, ids, 0.0)
    with pytest.raises(InvalidRequest, match="temperature"):
        entropy(logits, -1.0)
    with pytest.raises(InvalidRequest, match="token_ids"):
        token_log_probs(logits, ids[:1], 1.0)
    with pytest.raises(InvalidRequest, match="logits"):
        entropy(logits[0], 1.0)


def test_the_entropy_of_a_vocabulary_larger_than_the_cache_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    expected = entropy(logits, 0.7)
    monkeypatch.setattr("quartet.ppo.distributions.CACHED", 3)
    assert torch.equal(entropy(logits, 0.7), expected)
