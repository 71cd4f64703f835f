"""Weights that a generator copies from the actor's GPU: on the pretended GPU, and between two processes on a real one."""

from __future__ import annotations

import hashlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog
import torch

from quartet.errors import ServiceUnavailable
from quartet.models.generation.torch_engine import DetachedTorchEngine
from quartet.models.weights import host_tensors
from quartet.models.workers.workers import SINGLE
from quartet.services.actor.actor import Actor
from quartet.weight_transfer.cuda_ipc import BLOCK_BYTES, DeviceCopy, Libcudart, OpenedCopy, cuda_runtime, offsets_of
from quartet.weight_transfer.messages import DeviceRegion, Manifest, TensorLayout
from quartet.weight_transfer.receiver import PulledWeights, WeightMirror
from quartet.weight_transfer.source import WeightSource
from tests.device.conftest import on_gpu
from tests.device.pretended_cudart import INVALID, MEMORY, PretendedCudart
from tests.device.pretended_gpu import PretendedGpu, to_host
from tests.unit.models import tiny
from tests.unit.weight_transfer.samples import RUN, LocalPeer
from tests.waiting import wait_until

LAYOUTS = (TensorLayout("a", "F32", (3,)), TensorLayout("b", "BF16", (0, 4)), TensorLayout("c", "BF16", (BLOCK_BYTES,)))


class Machine:
    """An actor and a generator on one pretended GPU."""

    def __init__(self, kind: str = "llama") -> None:
        self.library = PretendedCudart()
        self.source = WeightSource(num_threads=1, cuda=Libcudart(0, self.library))
        self.mirror = WeightMirror(num_threads=1, cuda=Libcudart(0, self.library))
        self.kind = kind
        self.engine = DetachedTorchEngine(on_gpu(tiny.causal(kind, seed=9)), None, frozenset(), 4)
        self.peer = LocalPeer(self.source)
        self.loaded = b""

    def publish(self, version: int) -> Any:
        """Let an actor publish a version. Return its model on the host."""
        model = tiny.causal(self.kind, seed=version)
        actor = SimpleNamespace(
            _source=self.source,
            _generator=None,
            _writer=None,
            _workers=SINGLE,
            _updates=SimpleNamespace(policy_version=version, run=RUN),
            _model=on_gpu(model),
            _adapter=None,
            _device="cuda:0",
        )
        Actor._publish(actor)  # type: ignore[arg-type]
        return model

    def pull(self, version: int) -> PulledWeights:
        digest = self.source.digest_of(version)
        assert digest is not None
        return self.mirror.pull([self.peer], RUN, version, digest, timeout=20)

    def load(self, version: int) -> str:
        """Load a version as a generator does. Return the way that it came."""
        pulled = self.pull(version)
        digests = self.engine.load_weights(pulled.weight_set, list(pulled.weight_set.tensors))
        assert digests == self.source.tensor_digests()
        self.mirror.release()
        return pulled.way

    def close(self) -> None:
        self.mirror.close()
        self.source.close()


@pytest.fixture
def machine(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    # The pretended GPU has one thread.
    monkeypatch.setattr(host_tensors, "available_cores", lambda: 1)
    machine = Machine()
    yield machine
    machine.close()
    assert (machine.library.allocated, +machine.library.open) == ({}, {})


def logged(work: Callable[[], Any], level: str) -> tuple[Any, list[dict[str, Any]]]:
    with structlog.testing.capture_logs() as logs:
        result = work()
    return result, [dict(each) for each in logs if each["log_level"] == level]


def assert_holds(engine: DetachedTorchEngine, model: Any) -> None:
    held = to_host(engine._model)
    assert all(torch.equal(held[name], value) for name, value in model.state_dict().items())


def test_a_generator_copies_each_version_from_the_gpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tensors, "_write", None)  # Nothing is read from the host.
    for version in (1, 2, 3):
        model = machine.publish(version)
        assert machine.load(version) == "CUDA IPC"
        assert_holds(machine.engine, model)
    # One region for all versions, and opened for the time of a load only.
    calls = machine.library.calls
    assert (calls["cudaMalloc"], calls["cudaIpcOpenMemHandle"], calls["cudaIpcCloseMemHandle"]) == (1, 3, 3)
    copies = calls["cudaMemcpy"]
    machine.publish(3)
    assert calls["cudaMemcpy"] == copies


