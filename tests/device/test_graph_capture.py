"""Capture of decode steps as CUDA graphs: models that cannot be captured, and a lack of memory."""

from __future__ import annotations

from typing import Any

import pytest
import structlog
import torch

from quartet.config.models import LoraConfig
from quartet.model_files.memory import CACHE_COLUMNS, graph_columns
from quartet.models.generation.static_decoding import StaticDecoder
from quartet.models.generation.torch_engine import TorchEngine
from quartet.models.weights.lora import add_adapter
from quartet.weight_transfer.tensors import WeightSet
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
    assert all(
        columns <= size <= max(CACHE_COLUMNS, columns * 9 / 8 + CACHE_COLUMNS) for columns, size in sizes.items()
    )
    assert all(size % CACHE_COLUMNS == 0 for size in sizes.values())
    assert list(sizes.values()) == sorted(sizes.values())


def test_all_captures_use_one_stream_also_those_of_other_engines(gpu: PretendedGpu) -> None:
    for kind in ("llama", "gpt2"):
        decode(TorchEngine(on_gpu(tiny.causal(kind)), frozenset(), 4))
    assert len(gpu.capture_streams) == gpu.attempts > 2
    assert len(set(map(id, gpu.capture_streams))) == 1
    assert gpu.capture_streams[0] is not gpu.stream


@pytest.mark.parametrize("longest", [1050, 1100, 3000])
def test_steps_after_a_restart_have_the_sizes_of_those_before(gpu: PretendedGpu, longest: int) -> None:
    there = on_gpu(tiny.causal("llama", max_position_embeddings=4096))
    restarted, old = (StaticDecoder(there, graphs=True) for _ in range(2))
    old.prepare(4, 4000)
    sizes = []
    for decoder in (old, restarted):
        decoder.prepare(3, longest)
        sizes.append([(decoder._step_rows(rows), decoder._step_columns(longest)) for rows in (1, 2, 3)])
        assert sizes[-1][0][1] <= decoder._held[1]
    assert sizes[0] == sizes[1]


def test_a_failed_capture_leaves_the_thread_on_its_stream_and_no_memory_pool_in_use(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert not gpu.recording_pools
    assert not gpu.held_pools


def test_an_engine_that_frees_everything_captures_again_and_draws_the_same_tokens(gpu: PretendedGpu) -> None:
    engine = TorchEngine(on_gpu(tiny.causal("llama")), frozenset(), 4)
    before, captures = decode(engine), len(gpu.captures)
    engine.sleep(everything=False)
    assert (decode(engine), len(gpu.captures)) == (before, captures)
    engine.sleep()
    assert engine._static is not None
    assert engine._static._cache is None
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
    adapters = [add_adapter(model, "base", LoraConfig(rank=3, alpha=12.0)) for model in (models[0], on_gpu(models[1]))]
    engines = [TorchEngine(adapter.model, frozenset(), 4, merged=adapter) for adapter in adapters]
    first = [decode(engine) for engine in engines]
    captures = len(gpu.captures)
    for adapter, engine in zip(adapters, engines, strict=True):
        with torch.no_grad():
            for parameter in adapter.parameters():
                parameter.fill_(0.1)
        engine.load_weights(WeightSet(0, b"", {}), [])
    second = [decode(engine) for engine in engines]
    assert first[0] == first[1] != second[0] == second[1]
    assert len(gpu.captures) == captures > 0
