"""Capture of decode steps as CUDA graphs: models that cannot be captured, and a lack of memory."""

from __future__ import annotations

from typing import Any

import pytest
import structlog
import torch

from quartet.models.generation.merged_torch import MergedTorchEngine
from quartet.models.generation.static_decoding import COLUMNS, StaticDecoder, graph_columns
from quartet.models.generation.torch_engine import TorchEngine
from quartet.models.weights.lora import add_adapter
from tests.device.conftest import on_gpu
from tests.device.pretended_gpu import PretendedGpu
from tests.unit.models import tiny

COMPUTE = StaticDecoder._compute


def decode(engine: TorchEngine) -> list[list[int]]:
    return [trajectory.response_ids.tolist() for trajectory in tiny.generated(engine, tiny.requests(6))]


def test_a_model_that_waits_for_the_device_is_not_captured(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def reading(self: StaticDecoder, rows: int, columns: int) -> None:
        COMPUTE(self, rows, columns)
        float(self._positions.sum())

    monkeypatch.setattr(StaticDecoder, "_compute", reading)
    stream, model = gpu.stream, tiny.causal("llama")
    with structlog.testing.capture_logs() as lines:
        result = decode(TorchEngine(on_gpu(model), frozenset(), 4))
    assert result == decode(TorchEngine(model, frozenset(), 4, static=False))
    assert "called a synchronizing CUDA operation" in lines[0]["reason"]
    assert (gpu.attempts, gpu.stream, torch.cuda.get_sync_debug_mode()) == (0, stream, 0)


def test_few_graphs_serve_long_sequences_and_read_little_more_than_is_in_use() -> None:
    sizes = {columns: graph_columns(columns) for columns in range(1, 8193)}
    assert len(set(sizes.values())) == 40
    assert all(columns <= size <= max(COLUMNS, columns * 9 / 8 + COLUMNS) for columns, size in sizes.items())
    assert all(size % COLUMNS == 0 for size in sizes.values())


def test_a_failed_capture_leaves_the_thread_on_its_stream(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: StaticDecoder, rows: int, columns: int) -> None:
        COMPUTE(self, rows, columns)
        if gpu.capturing:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(StaticDecoder, "_compute", failing)
    stream, model = gpu.stream, tiny.causal("llama")
    assert decode(TorchEngine(on_gpu(model), frozenset(), 4)) == decode(
        TorchEngine(model, frozenset(), 4, static=False)
    )
    assert gpu.attempts
    assert gpu.stream is stream


def test_an_engine_that_frees_everything_captures_again_and_draws_the_same_tokens(gpu: PretendedGpu) -> None:
    engine = TorchEngine(on_gpu(tiny.causal("llama")), frozenset(), 4)
    before, captures = decode(engine), len(gpu.captures)
    engine.release()
    assert (decode(engine), len(gpu.captures)) == (before, captures)
    engine.release(everything=True)
    assert engine._static is not None
    assert not engine._static._keys_values
    assert decode(engine) == before
    assert len(gpu.captures) > captures


def test_a_lack_of_memory_in_the_trial_is_raised_and_the_next_generation_tries_again(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = [True]

    def compute(self: StaticDecoder, rows: int, columns: int) -> Any:
        if full[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return COMPUTE(self, rows, columns)

    monkeypatch.setattr(StaticDecoder, "_compute", compute)
    engine = TorchEngine(on_gpu(tiny.causal("llama")), frozenset(), 4)
    with pytest.raises(torch.OutOfMemoryError):
        decode(engine)
    full[0] = False
    decode(engine)
    assert gpu.captures


def test_captured_steps_read_an_adapter_that_is_merged_again(gpu: PretendedGpu) -> None:
    models = [tiny.causal("llama") for _ in range(2)]
    adapters = [add_adapter(model, "base", 3, 12.0) for model in (models[0], on_gpu(models[1]))]
    engines = [MergedTorchEngine(adapter, frozenset(), 4) for adapter in adapters]
    first = [decode(engine) for engine in engines]
    captures = len(gpu.captures)
    for adapter, engine in zip(adapters, engines, strict=True):
        with torch.no_grad():
            for parameter in adapter.parameters():
                parameter.fill_(0.1)
        engine.weights_changed()
    second = [decode(engine) for engine in engines]
    assert first[0] == first[1] != second[0] == second[1]
    assert len(gpu.captures) == captures > 0