def test_a_version_stays_on_the_gpu_while_it_is_read(machine: Machine) -> None:
    first = machine.publish(1)
    pulled = machine.pull(1)
    machine.publish(2)
    machine.engine.load_weights(pulled.weight_set, list(pulled.weight_set.tensors))
    assert_holds(machine.engine, first)
    machine.mirror.release()
    # The copy of version 2 was left out, and that of version 3 is not.
    assert [machine.load(2), machine.publish(3) and machine.load(3)] == ["shared memory", "CUDA IPC"]


def test_only_a_generator_that_opens_handles_gets_one(machine: Machine) -> None:
    machine.publish(1)
    other = WeightMirror(num_threads=1)
    assert other.pull([machine.peer], RUN, 1, machine.source.digest_of(1) or b"", timeout=20).way == "shared memory"
    other.close()
    copy = machine.source._device_copy
    assert copy is not None
    assert not copy.readers


def test_memory_that_cannot_be_opened_is_logged_once_and_read_from_the_host(machine: Machine) -> None:
    machine.library.fails["cudaIpcOpenMemHandle"] = INVALID
    logs = []
    for version in (1, 2):
        model = machine.publish(version)
        way, lines = logged(lambda version=version: machine.load(version), "info")  # type: ignore[misc]
        assert way == "shared memory"
        assert_holds(machine.engine, model)
        logs += [each["reason"] for each in lines if each["event"].startswith("weights are read from the host")]
    assert logs == ["weights: cudaIpcOpenMemHandle on cuda:0: invalid argument (error 1)"]
    # torch would otherwise find it after its next kernel.
    assert machine.library.last_error == 0


def test_a_region_of_another_size_is_not_opened(machine: Machine) -> None:
    def change(stream: Iterator[Any]) -> Iterator[Any]:
        for message in stream:
            assert isinstance(message, Manifest)
            assert message.device is not None
            yield replace(message, device=DeviceRegion(message.device.handle, 2 * BLOCK_BYTES))

    machine.publish(1)
    machine.peer.fault = change
    assert machine.load(1) == "shared memory"


def test_without_memory_on_the_gpu_one_line_says_so_and_the_host_has_the_weights(machine: Machine) -> None:
    machine.library.fails["cudaMalloc"] = MEMORY
    _, lines = logged(lambda: [machine.publish(version) for version in (1, 2)], "warning")
    assert [(each["event"], each["reason"]) for each in lines] == [
        ("weights are not shared on the GPU", "weights: cudaMalloc on cuda:0: out of memory (error 2)")
    ]
    assert machine.load(2) == "shared memory"


def test_a_copy_that_fails_is_repeated_from_the_host(machine: Machine) -> None:
    model = machine.publish(1)
    machine.library.fails["cudaMemcpy"] = INVALID
    _, lines = logged(lambda: machine.load(1), "warning")
    assert [each["reason"] for each in lines] == ["weights: cudaMemcpy on cuda:0: invalid argument (error 1)"]
    assert_holds(machine.engine, model)


def test_bits_that_flip_on_the_gpu_never_stay_in_the_engine_100_times_of_100(machine: Machine) -> None:
    model, random = machine.publish(1), np.random.default_rng(0)
    sizes = [(layout.num_bytes, offset) for layout, offset in places(machine.source)]
    (address,) = machine.library.allocated
    memory = np.frombuffer(machine.library.memory(address), np.uint8)
    for _ in range(100):
        size, offset = sizes[int(random.integers(len(sizes)))]
        place, bit = offset + int(random.integers(size)), 1 << int(random.integers(8))
        memory[place] ^= bit
        _, lines = logged(lambda: machine.load(1), "warning")
        memory[place] ^= bit
        assert [each["reason"] for each in lines] == ["it has other bytes than the digest of the version"]
    assert_holds(machine.engine, model)
    assert logged(lambda: machine.load(1), "warning") == ("CUDA IPC", [])


