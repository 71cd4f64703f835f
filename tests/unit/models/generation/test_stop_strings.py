"""Stop strings in the torch engine: the end of rows, whatever the batch, and turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from quartet.contract.generation import SamplingParameters
from quartet.contract.trajectory import FinishReason
from quartet.engines.stop_strings import StopStrings
from quartet.errors import InvalidRequest
from quartet.models.generation.torch_engine import TorchEngine
from tests.unit.models import tiny

STOPS = frozenset({tiny.EOS})
LIMIT = 12


def decode(token_ids: Any) -> str:
    """Return one character per token: a to h by the remainder of the id."""
    return "".join("abcdefgh"[int(token) % 8] for token in token_ids)


def expected_end(ids: Sequence[int], strings: Sequence[str]) -> int:
    """Return the tokens up to the first stop string, by a loop over whole prefixes."""
    for count in range(1, len(ids) + 1):
        if any(string in decode(ids[:count]) for string in strings):
            return count
    return len(ids)


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("slots", [1, 3, 32])
def test_responses_are_those_without_stop_strings_up_to_the_first_one(slots: int, static: bool) -> None:
    model, requests, strings = tiny.causal("llama"), tiny.requests(12), ("a", "hb", "cd")
    engine = TorchEngine(model, STOPS, slots, static, decode)
    free = tiny.generated(engine, requests, seed=4, temperature=0.9)
    ended = tiny.generated(engine, requests, seed=4, temperature=0.9, stop_strings=strings)
    ends = [expected_end(item.response_ids.tolist(), strings) for item in free]
    assert [item.response_ids.tolist() for item in ended] == [
        item.response_ids[:end].tolist() for item, end in zip(free, ends, strict=True)
    ]
    for item, whole, end in zip(ended, free, ends, strict=True):
        assert np.allclose(item.log_probs, whole.log_probs[:end], atol=1e-5)
        stopped = any(string in decode(item.response_ids) for string in strings)
        assert item.finish_reason is (FinishReason.EOS if stopped else whole.finish_reason)
    assert sum(end < len(item.response_ids) for item, end in zip(free, ends, strict=True)) > 2


def test_a_streamed_response_ends_at_a_stop_string() -> None:
    model, requests = tiny.causal("llama"), tiny.requests(6)
    engine = TorchEngine(model, STOPS, 8, decode=decode)
    sampling = SamplingParameters(LIMIT, 0.9, stop_strings=("a", "hb"))
    expected = tiny.generated(engine, requests, seed=4, temperature=0.9, stop_strings=("a", "hb"))
    for request, item in zip(requests, expected, strict=True):
        assert list(engine.stream(request, sampling, seed=4)) == item.response_ids.tolist()


def test_without_stop_strings_no_token_is_decoded() -> None:
    def refused(token_ids: Any) -> str:
        raise AssertionError("decoded")

    engine = TorchEngine(tiny.causal("llama"), STOPS, 8, decode=refused)
    assert tiny.generated(engine, tiny.requests(4), seed=1)


def test_an_engine_without_a_tokenizer_refuses_stop_strings() -> None:
    engine = TorchEngine(tiny.causal("llama"), STOPS, 8)
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        list(engine.generate(tiny.requests(2), SamplingParameters(4, stop_strings=("a",)), 0))


def test_the_check_of_a_whole_response_agrees_with_the_engine() -> None:
    engine = TorchEngine(tiny.causal("llama"), STOPS, 8, decode=decode)
    strings = ("hb", "cd")
    for item in tiny.generated(engine, tiny.requests(12), seed=4, temperature=0.9, stop_strings=strings):
        end = StopStrings(strings, decode, 512).end_of(item.response_ids)
        assert end in (None, len(item.response_ids))
