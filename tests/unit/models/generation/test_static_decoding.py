"""Static decoding, compared with the tokens and log-probs of ordinary decoding. Only CUDA graphs need a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quartet.config.models import LoraConfig
from quartet.contract.generation import SamplingParameters
from quartet.contract.trajectory import Trajectory
from quartet.errors import Cancelled, ComputationFailed
from quartet.model_files.memory import CACHE_COLUMNS
from quartet.models.generation import decode_cache, static_decoding, torch_engine
from quartet.models.generation.static_decoding import StaticDecoder, unsupported_reason
from quartet.models.generation.torch_engine import TorchEngine
from quartet.models.generation.trial import TrialResult
from quartet.models.weights.lora import add_adapter
from tests.unit.models import tiny

STOPS = frozenset({tiny.EOS, 7, 9})
HOST_TRANSFERS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::lift_fresh", "aten::is_nonzero", "aten::equal")
"""Operations that transfer data between host and device. The capture of a CUDA graph refuses them."""


@pytest.fixture(scope="module", autouse=True)
def _measured_once() -> Iterator[None]:
    """Let each engine and each model have its own trials, but for that of batch invariance, which no test here reads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_engine, "trial_result", lambda *_: TrialResult(True, "passed", ""))
        yield


def static(model: Any, slots: int = 32) -> TorchEngine:
    """Return an engine that uses static decoding. The model must support it."""
    engine = TorchEngine(model, STOPS, slots)
    assert engine._static is not None
    return engine


def ordinary(model: Any, slots: int = 64) -> TorchEngine:
    return TorchEngine(model, STOPS, slots, static=False)


def tokens(result: list[Trajectory]) -> list[list[int]]:
    return [trajectory.response_ids.tolist() for trajectory in result]