def places(source: WeightSource) -> list[tuple[TensorLayout, int]]:
    return list(zip(source._layouts, offsets_of(source._layouts)[0], strict=True))


def test_memory_that_another_process_reads_is_not_freed(gpu: PretendedGpu) -> None:
    machine = Machine()
    machine.publish(1)
    machine.pull(1)
    machine.source.close()
    assert len(machine.library.allocated) == 1
    machine.mirror.close()
    assert not +machine.library.open


def test_a_region_has_blocks_of_its_own(gpu: PretendedGpu) -> None:
    library = PretendedCudart()
    copy = DeviceCopy(Libcudart(0, library))
    tensors = [torch.ones(layout.shape, device="cuda:0", dtype=torch.bfloat16) for layout in LAYOUTS]
    tensors[0] = torch.ones(3, device="cuda:0")
    assert copy.write(LAYOUTS, tensors)
    assert copy.region is not None
    assert copy.region.num_bytes == 3 * BLOCK_BYTES
    with pytest.raises(ServiceUnavailable, match="expected a region of 2097152 bytes on the GPU, got 6291456"):
        OpenedCopy(Libcudart(0, library), copy.region, LAYOUTS[:1])
    copy.close()


def test_a_process_shares_memory_of_its_gpu_if_the_config_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def config(**rollout: bool) -> Any:
        return SimpleNamespace(rollout=SimpleNamespace(**{"share_weights": True, "share_gpu_memory": True, **rollout}))

    monkeypatch.setattr(torch.version, "cuda", "0.9")
    assert cuda_runtime(config(), None) is None
    assert cuda_runtime(config(share_gpu_memory=False), 0) is None
    assert cuda_runtime(config(share_weights=False), 0) is None
    runtime, lines = logged(lambda: cuda_runtime(config(), 0), "warning")
    assert runtime is None
    assert [each["event"] for each in lines] == ["weights are not shared on the GPU"]
    assert lines[0]["reason"].startswith("libcudart.so.0: cannot open")


LARGE = (LAYOUTS[0], TensorLayout("c", "F32", (2**26 + 3,)))


def _read(region: DeviceRegion, device: int, results: Connection) -> None:
    """Copy the tensors of another process to this one's device. Send their hash, then hold the memory open."""
    opened = OpenedCopy(Libcudart(device), region, LARGE)
    digest = hashlib.sha256()
    for layout in LARGE:
        target = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=f"cuda:{device}")
        opened.copy(layout.name, target)
        digest.update(target.cpu().numpy().tobytes())
    results.send(digest.hexdigest())
    signal.pause()


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
@pytest.mark.parametrize("device", [0, 1])
def test_another_process_copies_from_a_gpu_and_leaves_nothing_when_it_is_killed(device: int) -> None:
    if device >= torch.cuda.device_count() or (device and not torch.cuda.can_device_access_peer(device, 0)):
        pytest.skip("needs two GPUs with peer access")
    values = [torch.randint(0, 256, (layout.num_bytes,), dtype=torch.uint8) for layout in LARGE]
    expected = hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()
    there = [value.to("cuda:0") for value in values]
    copy = DeviceCopy(Libcudart(0))
    torch.cuda.synchronize(0)
    before = torch.cuda.mem_get_info(0)[0]
    assert copy.write(LARGE, there)
    context = multiprocessing.get_context("spawn")
    for _ in range(3):
        results, sender = context.Pipe(duplex=False)
        reader = context.Process(target=_read, args=(copy.region, device, sender))
        reader.start()
        sender.close()
        assert results.poll(120)
        assert results.recv() == expected
        reader.kill()
        reader.join(60)
    copy.close()
    # What the driver keeps for itself is smaller than the region.
    assert wait_until(lambda: torch.cuda.mem_get_info(0)[0] >= before - 2**25)
