"""Batch invariance of the torch engine on a CPU: the other requests in a batch change no bit of a response."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quartet.config.models import LoraConfig
from quartet.contract.generation import GenerationRequest
from quartet.contract.trajectory import Trajectory
from quartet.models.generation import decode_slots
from quartet.models.generation import torch_engine as engine_module
from quartet.models.generation.static_decoding import padded_rows
from quartet.models.generation.torch_engine import TorchEngine
from quartet.models.torch_settings import torch_threads
from quartet.models.weights.lora import add_adapter
from tests.unit.models import tiny

STOPS = frozenset({tiny.EOS, 7, 9})
TOKENS = 12
Bits = dict[Any, tuple[bytes, bytes]]


@pytest.fixture(scope="module", autouse=True)
def _measured_once() -> None:
    """Let each engine and each model have its own trials."""


@pytest.fixture(scope="module", params=tiny.KINDS)
def engine(request: pytest.FixtureRequest) -> TorchEngine:
    return TorchEngine(tiny.causal(request.param, max_position_embeddings=256), STOPS, 256)


def bits(engine: TorchEngine, requests: list[GenerationRequest], slots: int = 256, **changes: Any) -> Bits:
    """Return the bytes of token ids and log-probs of each response."""
    engine._max_concurrent = slots
    trajectories: list[Trajectory] = tiny.generated(engine, requests, max_response_tokens=TOKENS, **changes)
    return {item.id: (item.response_ids.tobytes(), item.log_probs.tobytes()) for item in trajectories}


def many(count: int = 40) -> list[GenerationRequest]:
    return tiny.requests(count, lengths=(1, 100))


def test_a_request_gets_the_same_bits_alone(engine: TorchEngine) -> None:
    requests = many()
    expected = bits(engine, requests)
    for request in requests[::7]:
        assert bits(engine, [request]) == {request.id: expected[request.id]}


def test_random_parts_in_random_order_get_the_same_bits(engine: TorchEngine) -> None:
    requests, generator = many(), np.random.default_rng(0)
    expected = bits(engine, requests, temperature=0.7)
    for parts in (2, 7):
        owners = generator.integers(0, parts, len(requests))
        result: Bits = {}
        for part in range(parts):
            own = [requests[index] for index in generator.permutation(np.flatnonzero(owners == part))]
            result |= bits(engine, own, temperature=0.7)
        assert result == expected


def test_requests_that_wait_for_a_slot_get_the_same_bits(engine: TorchEngine) -> None:
    requests = many()
    assert bits(engine, requests, 3) == bits(engine, requests, 16) == bits(engine, requests)


def test_the_number_of_threads_changes_no_bit(engine: TorchEngine) -> None:
    requests = many(12)
    expected = bits(engine, requests)
    with torch_threads(2):
        assert bits(engine, requests) == expected
        assert bits(engine, requests[:5], 3) == {request.id: expected[request.id] for request in requests[:5]}


def test_the_engine_declares_what_the_trial_found(engine: TorchEngine) -> None:
    assert engine.batch_invariant
    assert engine.properties.batch_invariant
    assert engine.properties.seeded


def test_an_adapter_keeps_the_bits_independent_of_the_batch() -> None:
    model = tiny.causal("llama", max_position_embeddings=256)
    add_adapter(model, "base", LoraConfig(rank=2, alpha=64.0), 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.05)
    engine, requests = TorchEngine(model, STOPS, 256), many(12)
    assert engine.batch_invariant
    expected = bits(engine, requests)
    assert {key: value for request in requests for key, value in bits(engine, [request]).items()} == expected


@pytest.mark.parametrize("kind", ["mistral", "bloom", *tiny.MIXTURES])
def test_models_without_static_decoding_and_mixtures_of_experts_are_not_batch_invariant(kind: str) -> None:
    assert not TorchEngine(tiny.causal(kind), STOPS, 8).batch_invariant


def test_a_large_model_is_tried_in_a_small_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    monkeypatch.setattr(engine_module, "INVARIANCE_FLOPS", 1.0)
    sample = decode_slots.sample_tokens

    def recorded(logits: torch.Tensor, *arguments: Any) -> Any:
        rows.append(len(logits))
        return sample(logits, *arguments)

    monkeypatch.setattr(decode_slots, "sample_tokens", recorded)
    assert TorchEngine(tiny.causal("llama"), STOPS, 64).batch_invariant
    assert max(rows) == len(engine_module.INVARIANCE_LENGTHS)


def test_padded_rows_are_multiples_of_4() -> None:
    assert [padded_rows(rows) for rows in (1, 4, 5, 16, 17, 256)] == [4, 4, 8, 16, 24, 256]
