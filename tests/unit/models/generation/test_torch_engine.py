"""The torch engine, compared with plain loops: random streams, order, and ends of responses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import structlog
import torch

from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.random_streams import uniforms
from quartet.contract.trajectory import FinishReason, TokenBatch, TrajectoryId
from quartet.errors import Cancelled, ComputationFailed, InvalidRequest, ModelError
from quartet.models.forward.scoring import response_log_probs
from quartet.models.generation import decode_slots
from quartet.models.generation.torch_engine import TorchEngine
from tests.unit.models import tiny

STOPS = frozenset({tiny.EOS, 7, 9})
SAMPLES = 1500
# Also a model with a sliding window shorter than the texts, one that derives positions from the padding mask, models that keep
# states, and one with a cache of its own.
DECODERS = (*tiny.KINDS, "mistral", "bloom", "qwen3_5_text", "lfm2", "mamba2", "minimax")


def plain(model: Any, request: GenerationRequest, limit: int, temperature: float, seed: int) -> list[int]:
    """Decode one prompt without cache, batch and padding: compute the whole sequence again for every token."""
    ids = request.prompt_ids.tolist()
    numbers = uniforms(seed, request.id, limit)
    for position in range(limit):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1].double()
        if temperature == 0:
            ids.append(int(logits.argmax()))
        else:
            cumulative = torch.softmax(logits / temperature, 0).cumsum(0).numpy()
            ids.append(int(np.searchsorted(cumulative, numbers[position] * cumulative[-1], side="right")))
        if ids[-1] in STOPS:
            break
    return ids[len(request.prompt_ids) :]


@pytest.mark.parametrize(
    ("kind", "temperature", "slots"),
    [*((kind, 0.8, 4) for kind in DECODERS), ("llama", 0.0, 32), ("bloom", 0.0, 1), ("bloom", 0.8, 7)],
)
def test_tokens_equal_those_of_a_plain_loop_per_prompt_and_log_probs_those_of_the_trainer(
    kind: str, temperature: float, slots: int
) -> None:
    """With fewer slots than requests, the others wait."""
    model, requests = tiny.causal(kind), tiny.requests(12)
    result = tiny.generated(TorchEngine(model, STOPS, slots), requests, seed=4, temperature=temperature)
    expected = [plain(model, request, 12, temperature, seed=4) for request in requests]
    assert [trajectory.response_ids.tolist() for trajectory in result] == expected
    assert len({len(response) for response in expected}) > 1  # some stopped early, so rows were dropped
    log_probs = response_log_probs(model, TokenBatch.of(result), temperature or 1.0, 256)
    assert np.allclose(np.concatenate([t.log_probs for t in result]), log_probs, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_streamed_tokens_are_those_of_the_generated_response(temperature: float) -> None:
    model, requests = tiny.causal("llama"), tiny.requests(12)
    engine = TorchEngine(model, STOPS, 32)
    expected = tiny.generated(engine, requests, seed=4, temperature=temperature)
    sampling = SamplingParameters(12, temperature)
    for request, trajectory in zip(requests, expected, strict=True):
        assert list(engine.stream(request, sampling, seed=4)) == trajectory.response_ids.tolist()


@pytest.mark.parametrize(("fraction", "static"), [(0.0, True), (0.0, False), (2.0, True), (2.0, False)])
def test_the_moment_of_dropping_rows_does_not_change_the_tokens(
    monkeypatch: pytest.MonkeyPatch, fraction: float, static: bool
) -> None:
    model, requests = tiny.causal("llama"), tiny.requests(24)
    expected = tiny.generated(TorchEngine(model, STOPS, 32), requests)
    monkeypatch.setattr(decode_slots, "DROP_FRACTION", fraction)
    result = tiny.generated(TorchEngine(model, STOPS, 32, static), requests)
    assert [t.response_ids.tolist() for t in result] == [t.response_ids.tolist() for t in expected]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_other_rows_in_the_batch_do_not_change_the_tokens(kind: str) -> None:
    engine, requests = TorchEngine(tiny.causal(kind), STOPS, 32), tiny.requests(20)
    together = {t.id: t.response_ids.tolist() for t in tiny.generated(engine, requests)}
    for some in (requests[:1], requests[3:9], requests[::3]):
        assert all(t.response_ids.tolist() == together[t.id] for t in tiny.generated(engine, some))


@pytest.mark.parametrize(("kind", "slots"), [("llama", 4), ("mistral", 4), ("llama", 1)])
def test_requests_that_wait_for_a_slot_get_the_same_tokens_without_static_buffers(kind: str, slots: int) -> None:
    model, requests = tiny.causal(kind), tiny.requests(24)
    expected = tiny.generated(TorchEngine(model, STOPS, 64), requests)
    result = tiny.generated(TorchEngine(model, STOPS, slots, static=False), requests[::-1])
    assert [t.response_ids.tolist() for t in result] == [t.response_ids.tolist() for t in expected]
    assert np.allclose(*(np.concatenate([t.log_probs for t in some]) for some in (result, expected)), atol=1e-5)


def test_a_free_slot_is_reused_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    model, requests, rows = tiny.causal("llama"), tiny.requests(40), []
    sample_tokens = decode_slots.sample_tokens

    def record_rows(logits: torch.Tensor, *arguments: Any) -> Any:
        rows.append(len(logits))
        return sample_tokens(logits, *arguments)

    engine = TorchEngine(model, STOPS, 4)
    monkeypatch.setattr(decode_slots, "sample_tokens", record_rows)
    result = tiny.generated(engine, requests)
    assert sum(rows) == sum(len(t.response_ids) for t in result)
    assert rows == sorted(rows, reverse=True), "a slot was free while requests waited"


def test_decoding_never_exceeds_the_positions_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    # Finished rows stay in the batch until they are half of it. Meanwhile the cache moves to its left end.
    monkeypatch.setattr(decode_slots, "DROP_FRACTION", 0.5)
    model = tiny.causal("gpt2", n_positions=24)
    requests = tiny.requests(40)
    result = tiny.generated(TorchEngine(model, STOPS, 6, static=False), requests)
    expected = tiny.generated(TorchEngine(model, STOPS, 64), requests)
    assert [t.response_ids.tolist() for t in result] == [t.response_ids.tolist() for t in expected]


def test_seed_and_step_determine_the_tokens_but_not_the_run_name() -> None:
    engine, requests = TorchEngine(tiny.causal("llama"), STOPS, 32), tiny.requests(8)
    renamed = [
        GenerationRequest(TrajectoryId("other", r.id.step, r.id.prompt, r.id.sample), r.prompt_ids) for r in requests
    ]
    first = [t.response_ids.tolist() for t in tiny.generated(engine, requests)]
    assert first == [t.response_ids.tolist() for t in tiny.generated(engine, requests)]
    assert first == [t.response_ids.tolist() for t in tiny.generated(engine, renamed)]
    assert first != [t.response_ids.tolist() for t in tiny.generated(engine, requests, seed=1)]
    assert first != [t.response_ids.tolist() for t in tiny.generated(engine, tiny.requests(8, step=1))]


def test_the_same_call_gives_the_same_bits_in_the_same_order() -> None:
    engine, requests = TorchEngine(tiny.causal("qwen2"), STOPS, 32), tiny.requests(20)
    first, second = (list(engine.generate(requests, SamplingParameters(12), 0, lambda: False)) for _ in range(2))
    assert [each.request.id for each in first] == [each.request.id for each in second]
    assert all(
        np.asarray(a.log_probs).tobytes() == np.asarray(b.log_probs).tobytes()
        for a, b in zip(first, second, strict=True)
    )
    ends = [(len(each.token_ids), each.request.id) for each in first]
    assert ends == sorted(ends)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_samples_of_one_prompt_equal_those_of_separate_calls(kind: str) -> None:
    engine = TorchEngine(tiny.causal(kind), STOPS, 32)
    prompts = [np.array(ids, np.int32) for ids in ([5, 6, 7, 8], [9, 3], [4, 4, 4, 2, 2, 3])]
    requests = [GenerationRequest(TrajectoryId("r", 0, i, s), prompts[i]) for i in range(3) for s in range(4)]
    together = tiny.generated(engine, requests)
    separate = [tiny.generated(engine, [request])[0] for request in requests]
    assert [t.response_ids.tolist() for t in together] == [t.response_ids.tolist() for t in separate]
    assert len({tuple(t.response_ids.tolist()) for t in together[:4]}) > 1


def test_a_prefill_in_several_passes_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model, requests = tiny.causal("llama"), tiny.requests(12)
    expected = tiny.generated(TorchEngine(model, STOPS, 32), requests)
    monkeypatch.setattr(decode_slots, "PREFILL_TOKENS", 20)
    result = tiny.generated(TorchEngine(model, STOPS, 32), requests)
    assert [t.response_ids.tolist() for t in result] == [t.response_ids.tolist() for t in expected]


def test_a_response_ends_with_its_stop_token_or_at_the_limit() -> None:
    result = tiny.generated(TorchEngine(tiny.causal("llama"), STOPS, 32), tiny.requests(30))
    assert {t.finish_reason for t in result} == {FinishReason.EOS, FinishReason.LENGTH}
    for t in result:
        stops = [index for index, token in enumerate(t.response_ids) if token in STOPS]
        if t.finish_reason is FinishReason.EOS:
            assert stops == [len(t.response_ids) - 1]
        else:
            assert stops == []
            assert len(t.response_ids) == 12
        assert (t.response_ids.dtype, t.log_probs.dtype, t.prompt_ids.dtype) == (np.int32, np.float32, np.int32)


def test_a_stop_token_at_the_limit_is_an_eos() -> None:
    engine, requests = TorchEngine(tiny.causal("llama"), STOPS, 32), tiny.requests(30)
    finished = [t for t in tiny.generated(engine, requests) if t.finish_reason is FinishReason.EOS]
    limit = len(finished[0].response_ids)
    again = tiny.generated(engine, [r for r in requests if r.id == finished[0].id], max_response_tokens=limit)
    assert again[0].finish_reason is FinishReason.EOS


def test_stop_tokens_can_be_ignored() -> None:
    result = tiny.generated(TorchEngine(tiny.causal("llama"), STOPS, 32), tiny.requests(10), ignore_eos=True)
    assert {len(t.response_ids) for t in result} == {12}
    assert {t.finish_reason for t in result} == {FinishReason.LENGTH}


def test_the_first_token_follows_the_models_distribution() -> None:
    model = tiny.causal("llama", initializer_range=0.1)
    prompt = np.array([5, 6, 7], np.int32)
    requests = [GenerationRequest(TrajectoryId("r", 0, 0, sample), prompt) for sample in range(SAMPLES)]
    result = tiny.generated(TorchEngine(model, frozenset(), SAMPLES), requests, max_response_tokens=1)
    counts = np.bincount([int(t.response_ids[0]) for t in result], minlength=tiny.VOCABULARY)
    with torch.no_grad():
        expected = SAMPLES * torch.softmax(model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1].double(), 0).numpy()
    assert ((counts - expected) ** 2 / expected).sum() < 99.6  # chi-square, 60 degrees of freedom, p = 0.001


def test_cancellation_takes_effect_at_the_next_token() -> None:
    calls = iter([False, False, True])
    running = TorchEngine(tiny.causal("llama"), frozenset(), 4).generate(
        tiny.requests(4), SamplingParameters(12), 0, lambda: next(calls)
    )
    with pytest.raises(Cancelled):
        next(running)
    assert next(calls, None) is None


def test_non_finite_weights_stop_generation() -> None:
    model = tiny.causal("llama")
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(ComputationFailed, match="not finite at response token 0"):
        tiny.generated(TorchEngine(model, STOPS, 4), tiny.requests(3))


def test_inference_mode_is_off_between_trajectories() -> None:
    running = TorchEngine(tiny.causal("llama"), STOPS, 8).generate(
        tiny.requests(8), SamplingParameters(12), 0, lambda: False
    )
    next(running)
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


def test_new_weights_are_used_immediately() -> None:
    model, requests = tiny.causal("llama"), tiny.requests(6)
    engine = TorchEngine(model, STOPS, 8)
    tiny.generated(engine, requests)
    model.load_state_dict(tiny.causal("llama", seed=1).state_dict())
    fresh = TorchEngine(tiny.causal("llama", seed=1), STOPS, 8)
    assert [t.response_ids.tolist() for t in tiny.generated(engine, requests)] == [
        t.response_ids.tolist() for t in tiny.generated(fresh, requests)
    ]


@pytest.mark.parametrize(
    ("prompt", "limit", "message"),
    [
        ([3] * 60, 5, "positions for 64"),
        ([], 5, "at least one token"),
        ([3, tiny.VOCABULARY], 5, "vocabulary"),
        ([-1], 5, "vocabulary"),
        ([3], 0, "max_response_tokens"),
    ],
)
def test_an_invalid_request_is_refused_at_the_call(prompt: list[int], limit: int, message: str) -> None:
    requests = [GenerationRequest(TrajectoryId("r", 0, 0, 0), np.array(prompt, np.int32))]
    with pytest.raises(InvalidRequest, match=message):
        TorchEngine(tiny.causal("llama"), STOPS, 4).generate(requests, SamplingParameters(limit), 0, lambda: False)


def test_an_empty_request_gives_no_trajectories() -> None:
    assert tiny.generated(TorchEngine(tiny.causal("llama"), STOPS, 4), []) == []


def test_a_sequence_may_fill_every_position() -> None:
    requests = [GenerationRequest(TrajectoryId("r", 0, 0, 0), np.array([3] * 59, np.int32))]
    result = tiny.generated(TorchEngine(tiny.causal("gpt2"), frozenset(), 4), requests, max_response_tokens=5)
    assert len(result[0].response_ids) == 5


def test_a_model_that_ignores_padding_decodes_without_a_cache() -> None:
    model = tiny.causal("gpt2")
    TorchEngine(model, STOPS, 4)
    forward = model.transformer.forward

    def ignores(*arguments: Any, position_ids: torch.Tensor | None = None, **others: Any) -> Any:
        return forward(*arguments, **others)

    model.transformer.forward = ignores
    with structlog.testing.capture_logs() as logs:
        engine = TorchEngine(model, STOPS, 4)
    reasons = [entry["reason"] for entry in logs if entry["event"] == "decodes without a cache"]
    assert len(reasons) == 1
    assert "differs from a forward pass over the whole sequence by" in reasons[0]
    requests = tiny.requests(9)
    result = tiny.generated(engine, requests, seed=4)
    assert [item.response_ids.tolist() for item in result] == [plain(model, request, 12, 1, 4) for request in requests]


def test_a_model_that_attends_to_later_tokens_is_refused() -> None:
    model = tiny.causal("bert", initializer_range=0.5)
    with pytest.raises(ModelError, match=r"BertLMHeadModel: generation .* differs from a forward pass over the whole"):
        TorchEngine(model, STOPS, 4)


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("slots", [2, 32])
def test_greedy_and_sampled_requests_share_a_batch(slots: int, static: bool) -> None:
    model, requests = tiny.causal("llama"), tiny.requests(12)
    engine = TorchEngine(model, STOPS, slots, static)
    mixed = [replace(request, greedy=index % 3 == 0) for index, request in enumerate(requests)]
    result = tiny.generated(engine, mixed, seed=4, temperature=0.8, top_k=9)
    sampled = tiny.generated(engine, requests, seed=4, temperature=0.8, top_k=9)
    greedy = tiny.generated(engine, requests, seed=4, temperature=0.0)
    for request, item, *others in zip(mixed, result, sampled, greedy, strict=True):
        expected = others[request.greedy]
        assert item.response_ids.tolist() == expected.response_ids.tolist()
        assert np.allclose(item.log_probs, expected.log_probs, atol=1e-5)


def test_a_finished_row_that_stays_in_the_batch_takes_no_columns_from_the_others() -> None:
    model = tiny.causal("llama")
    generator = np.random.default_rng(0)
    # Fewer than an eighth of 16 rows have finished while those that joined later decode on.
    limits = [40] + [30] * 15 + [40] * 15
    requests = [
        GenerationRequest(
            TrajectoryId("r", 0, index, 0), generator.integers(2, 61, 5).astype(np.int32), max_tokens=limit
        )
        for index, limit in enumerate(limits)
    ]
    engine = TorchEngine(model, frozenset(), 16, static=False)
    for trajectory in engine.trajectories(requests, SamplingParameters(40), 7):
        ids = torch.from_numpy(np.concatenate([trajectory.prompt_ids, trajectory.response_ids]).astype(np.int64))
        with torch.no_grad():
            log_probs = model(input_ids=ids[None]).logits[0].log_softmax(-1)[4:-1].gather(1, ids[5:, None])[:, 0]
        assert np.allclose(trajectory.log_probs, log_probs, atol=1e-5)


def test_models_without_attention_decode_with_a_cache_without_static_buffers() -> None:
    assert TorchEngine(tiny.causal("mamba"), STOPS, 4, static=False).decoding == "cache"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_keeps_its_state_in_itself_decodes_without_a_cache(dtype: torch.dtype) -> None:
    model = tiny.causal("recurrent_gemma").to(dtype)
    assert TorchEngine(model, STOPS, 4).decoding == "no cache"
