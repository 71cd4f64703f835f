"""Sampling of tokens: their distribution, impossible tokens, and log-probs of the whole distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quartet.contract.generation import SamplingParameters
from quartet.contract.random_streams import uniforms
from quartet.contract.trajectory import TrajectoryId
from quartet.engines.request_checks import check_sampling
from quartet.errors import InvalidRequest
from quartet.models.generation.sampling import BLOCK, _draw, _draw_by_blocks, sample_tokens

LOGITS = torch.tensor([1.0, -0.5, 0.3, 2.0, -3.0, 0.0, 1.5, -1.0])


def drawn(count: int, **parameters: float) -> np.ndarray:
    numbers = np.concatenate([uniforms(5, TrajectoryId("r", 0, index, 0), 1) for index in range(count)])
    sampling = SamplingParameters(**{"max_response_tokens": 1, **parameters})  # type: ignore[arg-type]
    tokens, _ = sample_tokens(LOGITS.expand(count, -1), torch.from_numpy(numbers[:, None]), sampling)
    return np.bincount(tokens.numpy(), minlength=8)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
def test_tokens_follow_the_softmax_at_the_temperature(temperature: float) -> None:
    expected = 20_000 * torch.softmax(LOGITS.double() / temperature, 0).numpy()
    counts = drawn(20_000, temperature=temperature)
    assert ((counts - expected) ** 2 / expected).sum() < 24.3  # chi-square, 7 degrees of freedom, p = 0.001


def test_top_k_keeps_the_likeliest_tokens_in_proportion() -> None:
    probabilities = torch.softmax(LOGITS.double(), 0).numpy()
    kept = [3, 6, 0]
    expected = 20_000 * probabilities[kept] / probabilities[kept].sum()
    counts = drawn(20_000, top_k=3)
    assert counts.sum() == counts[kept].sum()
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 13.8


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    # Probabilities 0.41 0.25 0.15 0.08 ...: two tokens reach 0.66, three are needed for 0.67.
    ordered = torch.softmax(LOGITS, 0).sort(descending=True).values.cumsum(0)
    assert np.flatnonzero(drawn(2_000, top_p=float(ordered[1]) - 1e-4)).tolist() == [3, 6]
    assert np.flatnonzero(drawn(2_000, top_p=float(ordered[1]) + 1e-4)).tolist() == [0, 3, 6]


def test_top_p_applies_to_the_tokens_that_top_k_keeps() -> None:
    # The two likeliest tokens have 0.41 and 0.25. The first has 0.62 of their sum.
    assert np.flatnonzero(drawn(2_000, top_k=2, top_p=0.61)).tolist() == [3]
    assert np.flatnonzero(drawn(2_000, top_k=2, top_p=0.63)).tolist() == [3, 6]


def test_min_p_keeps_tokens_relative_to_the_likeliest() -> None:
    # Relative to token 3: token 6 has e^-0.5 = 0.607, token 0 e^-1 = 0.368, token 2 e^-1.7 = 0.183.
    assert np.flatnonzero(drawn(2_000, min_p=0.6)).tolist() == [3, 6]
    assert np.flatnonzero(drawn(2_000, min_p=0.61)).tolist() == [3]
    assert np.flatnonzero(drawn(2_000, min_p=0.36)).tolist() == [0, 3, 6]
    assert np.flatnonzero(drawn(100, min_p=1.0)).tolist() == [3]
    # At temperature 2 token 6 has e^-0.25 = 0.779, token 0 0.607, token 2 0.427.
    assert np.flatnonzero(drawn(2_000, min_p=0.6, temperature=2.0)).tolist() == [0, 3, 6]


def test_min_p_and_top_k_keep_the_tokens_that_both_keep() -> None:
    assert np.flatnonzero(drawn(2_000, min_p=0.36, top_k=2)).tolist() == [3, 6]
    assert np.flatnonzero(drawn(2_000, min_p=0.6, top_k=5)).tolist() == [3, 6]


def test_a_tie_at_the_edge_of_top_k_goes_to_the_earlier_token() -> None:
    sampling = SamplingParameters(1, top_k=2)
    numbers = torch.linspace(0, 0.999, 50, dtype=torch.float64)[:, None]
    tokens, _ = sample_tokens(torch.tensor([0.0, 1.0, 0.0, 0.0]).expand(50, -1), numbers, sampling)
    assert set(tokens.tolist()) == {0, 1}


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -200.0, -torch.inf]])
    edges = torch.tensor([[0.0], [0.5 - 2**-32], [0.5], [1 - 2**-32]], dtype=torch.float64)
    tokens, log_probs = sample_tokens(logits.expand(4, -1), edges, SamplingParameters(1))
    assert tokens.tolist() == [1, 1, 3, 3]
    assert log_probs.tolist() == pytest.approx([-np.log(2)] * 4)


def test_log_probs_are_of_the_whole_distribution() -> None:
    numbers = torch.linspace(0, 0.999, 40, dtype=torch.float64)[:, None]
    expected = torch.log_softmax(LOGITS.double() / 0.7, 0)
    for sampling in (
        SamplingParameters(1, 0.7),
        SamplingParameters(1, 0.7, top_k=3),
        SamplingParameters(1, 0.7, top_p=0.5),
        SamplingParameters(1, 0.7, min_p=0.3),
    ):
        tokens, log_probs = sample_tokens(LOGITS.expand(40, -1), numbers, sampling)
        assert torch.allclose(log_probs.double(), expected[tokens], atol=1e-6)


def test_temperature_zero_is_greedy_with_log_probs_at_temperature_one() -> None:
    numbers = torch.full((1, 1), 0.999, dtype=torch.float64)
    token, log_prob = sample_tokens(LOGITS[None], numbers, SamplingParameters(1, temperature=0))
    assert token.tolist() == [3]
    assert log_prob.tolist() == pytest.approx([float(torch.log_softmax(LOGITS, 0)[3])])


@pytest.mark.parametrize(
    "parameters",
    [
        {"max_response_tokens": 0},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_k": -1},
        {"min_p": 1.1},
    ],
)
def test_parameters_outside_their_range_are_refused(parameters: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(parameters))):
        check_sampling(SamplingParameters(**{"max_response_tokens": 1, **parameters}))  # type: ignore[arg-type]


@pytest.mark.parametrize("vocabulary", [3, BLOCK, BLOCK + 1, 10 * BLOCK, 1000])
def test_drawing_by_blocks_finds_the_same_tokens(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    weights = torch.rand((400, vocabulary), generator=generator) ** 8
    weights[:, torch.rand(vocabulary, generator=generator) < 0.3] = 0
    weights[:, vocabulary // 2] = 1.0
    numbers = torch.rand((400, 1), generator=generator, dtype=torch.float64)
    numbers[:2, 0] = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    (tokens, total), (expected, expected_total) = _draw_by_blocks(weights, numbers), _draw(weights, numbers)
    assert torch.equal(tokens, expected)
    assert torch.allclose(total, expected_total, rtol=1e-14)


@pytest.mark.parametrize("likely", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 6])
def test_drawing_by_blocks_never_draws_a_token_without_probability(likely: int) -> None:
    weights = torch.zeros((5, 2 * BLOCK + 7))
    weights[:, likely] = 1e-30
    numbers = torch.tensor([[0.0], [0.1], [0.5], [1 - 2**-52], [1 - 2**-53]], dtype=torch.float64)
    assert _draw_by_blocks(weights, numbers)[0].squeeze().tolist() == [likely] * 5


def test_drawing_by_blocks_from_weights_that_are_no_numbers_does_not_fail() -> None:
    tokens, total = _draw_by_blocks(torch.full((1, 300), torch.nan), torch.tensor([[0.5]], dtype=torch.float64))
    assert tokens.shape == (1, 1)
    assert total.isnan().all()
