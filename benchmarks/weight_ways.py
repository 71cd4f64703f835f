"""The ways of weights from an actor to generators on one machine: GB/s to publish, and to load with digests.

The actor and each generator are processes of their own. The actor publishes bfloat16 weights of the shapes of Qwen2.5-0.5B and
1.5B; each version differs from the one before in every element. Each generator pulls it by shared memory, or as everything over
gRPC on loopback, copies it into tensors of torch and computes the digest of what they hold. All generators load at the same time.
The limit is a plain copy of the same bytes from private to shared memory, by one thread per core, in the same process and round.
"""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from benchmarks import machine
from benchmarks.options import add_shared, parser_of, publish
from benchmarks.weights import RUN, TIMEOUT, Remote, WeightRole, obey, shapes
from quartet.contract.status import Role
from quartet.models.weights.host_tensors import load_tensors
from quartet.rpc.base_servicers import WeightServicer
from quartet.rpc.clients import WeightClient
from quartet.rpc.server import Server
from quartet.system.machine import available_cores
from quartet.weight_transfer.receiver import WeightMirror
from quartet.weight_transfer.source import WeightSource
from quartet.weight_transfer.tensors import HostTensor, combined_digest

Shapes = dict[str, tuple[int, ...]]
MODELS: dict[str, Shapes] = {
    "0.5B": shapes(),
    "1.5B": shapes(layers=28, hidden=1536, intermediate=8960, keys=256),
}
CASES = [
    *(("0.5B", way, count) for count in (1, 2, 4) for way in ("shared memory", "gRPC, full")),
    ("1.5B", "shared memory", 1),
    ("1.5B", "shared memory", 2),
    ("1.5B", "gRPC, full", 1),
]
"""Models, ways and numbers of generators. More of the larger model would not fit into 24 GiB."""
COPY_BYTES = 2**29
"""Size of the memory that the plain copy writes to, again and again."""
WARM_UP = 2
"""Versions until both places of every tensor have been written. Pages that are new are cleared by the kernel first."""


@dataclass(frozen=True)
class Measured:
    """Seconds of one version of ``num_bytes``: a plain copy, the publication, and until the last generator has verified it."""

    model: str
    way: str
    generators: int
    num_bytes: int
    copy: float
    publish: float
    load: float


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(arguments if arguments is not None else sys.argv[1:])
    if given[:1] == ["serve"]:
        return serve(given[1], given[2])
    parser = parser_of("weight_ways", __doc__)
    add_shared(parser, "build/weight-ways", rounds=5)
    options = parser.parse_args(arguments)
    host = machine.describe()
    results = [measure(*case, options.rounds) for case in CASES]
    report = {"machine": host, "results": [asdict(each) for each in results]}
    publish(parser, options, report, table(results, host))
    return 0


class Actor:
    """Weights and their source."""

    def __init__(self, model: str) -> None:
        random = np.random.default_rng(0)
        self._weights = {
            name: HostTensor("BF16", shape, random.integers(0, 256, 2 * int(np.prod(shape)), np.uint8))
            for name, shape in MODELS[model].items()
        }
        self._source = WeightSource()
        self._server = Server([WeightRole(WeightServicer(self._source))], "127.0.0.1:0")
        self.address = self._server.address
        self._pool = ThreadPoolExecutor(available_cores())
        self._size = sum(tensor.data.nbytes for tensor in self._weights.values())
        fd = os.memfd_create("limit")
        os.ftruncate(fd, COPY_BYTES)
        self._target = np.frombuffer(mmap.mmap(fd, COPY_BYTES), np.uint8)

    def publish(self, version: int) -> dict[str, Any]:
        """Change every element, copy everything once, and publish."""
        for tensor in self._weights.values():
            np.bitwise_xor(tensor.data, 1 + version % 255, out=tensor.data)
        start = time.perf_counter()
        self._copy()
        copy = time.perf_counter() - start
        digest = self._source.publish(version, self._weights.items(), run=RUN)
        assert self._source.last is not None
        return {"digest": digest.hex(), "copy": copy, "publish": self._source.last.seconds, "bytes": self._size}

    def _copy(self) -> None:
        parts, offset = [], 0
        for tensor in self._weights.values():
            offset = 0 if offset + tensor.data.nbytes > COPY_BYTES else offset
            parts.append((self._target[offset : offset + tensor.data.nbytes], tensor.data))
            offset += tensor.data.nbytes
        parts.sort(key=lambda part: -part[0].nbytes)
        list(self._pool.map(lambda part: np.copyto(*part), parts))


class Generator:
    """Tensors of torch that take the weights."""

    address = ""

    def __init__(self, model: str) -> None:
        self._mirror, self._chunks = WeightMirror(), WeightMirror(shares=False)
        self._targets = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in MODELS[model].items()}
        self._clients: dict[str, WeightClient] = {}

    def load(self, address: str, version: int, digest: str, way: str) -> float:
        """Pull a version, load it, and compare the digest. Return the seconds."""
        client = self._clients.setdefault(address, WeightClient(Role.ACTOR, address))
        mirror = self._mirror if way == "shared memory" else self._chunks
        if way != "shared memory":
            mirror.reset()
        start = time.perf_counter()
        pulled = mirror.pull([client], RUN, version, bytes.fromhex(digest), TIMEOUT)
        held = combined_digest(load_tensors(self._targets, pulled.weight_set.tensors, pulled.changed))
        mirror.release()
        seconds = time.perf_counter() - start
        assert held.hex() == digest
        assert pulled.way == ("shared memory" if way == "shared memory" else "full")
        return seconds


def serve(kind: str, model: str) -> int:
    """Run a process of the measurement."""
    target = Actor(model) if kind == "actor" else Generator(model)
    return obey(target, target.address)


def measure(model: str, way: str, count: int, rounds: int) -> Measured:
    """Return the medians of ``rounds`` versions."""
    with ExitStack() as stack:
        actor, *generators = (
            Remote(stack, kind, model, module="benchmarks.weight_ways") for kind in ("actor", *["generator"] * count)
        )
        copies, publications, loads = [], [], []
        for version in range(WARM_UP + rounds):
            published = actor.call("publish", version)
            for each in generators:
                each.send("load", actor.first, version, published["digest"], way)
            seconds = max(each.receive() for each in generators)
            if version >= WARM_UP:
                copies.append(published["copy"])
                publications.append(published["publish"])
                loads.append(seconds)
        size = published["bytes"]
    medians = map(statistics.median, (copies, publications, loads))
    return Measured(model, way, count, size, *medians)


def table(results: Sequence[Measured], host: str) -> str:
    """Return the table for the page."""
    lines = [
        f"{host}. Medians. Publish: copy and digest. Load: until the last of the generators has the weights in tensors of torch, "
        "and has computed their digest; GB/s are those of each generator.",
        "",
        "| weights | way | generators | plain copy, GB/s | publish, GB/s | of the copy | load, GB/s | of the copy | both, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in results:
        size = each.num_bytes / 1e9
        lines.append(
            f"| {each.model}, {size:.2f} GB | {each.way} | {each.generators} | {size / each.copy:.2f} "
            f"| {size / each.publish:.2f} | {each.copy / each.publish:.0%} | **{size / each.load:.2f}** "
            f"| {each.copy / each.load:.0%} | {each.publish + each.load:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