def log_probs(result: list[Trajectory]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.concatenate([trajectory.log_probs for trajectory in result])


# The torch engine's tests compare the static decoding of each kind with a plain loop.
@pytest.mark.parametrize(
    ("kind", "slots"),
    [
        ("gpt2", 7),
        ("llama", 64),
        *(pytest.param(kind, 7, marks=pytest.mark.slow) for kind in tiny.KINDS if kind != "gpt2"),
    ],
)
def test_tokens_and_log_probs_equal_those_of_ordinary_decoding(kind: str, slots: int) -> None:
    model, requests = tiny.causal(kind), tiny.requests(24)
    expected = tiny.generated(ordinary(model), requests, temperature=0.8)
    result = tiny.generated(static(model, slots), requests, temperature=0.8)
    assert tokens(result) == tokens(expected)
    assert np.allclose(log_probs(result), log_probs(expected), atol=1e-5)


def test_a_step_reads_more_cache_columns_as_rows_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    model, columns_read = tiny.causal("llama", max_position_embeddings=256), set()
    requests = tiny.requests(12, lengths=(1, 90))
    compute = StaticDecoder._compute

    def record_columns(self: StaticDecoder, rows: int, columns: int) -> None:
        columns_read.add(columns)
        compute(self, rows, columns)

    expected = tiny.generated(ordinary(model, 5), requests, max_response_tokens=70, ignore_eos=True)
    monkeypatch.setattr(StaticDecoder, "_compute", record_columns)
    engine = TorchEngine(model, STOPS, 5)
    result = tiny.generated(engine, requests, max_response_tokens=70, ignore_eos=True)
    assert tokens(result) == tokens(expected)
    assert np.allclose(log_probs(result), log_probs(expected), atol=1e-5)
    assert {64, 96, 128, 160} <= columns_read <= {64, 96, 128, 160, 192}


def test_a_sequence_may_fill_every_position() -> None:
    requests = tiny.requests(3, lengths=(59, 60))
    expected = tiny.generated(
        TorchEngine(tiny.causal("gpt2"), frozenset(), 4, static=False), requests, max_response_tokens=5
    )
    result = tiny.generated(TorchEngine(tiny.causal("gpt2"), frozenset(), 4), requests, max_response_tokens=5)
    assert tokens(result) == tokens(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_are_supported(dtype: torch.dtype) -> None:
    model, requests = tiny.causal("qwen2").to(dtype), tiny.requests(8)
    expected = tiny.generated(ordinary(model, 8), requests)
    result = tiny.generated(static(model, 8), requests)
    # Rounding may change a draw, and with it all later tokens. So only the first tokens are compared.
    first = [[t.log_probs[0] for t in some] for some in (result, expected)]
    assert np.allclose(*first, atol=0.05)


def test_decoding_uses_the_adapter() -> None:
    model, requests = tiny.causal("llama"), tiny.requests(8)
    plain = tokens(tiny.generated(static(model), requests))
    add_adapter(model, "base", LoraConfig(rank=2, alpha=64.0), 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.05)
    expected = tokens(tiny.generated(ordinary(model, 32), requests))
    assert tokens(tiny.generated(static(model), requests)) == expected != plain


@pytest.mark.parametrize("kind", ["mistral", "bloom"])
def test_an_unsupported_model_uses_ordinary_decoding_and_is_logged_once(kind: str) -> None:
    model, requests = tiny.causal(kind), tiny.requests(8)
    with structlog.testing.capture_logs() as lines:
        engine = TorchEngine(model, STOPS, 4)
        results = [tokens(tiny.generated(engine, requests)) for _ in range(2)]
    assert results == [tokens(tiny.generated(ordinary(model, 4), requests))] * 2
    [line] = lines
    assert (line["log_level"], line["model"]) == ("info", type(model).__name__)
    assert "window" in line["reason"]


def test_a_model_with_different_logits_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_cache._TokenLayer, "update", lambda self, *_, **__: (self.keys, self.values))
    reason = unsupported_reason(tiny.causal("llama"), graphs=False)
    assert reason is not None
    assert reason.startswith("logits differ by")


def test_a_model_that_raises_is_unsupported_but_a_lack_of_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[Exception] = [RuntimeError("operation not permitted when stream is capturing\nmore")]

    def failing(*_: Any) -> None:
        raise raised[0]

    monkeypatch.setattr(StaticDecoder, "_compute", failing)
    model = tiny.causal("llama")
    assert unsupported_reason(model, False) == "RuntimeError: operation not permitted when stream is capturing"
    raised[0] = torch.OutOfMemoryError("no memory")
    with pytest.raises(torch.OutOfMemoryError):
        unsupported_reason(model, False)


def test_earlier_generations_do_not_change_the_bits() -> None:
    model, requests = tiny.causal("llama", max_position_embeddings=256), tiny.requests(12)
    fresh = tiny.generated(static(model), requests)
    used = static(model)
    tiny.generated(used, tiny.requests(30, step=1, lengths=(1, 90)), max_response_tokens=60)
    again = tiny.generated(used, requests)
    assert tokens(again) == tokens(fresh)
    assert log_probs(again).tobytes() == log_probs(fresh).tobytes()


def test_other_rows_in_the_batch_do_not_change_the_bits_of_a_row() -> None:
    model = tiny.causal("llama")

    @torch.inference_mode()
    def first_row(other: list[int], finished: bool) -> torch.Tensor:
        decoder, prefilled = StaticDecoder(model, False), decode_cache.prefill_cache(model)
        decoder.prepare(2, 20)
        model(input_ids=torch.tensor([[5, 6, 7, 8], other]), past_key_values=prefilled, use_cache=True)
        decoder.fill([0, 1], [0, 1], [3, 4], prefilled)
        decoder.begin(slice(0, 2), [np.arange(3), np.arange(4)])
        if finished:
            decoder.rest(np.array([1]))
        return torch.stack([decoder.logits(torch.tensor([token, other[0]]))[0].clone() for token in (8, 3, 4)])

    expected = first_row([1, 2, 3, 4], False)
    assert torch.equal(first_row([20, 30, 40, 50], False), expected)
    assert torch.equal(first_row([20, 30, 40, 50], True), expected)


@pytest.mark.parametrize("removed", [True, False])
@torch.inference_mode()
def test_finished_rows_never_exceed_the_buffer(removed: bool) -> None:
    model = tiny.causal("llama", max_position_embeddings=256)
    prefilled = decode_cache.prefill_cache(model)
    decoder = StaticDecoder(model, False, recorded=True)
    decoder.prepare(4, CACHE_COLUMNS + 4)
    model(input_ids=torch.full((4, CACHE_COLUMNS + 2), 5), past_key_values=prefilled, use_cache=True)
    decoder.fill([0, 1, 2, 3], [0, 1, 2, 3], [3, 3, 3, CACHE_COLUMNS + 2], prefilled)
    decoder.begin(slice(0, 4), [np.arange(length) for length in (3, 3, 3, CACHE_COLUMNS + 2)])
    if removed:
        decoder.keep(3, torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
    rows = 3 if removed else 4
    for _ in range(5):
        if not removed:
            decoder.rest(np.array([3]))
        decoder.logits(torch.full((rows,), 5))
    assert set(decoder._steps) == {(4, CACHE_COLUMNS)}


def test_the_cache_fits_the_largest_generation_and_is_reused() -> None:
    engine = static(tiny.causal("llama", max_position_embeddings=256), slots=6)
    tiny.generated(engine, tiny.requests(20, lengths=(60, 61)), max_response_tokens=10)
    assert engine._static is not None
    cache = engine._static._cache
    assert cache is not None
    assert (cache.tensors[0].shape[0], cache.tensors[0].shape[2]) == (8, 2 * CACHE_COLUMNS)
    tiny.generated(engine, tiny.requests(4))
    assert engine._static._cache is cache
    engine.close()
    assert engine._static is None


class ForbidHostTransfers(TorchDispatchMode):
    """Dispatch mode that refuses the operations that a graph capture refuses."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), more: Any = None) -> Any:
        assert function.name().partition(".")[0] not in HOST_TRANSFERS, function.name()
        return function(*arguments, **(more or {}))


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_step_transfers_no_data_between_host_and_device(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    compute, steps = StaticDecoder._compute, []

    def checked_compute(self: StaticDecoder, rows: int, columns: int) -> None:
        steps.append(rows)
        with ForbidHostTransfers():
            compute(self, rows, columns)

    monkeypatch.setattr(StaticDecoder, "_compute", checked_compute)
    tiny.generated(static(tiny.causal(kind), 4), tiny.requests(8))
    assert steps
    with pytest.raises(AssertionError, match="_local_scalar_dense"), ForbidHostTransfers():
        bool(torch.ones(1))


def record_captures(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Replace the capture of graphs by plain calls. Return a list that receives each captured function."""
    results: list[Callable[[], None]] = []

    def captured(compute: Callable[[], None], *_: Any) -> Callable[[], None]:
        compute()  # A capture also computes the step once before the first replay.
        results.append(compute)
        return compute

    monkeypatch.setattr(static_decoding, "_captured", captured)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return results


def test_a_step_is_captured_once_per_size_and_then_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, requests = tiny.causal("llama"), tiny.requests(40)
    expected = tokens(tiny.generated(ordinary(model), requests))
    result = record_captures(monkeypatch)
    engine = static(model, 7)
    engine._static = StaticDecoder(model, graphs=True)
    assert tokens(tiny.generated(engine, requests)) == expected
    count = len(result)
    assert 2 <= count <= 4  # The number of rows is rounded up to 7, 4, 2 or 1.
    assert tokens(tiny.generated(engine, requests)) == expected
    assert len(result) == count


def test_graphs_survive_updates_in_place_and_are_dropped_if_weights_are_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, other, requests = tiny.causal("llama"), tiny.causal("llama", seed=1), tiny.requests(6)
    expected = tokens(tiny.generated(TorchEngine(other, STOPS, 6), requests))
    result = record_captures(monkeypatch)
    engine = static(model, 6)
    engine._static = StaticDecoder(model, graphs=True)
    before = tokens(tiny.generated(engine, requests))
    count = len(result)
    model.load_state_dict(other.state_dict())
    assert tokens(tiny.generated(engine, requests)) == expected != before
    assert len(result) == count
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert tokens(tiny.generated(engine, requests)) == expected
    assert len(result) == 2 * count


def test_non_finite_weights_do_not_affect_later_generations() -> None:
    model, requests = tiny.causal("llama"), tiny.requests(6)
    engine = static(model)
    good = {name: value.clone() for name, value in model.state_dict().items()}
    expected = tokens(tiny.generated(engine, requests))
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.fill_(torch.nan)
    with pytest.raises(ComputationFailed, match="not finite"):
        tiny.generated(engine, tiny.requests(6, lengths=(30, 31)))
    model.load_state_dict(good)
    assert tokens(tiny.generated(engine, requests)) == expected


def test_a_later_generation_cancels_an_unfinished_one() -> None:
    engine = static(tiny.causal("llama"))
    first = engine.generate(tiny.requests(6), SamplingParameters(12), 0)
    next(first)
    tiny.generated(engine, tiny.requests(6, step=1))
    with pytest.raises(Cancelled, match="a later generation uses its cache"):
        list(first)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_graphs_on_a_gpu_draw_the_same_tokens_as_ordinary_decoding(kind: str) -> None:
    model, requests = tiny.causal(kind).to("cuda"), tiny.requests(40)
    assert unsupported_reason(model, graphs=True) is None
    expected = tiny.generated(TorchEngine(model, STOPS, 7, static=False), requests)
    engine = TorchEngine(model, STOPS, 7)
    for _ in range(2):
        result = tiny.generated(engine, requests)
        assert tokens(result) == tokens(expected)
        assert np.allclose(log_probs(result), log_probs(expected), atol=1e-4)


def test_attention_with_an_index_is_unsupported_although_short_sequences_show_no_difference() -> None:
    reason = unsupported_reason(tiny.causal("deepseek_v32"), graphs=False)
    assert reason is not None
    assert reason.startswith("attention with a window or an index")
