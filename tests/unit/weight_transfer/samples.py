"""Random weights, and sources in this process that may fail."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from quartet.errors import QuartetError, ServiceUnavailable
from quartet.weight_transfer.messages import CHUNK_BYTES, Message, WeightsRequest
from quartet.weight_transfer.receiver import PulledWeights, WeightMirror
from quartet.weight_transfer.source import WeightSource
from quartet.weight_transfer.store import WeightStore
from quartet.weight_transfer.tensors import (
    ITEM_BYTES,
    HostTensor,
    TensorType,
    WeightSet,
    combined_digest,
    tensor_digest,
)

Tensors = dict[str, HostTensor]
RUN = "run"
REGION = "memfd:quartet-weights"
GONE = ServiceUnavailable("actor at local: unavailable")


def tensor(shape: tuple[int, ...], seed: int = 0, dtype: TensorType = "BF16") -> HostTensor:
    """Return random bytes as a tensor. They include NaN payloads."""
    size = int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES[dtype]
    return HostTensor(dtype, shape, np.random.default_rng(seed).integers(0, 256, size).astype(np.uint8))


def weights(seed: int = 0) -> Tensors:
    """Return a small set: a tensor of three chunks, small ones of all types, an empty one and a scalar."""
    return {
        "model.embed.weight": tensor((CHUNK_BYTES + 100, 1), seed),
        "model.norm.weight": tensor((64,), seed + 1, "F32"),
        "model.proj.weight": tensor((300, 70), seed + 2, "F16"),
        "model.empty": tensor((0, 4), seed + 3),
        "model.scale": tensor((), seed + 4, "F32"),
    }


def changed(tensors: Mapping[str, HostTensor], seed: int, fraction: float = 0.05, *names: str) -> Tensors:
    """Return a copy in which about this fraction of the elements of the named tensors, or of all, has other bits."""
    random = np.random.default_rng(seed)
    results = {}
    for name, old in tensors.items():
        data = old.data.copy()
        if not names or name in names:
            elements = data.view(f"<u{ITEM_BYTES[old.dtype]}")
            mask = random.random(len(elements)) < fraction
            elements[mask] ^= random.integers(1, 2**16, int(mask.sum())).astype(elements.dtype)
        results[name] = HostTensor(old.dtype, old.shape, data)
    return results


def digest(tensors: Mapping[str, HostTensor]) -> bytes:
    return combined_digest({name: tensor_digest(each) for name, each in tensors.items()})


def assert_equal(held: WeightSet | None, expected: Mapping[str, HostTensor]) -> None:
    """Fail unless the weights are bit-identical to the expected ones."""
    assert held is not None
    assert list(held.tensors) == sorted(expected)
    for name, each in expected.items():
        assert (held.tensors[name].dtype, held.tensors[name].shape) == (each.dtype, each.shape)
        assert held.tensors[name].data.tobytes() == each.data.tobytes(), name
    assert held.digest == digest(expected)


@dataclass
class LocalPeer:
    """A source in this process. ``fault`` may change, cut or fail the messages of a stream."""

    store: WeightStore
    address: str = "actor at local"
    fault: Callable[[Iterator[Message]], Iterator[Message]] | None = None
    requests: list[WeightsRequest] = field(default_factory=list)
    host: str = "127.0.0.1"

    def get_weights(self, request: WeightsRequest, timeout: float) -> Iterator[Message]:
        self.requests.append(request)
        stream = self.store.stream(request)
        return stream if self.fault is None else self.fault(stream)


def cut_after(count: int, error: QuartetError) -> Callable[[Iterator[Message]], Iterator[Message]]:
    """Return a fault: the stream fails after ``count`` messages."""

    def fault(stream: Iterator[Message]) -> Iterator[Message]:
        for index, message in enumerate(stream):
            if index == count:
                raise error
            yield message
        raise error

    return fault


def history(count: int) -> list[Tensors]:
    """Return the weights of versions 0 to ``count`` - 1."""
    versions = [weights()]
    for number in range(1, count):
        versions.append(changed(versions[-1], number, 0.02 * number))
    return versions


def pull(
    mirror: WeightMirror, source: WeightSource | WeightMirror | LocalPeer, version: int, tensors: Tensors
) -> PulledWeights:
    peer = source if isinstance(source, LocalPeer) else LocalPeer(source)
    return mirror.pull([peer], RUN, version, digest(tensors), timeout=20)


def published(source: WeightSource) -> tuple[Tensors, Tensors]:
    """Publish versions 0 and 1, whose difference has several messages' worth of chunks."""
    before, after = weights(), changed(weights(), 1, 0.3)
    source.publish(0, before.items(), run=RUN)
    source.publish(1, after.items(), run=RUN)
    return before, after


def mapped() -> int:
    """Return how many regions of weights this process maps."""
    return sum(REGION in line for line in Path("/proc/self/maps").read_text().splitlines())


def opened() -> int:
    """Return how many descriptors of regions this process has."""
    return sum(REGION in target for target in descriptor_targets())


def descriptor_targets() -> list[str]:
    """Return what the open descriptors of this process are of. Its threads may close some of them meanwhile."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    return targets
