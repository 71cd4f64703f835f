"""Penalties on tokens that have occurred: parity with transformers and with vLLM's formulas, alone and in a batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from quartet.contract.generation import Penalties, SamplingParameters
from quartet.contract.random_streams import uniforms
from quartet.engines.request_checks import check_sampling
from quartet.errors import InvalidRequest
from quartet.models.generation.penalties import Occurrences, penalize
from quartet.models.generation.sampling import sample_penalized, sample_tokens
from quartet.models.generation.torch_engine import TorchEngine
from tests.unit.models import tiny

ALL = Penalties(repetition=1.3, presence=0.7, frequency=0.4)
VOCABULARY = 50


def by_vllm(logits: np.ndarray, penalties: Penalties, prompt: list[int], response: list[int]) -> np.ndarray:
    """Compute the formulas of vLLM's documentation of SamplingParams for one row, token by token, in float64."""
    result = logits.astype(np.float64)
    for token in {*prompt, *response}:
        result[token] *= 1 / penalties.repetition if result[token] > 0 else penalties.repetition
    for token in response:
        result[token] -= penalties.frequency
    for token in set(response):
        result[token] -= penalties.presence
    return result


def occurrences(prompts: list[list[int]], responses: list[list[int]], vocabulary: int = VOCABULARY) -> Occurrences:
    result = Occurrences(len(prompts), vocabulary, torch.device("cpu"))
    result.begin(0, [np.array(prompt, np.int32) for prompt in prompts])
    for tokens in zip(*responses, strict=True):
        result.add(torch.tensor(tokens))
    return result


@pytest.mark.parametrize("repetition", [1.3, 0.6])
def test_the_repetition_penalty_is_that_of_transformers(repetition: float) -> None:
    logits = torch.randn((2, VOCABULARY), generator=torch.Generator().manual_seed(1))
    prompts, responses = [[1, 2, 2, 3], [4, 5, 6, 7]], [[3, 9, 9], [8, 8, 4]]
    processor = RepetitionPenaltyLogitsProcessor(repetition)
    expected = processor(torch.tensor([[*p, *r] for p, r in zip(prompts, responses, strict=True)]), logits)
    result = occurrences(prompts, responses).penalized(logits, Penalties(repetition=repetition))
    assert torch.equal(result, expected)
    assert not torch.equal(result, logits)


@pytest.mark.parametrize(
    "penalties",
    [ALL, Penalties(presence=0.7), Penalties(frequency=0.4), Penalties(presence=-0.5, frequency=-2.0)],
)
def test_penalties_are_those_of_vllm(penalties: Penalties) -> None:
    logits = torch.randn((2, VOCABULARY), generator=torch.Generator().manual_seed(2))
    prompts, responses = [[1, 2, 2, 3], [4, 5, 6, 7]], [[3, 9, 9], [8, 8, 4]]
    result = occurrences(prompts, responses).penalized(logits, penalties)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        assert np.allclose(result[row].numpy(), by_vllm(logits[row].numpy(), penalties, prompt, response), atol=1e-6)


def test_presence_and_frequency_leave_the_prompt_alone() -> None:
    logits = torch.randn((1, VOCABULARY))
    assert torch.equal(occurrences([[1, 2, 3]], [[]]).penalized(logits, Penalties(presence=2, frequency=2)), logits)


def test_a_reused_row_forgets_its_former_tokens() -> None:
    rows = occurrences([[1], [2]], [[3], [4]])
    rows.begin(1, [np.array([5], np.int32)])
    logits = torch.ones((2, VOCABULARY))
    changed = rows.penalized(logits, Penalties(repetition=2.0)) != logits
    assert [torch.nonzero(row).squeeze(1).tolist() for row in changed] == [[1, 3], [5]]


