"""Weights from the actor to generators: GB/s of full sets and deltas, bytes of deltas, and the distribution tree.

Sources and generators are separate processes that use real gRPC over TCP on loopback; every receiver verifies every digest. The
weights have the shapes of Qwen2.5-0.5B and are drawn from N(0, 0.02). An update moves each float32 master weight by the same
distance, with a random sign: Adam's first step moves every weight by the learning rate, and later steps by less, so this is the
most that one step changes. The result is rounded to bfloat16. The tree is measured with smaller weights, and once with a limit
on the bytes that each process sends per second, in place of network cards. Writes the results below build/ and the table into
docs/evidence/performance.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import structlog

from benchmarks import machine
from benchmarks.options import add_shared, parser_of, positive, publish
from quartet.contract.arrays import FloatArray
from quartet.contract.status import Role, ServiceStatus
from quartet.rpc.base_servicers import WeightServicer
from quartet.rpc.clients import WeightClient
from quartet.rpc.server import Server
from quartet.system.child_processes import tied_to_parent
from quartet.weight_transfer.receiver import WeightMirror
from quartet.weight_transfer.source import WeightSource
from quartet.weight_transfer.store import WeightStore
from quartet.weight_transfer.tensors import HostTensor, TensorType
from quartet.weight_transfer.tree import FAN_OUT, distribution_tree

RUN = "weights"
TIMEOUT = 600.0
HIDDEN, LAYERS, INTERMEDIATE, KEYS, VOCABULARY = 896, 24, 4864, 128, 151_936
"""Dimensions of Qwen2.5-0.5B. ``KEYS``: 2 key-value heads of 64. Embedding and head are tied."""
DEVIATION = 0.02
"""Standard deviation of the weights."""
DISTANCES = (1e-6, 8e-6, 1e-5, 8e-5)
"""Distances that an update moves each weight: one optimizer step, and eight in the same direction, at two learning rates."""
GENERATORS = (1, 8, 64)
TREE_PARAMETERS = 4_000_000
"""Parameters of the weights for the tree."""
EGRESS = 20e6
"""Bytes per second that each process sends in the measurement with a limit."""
PROCESSES = 4
"""Processes of the simulated generators."""


@dataclass(frozen=True)
class Transfer:
    """One version, published and pulled. ``distance``: of the update; 0 for the first version, which is sent as everything."""

    dtype: str
    distance: float
    changed_elements: float
    num_bytes: int
    sent_bytes: int
    publish_seconds: float
    pull_seconds: float


@dataclass(frozen=True)
class Distribution:
    """A version on ``generators``: seconds until the last one has it. ``fan_out`` 0: all pull from the actor."""

    generators: int
    kind: str
    fan_out: int
    egress: float
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    if (arguments or sys.argv[1:])[:1] == ["serve"]:
        return serve((arguments or sys.argv[1:])[1:])
    parser = parser_of("weights", __doc__)
    add_shared(parser, "build/weights", rounds=2)
    options = parser.parse_args(arguments)
    host = machine.describe()
    transfers = [
        *transfers_of("BF16", shapes(), DISTANCES, options.rounds),
        *transfers_of("F32", shapes(layers=6), (1e-6,), options.rounds),
    ]
    distributions = distribute(options.rounds)
    report = {
        "machine": host,
        "transfers": [asdict(each) for each in transfers],
        "distributions": [asdict(each) for each in distributions],
    }
    publish(parser, options, report, table(transfers, distributions, host))
    return 0


def shapes(
    layers: int = LAYERS, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE, keys: int = KEYS
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a Qwen2.5 model, by default of 0.5B, by its name in the checkpoint."""
    result: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, size in (("q", hidden), ("k", keys), ("v", keys)):
            result[f"{prefix}self_attn.{name}_proj.weight"] = (size, hidden)
            result[f"{prefix}self_attn.{name}_proj.bias"] = (size,)
        result[f"{prefix}self_attn.o_proj.weight"] = (hidden, hidden)
        for name in ("gate", "up"):
            result[f"{prefix}mlp.{name}_proj.weight"] = (intermediate, hidden)
        result[f"{prefix}mlp.down_proj.weight"] = (hidden, intermediate)
        for name in ("input", "post_attention"):
            result[f"{prefix}{name}_layernorm.weight"] = (hidden,)
    return result


