"""Weights of a trainer of two ranks, to two generators: peak memory of each process, and GB/s.

Each rank holds half of bfloat16 weights of the shapes of Qwen2.5-0.5B, as FSDP shards. Each version differs from the one before
in every element. "gathered": all ranks make every tensor whole, and rank 0 copies it. "slices": each rank writes its shards into
the memory that the ranks share. "machines": the same, but each has memory of its own, as if they were on two machines. Both
generators pull at the same time, copy the weights into tensors of torch and compute the digest of what they hold. All are
processes of one machine; gloo and gRPC use loopback. Peaks are those of the last versions.
"""

from __future__ import annotations

import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Shard

from benchmarks import machine
from benchmarks.options import add_shared, parser_of, publish
from benchmarks.weights import RUN, TIMEOUT, Remote, WeightRole, obey, shapes
from quartet.contract.status import Role
from quartet.models.weights.host_tensors import complete_tensors, host_tensor, load_tensors
from quartet.models.workers.group import join_group, store_connection
from quartet.models.workers.weight_slices import weight_slices
from quartet.rpc.base_servicers import WeightServicer
from quartet.rpc.clients import WeightClient
from quartet.rpc.server import Server
from quartet.weight_transfer.process_group import GroupSenders, GroupSettings
from quartet.weight_transfer.receiver import WeightMirror
from quartet.weight_transfer.slices import SliceWriter
from quartet.weight_transfer.source import WeightSource
from quartet.weight_transfer.tensors import combined_digest

RANKS = 2
GENERATORS = 2
CASES = (
    ("gathered", "shared memory"),
    ("slices", "shared memory"),
    ("gathered", "full"),
    ("slices", "full"),
    ("slices", "process group"),
    ("machines", "full"),
    ("machines", "process group"),
)
"""How the ranks publish, and how the weights reach the generators."""
WARM_UP = 2
"""Versions until both places of every tensor have been written."""
SAMPLE_SECONDS = 0.002
GROUP = GroupSettings("gloo", 60.0)


@dataclass(frozen=True)
class Memory:
    """Peaks of a process in bytes: growth of ``private`` memory since ``Peaks.start``, and ``shared`` memory that it touched."""

    private: int
    shared: int


@dataclass(frozen=True)
class Measured:
    """Seconds of a version of ``num_bytes``, and the peaks of each rank and generator."""

    publication: str
    way: str
    num_bytes: int
    publish: float
    load: float
    ranks: tuple[Memory, ...]
    generators: tuple[Memory, ...]


class Peaks:
    """Peaks of the memory of this process, from the first sample of ``start`` on."""

    def __init__(self) -> None:
        self._base, self._private, self._shared = 0, 0, 0
        threading.Thread(target=self._sample, daemon=True).start()

    def start(self) -> None:
        self._base, self._shared = resident()
        self._private = self._base

    def report(self) -> tuple[int, int]:
        return self._private - self._base, self._shared

    def _sample(self) -> None:
        while True:
            private, shared = resident()
            self._private, self._shared = max(self._private, private), max(self._shared, shared)
            time.sleep(SAMPLE_SECONDS)


def resident() -> tuple[int, int]:
    """Return the resident bytes of this process: its own, and those of shared memory."""
    lines = dict(
        line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Rss")
    )
    return 1024 * int(lines["RssAnon"].split()[0]), 1024 * int(lines["RssShmem"].split()[0])


