"""vLLM reads weights from the memory that they are in."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from quartet.errors import EngineFailed, OutOfMemory, ServiceFailed
from quartet.weight_transfer import shared_memory
from quartet.weight_transfer.receiver import WeightMirror
from quartet.weight_transfer.shared_memory import Memory, machine
from quartet.weight_transfer.source import WeightSource
from tests.detached_engines.test_contract import load, requests, run
from tests.detached_engines.tiny_checkpoint import arrays, expected_digests, host_tensor, weight_set
from tests.unit.weight_transfer.samples import LocalPeer, opened

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: make engines", allow_module_level=True)

from tests.detached_engines.vllm_engine import BreakableVLLM

RUN = "run"
NORM = "model.norm.weight"


@pytest.fixture
def source() -> Iterator[WeightSource]:
    source = WeightSource(num_threads=1)
    yield source
    source.close()


@pytest.fixture
def updates(vllm: BreakableVLLM, monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """The regions of every update from here on."""
    regions: list[list[list[int]]] = []
    update = vllm._process.update_weights

    def record(places: list[list[int]], tensors: Mapping[str, list[Any]]) -> None:
        regions.append(places)
        update(places, tensors)

    monkeypatch.setattr(vllm._process, "update_weights", record)
    return regions


def inodes(regions: Iterable[Sequence[int]]) -> set[int]:
    """Return which memory the regions are."""
    return {os.stat(f"/proc/{pid}/fd/{fd}").st_ino for pid, fd, _ in regions}


@pytest.mark.parametrize("shares", [True, False])
def test_weights_are_read_from_the_memory_of_the_source_or_of_the_generator(
    vllm: BreakableVLLM, updates: list[list[list[int]]], shares: bool
) -> None:
    source, mirror = WeightSource(num_threads=1, shares=shares), WeightMirror(num_threads=1)
    for version in (0, 1):
        tensors = {name: host_tensor(values) for name, values in arrays(seed=version).items()}
        digest = source.publish(version, tensors.items(), run=RUN)
        pulled = mirror.pull([LocalPeer(source)], RUN, version, digest, 10.0)
        held = vllm.load_weights(pulled.weight_set, pulled.changed)
        assert held == {name: source.tensor_digests()[name] for name in tensors}
        memories = source._memories if shares else mirror._memories
        expected = {(os.getpid(), memory.region.fd, 0) for memory in memories if memory.region is not None}
        assert inodes(updates[-1]) == inodes(expected)
        assert not (vllm._folder / "weights.safetensors").exists()
        mirror.release()
    mirror.close()
    source.close()


def test_private_memory_is_copied_for_the_time_of_an_update(
    vllm: BreakableVLLM, updates: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine()
    before = opened()
    load(vllm, arrays(seed=1))
    ((pid, _, _),) = updates[-1]
    assert (pid, opened()) == (os.getpid(), before)
    weights = weight_set(arrays(seed=2), 2)
    monkeypatch.setattr(shared_memory, "free_memory_bytes", lambda: 1000)
    with pytest.raises(OutOfMemory):
        vllm.load_weights(weights, weights.tensors.keys())
    monkeypatch.undo()
    monkeypatch.setattr(shared_memory.Allocator, "_new", lambda _, size: Memory(np.empty(size, np.uint8)))
    with pytest.raises(ServiceFailed, match="has no memory that vLLM's processes can map"):
        vllm.load_weights(weights, weights.tensors.keys())
    monkeypatch.undo()
    assert vllm.load_weights(weights, weights.tensors.keys()) == expected_digests(weights)


@pytest.mark.parametrize(
    ("region", "place", "message"),
    [
        ({"fd": 0}, {}, "no sealed memory"),
        ({"fd": 2**20}, {}, "cannot map the shared memory of process"),
        ({}, {"dtype": "F64"}, r"model\.norm\.weight: F64 \[128\] in region 0 of 1 is no tensor"),
        ({}, {"shape": [-1]}, "is no tensor"),
        ({}, {"shape": [1] * 9}, "is no tensor"),
        ({}, {"region": 1}, "in region 1 of 1 is no tensor"),
        ({}, {"offset": 2**26}, "512 bytes at offset 67108864 do not fit a region of 67108864 bytes"),
        ({}, {"offset": 2**26 - 64}, "do not fit"),
        ({}, {"offset": -64}, "do not fit"),
        ({}, {"offset": 2}, "do not fit"),
    ],
)
def test_a_place_that_is_none_is_refused_and_the_next_update_works(
    vllm: BreakableVLLM, source: WeightSource, region: dict[str, int], place: dict[str, Any], message: str
) -> None:
    source.publish(0, {NORM: host_tensor(arrays(seed=1)[NORM])}.items(), run=RUN)
    shared = source._memories[0].region
    assert shared is not None
    regions = [[os.getpid(), {"fd": shared.fd, **region}["fd"], len(shared.data)]]
    tensor = {"dtype": "F32", "shape": [128], "region": 0, "offset": 0, **place}
    with pytest.raises(ServiceFailed, match=message):
        vllm._process.update_weights(regions, {NORM: list(tensor.values())})
    load(vllm, arrays(seed=1))
    assert len(run(vllm, requests(2))) == 2


def test_an_update_that_does_not_finish_needs_another_engine(
    vllm: BreakableVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> None:
        raise RuntimeError("no memory for a layer")

    load(vllm, arrays(seed=1))
    with monkeypatch.context() as patch:
        patch.setattr(vllm._process.llm, "finish_weight_update", fail)
        weights = weight_set(arrays(seed=2), 2)
        with pytest.raises(EngineFailed, match="finish_weight_update failed: no memory for a layer"):
            vllm.load_weights(weights, weights.tensors.keys())
    vllm._process.call(vllm._process.llm.finish_weight_update(), "finish_weight_update")
    load(vllm, arrays(seed=1))