class Trainer:
    """Float32 master weights, and their rounded copies."""

    def __init__(self, dtype: TensorType, tensors: dict[str, tuple[int, ...]]) -> None:
        self._random = np.random.default_rng(0)
        self._dtype = dtype
        self._shapes = tensors
        self._masters: dict[str, FloatArray] = {
            name: self._random.standard_normal(int(np.prod(shape)), np.float32) * np.float32(DEVIATION)
            for name, shape in tensors.items()
        }

    def step(self, distance: float) -> None:
        """Move every master weight by ``distance``, with random signs."""
        for values in self._masters.values():
            bits = np.frombuffer(self._random.bytes(-(-len(values) // 8)), np.uint8)
            signs = np.unpackbits(bits, count=len(values))
            values += np.where(signs, np.float32(distance), np.float32(-distance))

    def weights(self) -> dict[str, HostTensor]:
        """Return the rounded weights, in new memory if the type is not float32."""
        return {
            name: HostTensor(
                self._dtype, self._shapes[name], (values if self._dtype == "F32" else bfloat16(values)).view(np.uint8)
            )
            for name, values in self._masters.items()
        }


def bfloat16(values: FloatArray) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Return the values rounded to the nearest bfloat16, ties to even, as uint16."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


# Server processes. They obey commands on standard input, one JSON array per line, and print one JSON value for each.


class WeightRole:
    """A role that only serves weights."""

    role = Role.ACTOR

    def __init__(self, servicer: WeightServicer) -> None:
        self._servicer = servicer

    def register(self, server: Any) -> None:
        self._servicer.register(server)

    def status(self) -> ServiceStatus:
        return ServiceStatus(Role.ACTOR)

    def abandoned(self) -> tuple[str, float]:
        return "", 0.0

    def close(self) -> None:
        """Do nothing."""


class LimitedServicer(WeightServicer):
    """A servicer that sends at most ``rate`` bytes per second, over all its streams."""

    def __init__(self, store: WeightStore) -> None:
        super().__init__(store)
        self.rate = 0.0
        self._lock = threading.Lock()

    def GetWeights(self, request: Any, context: Any) -> Iterator[Any]:
        for response in super().GetWeights(request, context):
            if self.rate:
                with self._lock:
                    time.sleep(len(response) / self.rate)
            yield response


class Source:
    """The actor: a trainer and its weights."""

    def __init__(self) -> None:
        self._source = WeightSource(capacity=2)
        self._servicer = LimitedServicer(self._source)
        self._server = Server([WeightRole(self._servicer)], "127.0.0.1:0")
        self.addresses = [self._server.address]
        self._trainer: Trainer | None = None
        self._before: dict[str, HostTensor] = {}

    def start(self, dtype: TensorType, layers: int, parameters: int) -> dict[str, Any]:
        """Create and publish version 0: Qwen's shapes, or one tensor per million parameters."""
        few = {f"t{index}": (1000, 1000) for index in range(parameters // 1_000_000)}
        self._source.reset()
        self._trainer = Trainer(dtype, dict(few) or shapes(layers))
        return self._publish(0)

    def step(self, version: int, distance: float) -> dict[str, Any]:
        """Update and publish. ``changed_elements``: fraction of the elements that changed."""
        assert self._trainer is not None
        self._trainer.step(distance)
        return self._publish(version)

    def limit(self, rate: float) -> None:
        self._servicer.rate = rate

    def _publish(self, version: int) -> dict[str, Any]:
        assert self._trainer is not None
        tensors = self._trainer.weights()
        self._source.publish(version, tensors.items(), run=RUN)
        assert self._source.last is not None
        last = self._source.last
        return {
            "version": last.policy_version,
            "digest": last.weights_digest.hex(),
            "total_bytes": last.total_bytes,
            "seconds": last.seconds,
        }


class Generators:
    """Simulated generators of one process. Each has its own mirror and server."""

    def __init__(self, count: int) -> None:
        self._mirrors = [WeightMirror(num_threads=1, shares=False) for _ in range(count)]
        self._servicers = [LimitedServicer(mirror) for mirror in self._mirrors]
        self._servers = [Server([WeightRole(servicer)], "127.0.0.1:0") for servicer in self._servicers]
        self.addresses = [server.address for server in self._servers]
        self._clients: dict[str, WeightClient] = {}
        self._pool = ThreadPoolExecutor(count)

    def pull(self, version: int, digest: str, sources: dict[str, list[str]]) -> int:
        """Pull a version into the mirrors with these addresses. Return the bytes received."""

        def one(address: str) -> int:
            clients = [self._client(source) for source in sources[address]]
            mirror = self._mirrors[self.addresses.index(address)]
            return mirror.pull(clients, RUN, version, bytes.fromhex(digest), TIMEOUT, TIMEOUT).bytes_received

        return sum(self._pool.map(one, sources))

    def reset(self) -> None:
        for mirror in self._mirrors:
            mirror.reset()

    def limit(self, rate: float) -> None:
        for servicer in self._servicers:
            servicer.rate = rate

    def _client(self, address: str) -> WeightClient:
        return self._clients.setdefault(address, WeightClient(Role.ACTOR, address))


def serve(arguments: Sequence[str]) -> int:
    """Run a server process until its standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights serve")
    parser.add_argument("--generators", type=positive, help="number of generators; the actor without it")
    options = parser.parse_args(arguments)
    target = Source() if options.generators is None else Generators(options.generators)
    return obey(target, target.addresses)


def obey(target: Any, first: Any) -> int:
    """Print ``first``, then run the commands of a ``Remote`` until standard input ends."""
    # A source that is busy refuses calls, which is no error here. Standard output is for the results.
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    print(json.dumps(first), flush=True)
    for line in sys.stdin:
        name, *values = json.loads(line)
        print(json.dumps(getattr(target, name)(*values)), flush=True)
    return 0


class Remote:
    """A server process. ``first``: the value that it prints at its start."""

    def __init__(self, stack: ExitStack, *options: str, module: str = "benchmarks.weights", waits: bool = True) -> None:
        """``waits``: wait for the first line. With False, ``first`` is None, and the caller reads it with ``receive``."""
        command = tied_to_parent([sys.executable, "-m", module, "serve", *options])
        self._process = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        stack.callback(self._process.terminate)
        self.first: Any = self.receive() if waits else None

    def call(self, name: str, *values: Any) -> Any:
        """Run a command and return its result."""
        self.send(name, *values)
        return self.receive()

    def send(self, name: str, *values: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, *values]) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a server process ended with status {self._process.wait()}; its error is above")
        return json.loads(line)


# Measurements.


def transfers_of(
    dtype: TensorType, tensors: dict[str, tuple[int, ...]], distances: Sequence[float], rounds: int
) -> list[Transfer]:
    """Measure a full set, and a delta for each distance: the best seconds of several rounds."""
    layers = sum(name.endswith("o_proj.weight") for name in tensors)
    with ExitStack() as stack:
        source = Remote(stack)
        client = WeightClient(Role.ACTOR, source.first[0])
        stack.callback(client.close)
        mirror = WeightMirror(shares=False)
        stack.callback(mirror.close)
        published = source.call("start", dtype, layers, 0)
        results = []

        def pull() -> Any:
            version, digest = published["version"], bytes.fromhex(published["digest"])
            return mirror.pull([client], RUN, version, digest, TIMEOUT)

        def measured(distance: float, changed: float, before: Callable[[], None]) -> Transfer:
            seconds, publish = [], []
            for _ in range(rounds):
                before()
                # The mirror would choose the faster kind.
                mirror.speeds.clear()
                pulled = pull()
                seconds.append(pulled.seconds)
                publish.append(published["seconds"])
            assert pulled.way == ("delta" if distance else "full")
            return Transfer(
                dtype,
                distance,
                changed,
                published["total_bytes"],
                pulled.bytes_received,
                min(publish),
                min(seconds),
            )

        results.append(measured(0.0, 1.0, mirror.reset))
        for distance in distances:
            held: list[np.ndarray[Any, Any]] = []

            def step(distance: float = distance, held: list[Any] = held) -> None:
                nonlocal published
                weights = mirror.weight_set()
                assert weights is not None
                held[:] = [weights.tensors["model.layers.0.mlp.up_proj.weight"].data.copy()]
                published = source.call("step", published["version"] + 1, distance)

            transfer = measured(distance, 0.0, step)
            weights = mirror.weight_set()
            assert weights is not None
            element = np.dtype("<u4" if dtype == "F32" else "<u2")
            after = weights.tensors["model.layers.0.mlp.up_proj.weight"].data.view(element)
            results.append(replace(transfer, changed_elements=float((held[0].view(element) != after).mean())))
        return results


def distribute(rounds: int) -> list[Distribution]:
    """Measure the time until 1, 8 and 64 generators hold a version: from the actor only, and by trees."""
    results = []
    with ExitStack() as stack:
        source = Remote(stack)
        root = source.first[0]
        workers = [Remote(stack, "--generators", str(max(GENERATORS) // PROCESSES)) for _ in range(PROCESSES)]
        # Neighbours in the tree are in different processes.
        everyone = [address for group in zip(*(worker.first for worker in workers), strict=True) for address in group]
        published = source.call("start", "BF16", 0, TREE_PARAMETERS)

        def pull(count: int, fan_out: int) -> float:
            addresses = everyone[:count]
            tree = distribution_tree(root, addresses, fan_out=fan_out) if fan_out else dict.fromkeys(addresses, (root,))
            start = time.perf_counter()
            for worker in workers:
                mine = {address: tree[address] for address in addresses if address in worker.first}
                worker.send("pull", published["version"], published["digest"], mine)
            for worker in workers:
                worker.receive()
            return time.perf_counter() - start

        def reset() -> None:
            for worker in workers:
                worker.call("reset")

        pull(max(GENERATORS), FAN_OUT)  # Connections are open from here on.
        for egress in (0.0, EGRESS):
            for remote in (source, *workers):
                remote.call("limit", egress)
            for count in GENERATORS:
                for fan_out in (0, 2, 3, 4) if count > 1 else (0,):
                    seconds: dict[str, list[float]] = {"full": [], "delta": []}
                    for _ in range(1 if egress else rounds):
                        reset()
                        seconds["full"].append(pull(count, fan_out))
                        published = source.call("step", published["version"] + 1, DISTANCES[0])
                        seconds["delta"].append(pull(count, fan_out))
                    results += [
                        Distribution(count, kind, fan_out, egress, statistics.median(values))
                        for kind, values in seconds.items()
                    ]
    return results


def table(transfers: Sequence[Transfer], distributions: Sequence[Distribution], host: str) -> str:
    """Return the tables for the page."""
    lines = [
        f"{host}. Publish: the actor's time to copy and hash a version. Pull: until the delta is encoded, "
        "and a generator has received, decoded and verified it. GB/s count the weights, not the bytes sent. The best of two "
        "rounds or more.",
        "",
        "| weights | each weight moves by | elements changed | GB | GB sent | fraction | publish, s | pull, s | pull, GB/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in transfers:
        name = f"{each.dtype}, {'delta' if each.distance else 'full'}"
        update = (f"{each.distance:.0e}", f"{each.changed_elements:.1%}") if each.distance else ("", "")
        lines.append(
            f"| {name} | {update[0]} | {update[1]} | {each.num_bytes / 1e9:.2f} | {each.sent_bytes / 1e9:.3f} "
            f"| {each.sent_bytes / each.num_bytes:.1%} "
            f"| {each.publish_seconds:.2f} | {each.pull_seconds:.2f} | **{each.num_bytes / each.pull_seconds / 1e9:.2f}** |"
        )
    lines += [
        "",
        f"Seconds until all generators hold {2 * TREE_PARAMETERS / 1e6:.0f} MB in bfloat16 (delta: each weight moves "
        f"by {DISTANCES[0]:.0e}), from the actor only and by trees of several fan-outs:",
        "",
    ]
    fan_outs = sorted({each.fan_out for each in distributions})
    lines += [
        f"| each process sends | generators | kind | {' | '.join(f'fan-out {n}' if n else 'actor only' for n in fan_outs)} |",
        f"|---|---|---|{'---|' * len(fan_outs)}",
    ]
    seconds = {(d.egress, d.generators, d.kind, d.fan_out): d.seconds for d in distributions}
    for egress, count, kind in dict.fromkeys(key[:3] for key in seconds):
        cells = (seconds.get((egress, count, kind, fan_out)) for fan_out in fan_outs)
        limit = f"at most {egress / 1e6:.0f} MB/s" if egress else "without limit"
        lines.append(
            f"| {limit} | {count} | {kind} | {' | '.join('' if cell is None else f'{cell:.2f}' for cell in cells)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