class Rank:
    """A rank of the trainer. Rank 0 serves the weights."""

    def __init__(self, rank: int, port: int, publication: str) -> None:
        torch.set_num_threads(1)
        self._workers = join_group(rank, RANKS, ("127.0.0.1", port))
        random = torch.Generator().manual_seed(rank)
        self._weights = {name: self._shard(shape, random) for name, shape in shapes().items()}
        self._writer, senders = None, None
        if publication != "gathered":
            firsts = list(range(RANKS)) if publication == "machines" else ()
            senders = GroupSenders(GROUP, rank, RANKS, store_connection())
            self._writer = SliceWriter(self._workers, None, firsts, senders, "127.0.0.1")
            if rank:
                senders.follow(self._writer.memory)
        self._source = None if rank else WeightSource(writer=self._writer, senders=senders)
        self.address = ""
        if self._source is not None:
            self._server = Server([WeightRole(WeightServicer(self._source))], "127.0.0.1:0")
            self.address = self._server.address
        self._peaks = Peaks()

    def _shard(self, shape: tuple[int, ...], random: torch.Generator) -> DTensor:
        step = -(-shape[0] // RANKS)
        begin = min(shape[0], self._workers.rank * step)
        rows = min(shape[0], begin + step) - begin
        local = torch.randint(-(2**15), 2**15, (rows, *shape[1:]), dtype=torch.int16, generator=random)
        return DTensor.from_local(
            local.view(torch.bfloat16), self._workers.mesh, [Shard(0)], shape=shape, stride=strides(shape)
        )

    def publish(self, version: int) -> dict[str, Any]:
        """Change every element, and publish."""
        for value in self._weights.values():
            value.to_local().view(torch.int16).bitwise_xor_(1 + version % 255)
        self._workers.smallest(0)
        self._peaks.start()
        start = time.perf_counter()
        if self._writer is None:
            tensors = complete_tensors(self._weights, self._workers)
            if self._source is None:
                deque(tensors, maxlen=0)
            else:
                self._source.publish(version, ((name, host_tensor(each)) for name, each in tensors), run=RUN)
        else:
            slices = weight_slices(self._weights, self._workers)
            if self._source is None:
                self._writer.follow(slices)
            else:
                self._source.publish_slices(version, slices, run=RUN)
        seconds = time.perf_counter() - start
        last = None if self._source is None else self._source.last
        return {
            "seconds": seconds,
            "digest": last.weights_digest.hex() if last else "",
            "bytes": last.total_bytes if last else 0,
        }

    def memory(self) -> tuple[int, int]:
        return self._peaks.report()


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


class Generator:
    """Tensors of torch that take the weights."""

    address = ""

    def __init__(self, way: str) -> None:
        shares, grouped = way == "shared memory", way == "process group"
        self._mirror, self._way = WeightMirror(shares=shares, group=GROUP if grouped else None), way
        self._targets = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes().items()}
        self._client: WeightClient | None = None
        self._peaks = Peaks()

    def load(self, address: str, version: int, digest: str) -> dict[str, float]:
        """Pull a version, load it, and compare the digest."""
        self._client = self._client or WeightClient(Role.ACTOR, address)
        self._mirror.reset()
        self._peaks.start()
        start = time.perf_counter()
        pulled = self._mirror.pull([self._client], RUN, version, bytes.fromhex(digest), TIMEOUT)
        held = combined_digest(load_tensors(self._targets, pulled.weight_set.tensors, pulled.changed))
        self._mirror.release()
        seconds = time.perf_counter() - start
        assert (pulled.way, held.hex()) == (self._way, digest)
        return {"seconds": seconds, "pull": pulled.seconds}

    def memory(self) -> tuple[int, int]:
        return self._peaks.report()


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(arguments if arguments is not None else sys.argv[1:])
    if given[:2] == ["serve", "rank"]:
        rank = Rank(int(given[2]), int(given[3]), given[4])
        return obey(rank, rank.address)
    if given[:2] == ["serve", "generator"]:
        return obey(Generator(given[2]), "")
    parser = parser_of("weight_ranks", __doc__)
    add_shared(parser, "build/weight-ranks", rounds=3)
    options = parser.parse_args(arguments)
    host = machine.describe()
    results = [measure(*case, options.rounds) for case in CASES]
    report = {"machine": host, "results": [asdict(each) for each in results]}
    publish(parser, options, report, table(results, host))
    return 0


def measure(publication: str, way: str, rounds: int) -> Measured:
    """Return the medians of ``rounds`` versions, and the largest peaks."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    module = "benchmarks.weight_ranks"
    with ExitStack() as stack:
        # A rank prints its first line when all have met.
        ranks = [
            Remote(stack, "rank", str(rank), str(port), publication, module=module, waits=False)
            for rank in range(RANKS)
        ]
        addresses = [rank.receive() for rank in ranks]
        generators = [Remote(stack, "generator", way, module=module) for _ in range(GENERATORS)]
        publications, loads, peaks = [], [], []
        for version in range(WARM_UP + rounds):
            for rank in ranks:
                rank.send("publish", version)
            published = [rank.receive() for rank in ranks]
            for generator in generators:
                generator.send("load", addresses[0], version, published[0]["digest"])
            seconds = max(generator.receive()["seconds"] for generator in generators)
            if version >= WARM_UP:
                publications.append(max(each["seconds"] for each in published))
                loads.append(seconds)
                peaks.append([each.call("memory") for each in (*ranks, *generators)])
        size = published[0]["bytes"]
    largest = [Memory(*map(int, each)) for each in np.array(peaks).max(axis=0)]
    medians = map(statistics.median, (publications, loads))
    return Measured(publication, way, size, *medians, tuple(largest[:RANKS]), tuple(largest[RANKS:]))


def table(results: Sequence[Measured], host: str) -> str:
    """Return the table for the page."""
    size = results[0].num_bytes
    lines = [
        f"{host}. {RANKS} ranks, {GENERATORS} generators, {size / 1e9:.2f} GB of weights. Medians of seconds, and largest peaks "
        "in MB: memory of the process's own, beyond what it had before the version (its weights, and a generator's host copy), + "
        "pages of shared memory that it has touched. A shared page counts for every process that touches it, but is there once; "
        "the segment has two versions.",
        "",
        "| published | way | publish, s | load, GB/s of each generator | rank 0 | rank 1 | generators |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in results:
        first, second = map(cell, each.ranks)
        rate = size / 1e9 / each.load
        lines.append(
            f"| {each.publication} | {each.way} | {each.publish:.2f} | **{rate:.2f}** | {first} | {second} "
            f"| {', '.join(map(cell, each.generators))} |"
        )
    return "\n".join(lines)


def cell(memory: Memory) -> str:
    """Return the peaks of a process."""
    return f"{memory.private / 1e6:.0f} + {memory.shared / 1e6:.0f}"


if __name__ == "__main__":
    sys.exit(main())