def test_tokens_are_drawn_after_penalties_and_log_probs_are_before_them() -> None:
    logits = torch.randn((40, VOCABULARY), generator=torch.Generator().manual_seed(3))
    numbers = torch.linspace(0, 0.999, 40, dtype=torch.float64)[:, None]
    counts = torch.zeros((40, VOCABULARY), dtype=torch.int32)
    counts[:, :25] = 3
    penalized = penalize(logits, Penalties(frequency=2.0), counts > 0, counts)
    greedy = torch.tensor([0, 5])
    for temperature in (0.0, 0.7, 1.0):
        sampling = SamplingParameters(1, temperature, penalties=Penalties(frequency=2.0))
        tokens, log_probs = sample_penalized(logits, penalized, numbers, sampling, greedy)
        assert torch.equal(tokens, sample_tokens(penalized, numbers, sampling, greedy)[0])
        whole = torch.log_softmax(logits.double() / (temperature or 1.0), -1)
        whole[greedy] = torch.log_softmax(logits[greedy].double(), -1)
        assert torch.allclose(log_probs.double(), whole.gather(1, tokens[:, None])[:, 0], atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("static", [True, False])
def test_responses_are_those_of_a_plain_loop(temperature: float, static: bool) -> None:
    """Rows join, finish and move in the batch; each keeps its own occurrences."""
    model, requests = tiny.causal("llama"), tiny.requests(12)
    engine = TorchEngine(model, frozenset({tiny.EOS, 7, 9}), 4, static=static)
    settings = {"max_response_tokens": 12, "temperature": temperature, "penalties": ALL}
    result = tiny.generated(engine, requests, **settings)
    assert any(len(trajectory.response_ids) < 12 for trajectory in result)
    sampling = SamplingParameters(**settings)  # type: ignore[arg-type]
    for request, trajectory in zip(requests, result, strict=True):
        prompt, response = request.prompt_ids.tolist(), list[int]()
        stream = torch.from_numpy(uniforms(0, request.id, 12))
        while len(response) < len(trajectory.response_ids):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *response]])).logits[0, -1]
            penalized = torch.from_numpy(by_vllm(logits.numpy(), ALL, prompt, response))[None].float()
            token, _ = sample_tokens(penalized, stream[len(response)].view(1, 1), sampling)
            response.append(int(token))
        assert trajectory.response_ids.tolist() == response
    plain = tiny.generated(engine, requests, **{**settings, "penalties": None})
    assert [t.response_ids.tolist() for t in plain] != [t.response_ids.tolist() for t in result]


def test_the_company_of_a_row_changes_no_bit() -> None:
    engine = TorchEngine(tiny.causal("llama"), frozenset({tiny.EOS}), 64)
    assert engine.batch_invariant
    requests = tiny.requests(20)
    together = tiny.generated(engine, requests, penalties=ALL)
    for request, expected in list(zip(requests, together, strict=True))[::6]:
        (alone,) = tiny.generated(engine, [request], penalties=ALL)
        assert alone.response_ids.tobytes() == expected.response_ids.tobytes()
        assert alone.log_probs.tobytes() == expected.log_probs.tobytes()


def test_greedy_requests_have_penalties_too() -> None:
    engine = TorchEngine(tiny.causal("llama"), frozenset({tiny.EOS}), 64)
    requests = tiny.requests(6)
    greedy = tiny.generated(engine, [replace(request, greedy=True) for request in requests], penalties=ALL)
    expected = tiny.generated(engine, requests, temperature=0.0, penalties=ALL)
    assert [t.response_ids.tolist() for t in greedy] == [t.response_ids.tolist() for t in expected]


@pytest.mark.parametrize(
    "penalties",
    [
        Penalties(repetition=0.0),
        Penalties(repetition=float("nan")),
        Penalties(presence=2.1),
        Penalties(frequency=-2.1),
        Penalties(frequency=float("nan")),
    ],
)
def test_penalties_outside_their_range_are_refused(penalties: Penalties) -> None:
    with pytest.raises(InvalidRequest, match="penalty"):
        check_sampling(SamplingParameters(1, penalties=penalties))
