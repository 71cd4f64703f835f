"""Gigabytes per second of codec and RPC, and calls per second.

The codec encodes arrays to the bytes of a message, and decodes and checks them. RPC calls the reference over real gRPC on
loopback; the server in a separate process responds at once. Bytes count in both directions. Writes the results below build/ and
the table into docs/evidence/performance.md. The exit status is 1 if the codec is slower than LIMIT.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks import machine
from benchmarks.options import add_shared, parser_of, publish
from benchmarks.simulated import replicas
from quartet.codec.experience import decode_experience, encode_experience
from quartet.codec.messages import from_message, to_message
from quartet.codec.tensors import floats_from_proto
from quartet.config.deployment import TimeoutsConfig
from quartet.contract.arrays import FloatArray
from quartet.contract.status import Role
from quartet.contract.trajectory import TokenBatch
from quartet.contract.update import Experience
from quartet.rpc.clients import ReferenceClient
from quartet.rpc.limits import MAX_MESSAGE_BYTES
from quartet.v1 import tensor_pb2, trajectory_pb2
from tests.contract.tensors import tensor_message

LIMIT = 1e9
"""Minimum bytes per second of the codec, at the sizes in a step."""
MEBIBYTE = 2**20
SIZES = (1, 4, 64, 256)
"""MiB of a tensor, a batch or a request."""
MAX_USUAL_MESSAGE = 16
"""MiB of the largest message in a usual step: 16 sequences of 200,000 tokens. LIMIT does not apply to larger ones."""
EXPERIENCES = (100_000, 1_000_000, 10_000_000)
"""Response tokens."""
LENGTH = 1_000
"""Tokens of a sequence. A tenth of it is the prompt."""
SMALL_CALLS = 500


@dataclass(frozen=True)
class Rate:
    """The best seconds to write and to read a message of ``size`` bytes."""

    kind: str
    size: int
    write: float
    read: float

    @property
    def slower(self) -> float:
        """Return the bytes per second of the slower direction."""
        return self.size / max(self.write, self.read)


@dataclass(frozen=True)
class Call:
    """A unary call. ``size``: bytes of request and response. ``seconds``: the best of several calls."""

    size: int
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("transport", __doc__)
    add_shared(parser, "build/transport", rounds=9)
    options = parser.parse_args(arguments)
    host = machine.describe()
    # The largest first, so that malloc has memory to reuse, as in a process that has run for a while.
    rates = [
        rate
        for size in reversed(SIZES)
        for rate in (batch_rate(size, options.rounds), tensor_rate(size, options.rounds))
    ][::-1]
    rates += [experience_rate(tokens, options.rounds) for tokens in EXPERIENCES]
    calls, calls_per_second = rpc(options.rounds)
    report = {
        "machine": host,
        "codec": [asdict(rate) for rate in rates],
        "rpc": [asdict(call) for call in calls],
        "calls_per_second": calls_per_second,
    }
    publish(parser, options, report, table(rates, calls, calls_per_second, host))
    return 0 if all(rate.slower >= LIMIT for rate in rates if counts(rate)) else 1


def counts(rate: Rate) -> bool:
    """Return whether LIMIT applies: to experience of any size, and to messages of a usual step."""
    return rate.kind == "experience" or rate.size <= MAX_USUAL_MESSAGE * MEBIBYTE


def best(rounds: int, work: Callable[[], object]) -> float:
    """Return the shortest duration of ``work`` in seconds, after a warm-up call."""
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def floats(count: int, seed: int = 0) -> FloatArray:
    """Return random numbers of a seed, float32 [count]."""
    return np.random.default_rng(seed).random(count, np.float32)


def batch_of(tokens: int) -> TokenBatch:
    """Return a batch with this many tokens in sequences of LENGTH; the last one may be longer."""
    count = max(1, tokens // LENGTH)
    prompts = np.full(count, LENGTH // 10, np.int32)
    responses = np.full(count, LENGTH - LENGTH // 10, np.int32)
    responses[-1] += tokens - count * LENGTH
    ids = np.random.default_rng(0).integers(0, 32_000, tokens).astype(np.int32)
    return TokenBatch(ids, prompts, responses)


def experience_of(tokens: int) -> Experience:
    """Return experience with about this many response tokens."""
    batch = batch_of(tokens * 10 // 9)
    tokens = int(batch.response_lengths.sum())
    # Six different arrays, because equal ones are stored once.
    names = ("log_probs", "reference_log_probs", "values", "advantages", "returns", "actor_mask")
    return Experience(
        run="transport",
        step=1,
        policy_version=0,
        ids=tuple(f"transport/1/{index}/0" for index in range(len(batch))),
        batch=batch,
        scores=floats(len(batch)),
        **{name: floats(tokens, seed) for seed, name in enumerate(names)},
    )


def tensor_rate(size: int, rounds: int) -> Rate:
    """Measure one float32 tensor of ``size`` MiB."""
    array = floats(size * MEBIBYTE // 4)
    data = tensor_message(array).SerializeToString()
    write = best(rounds, lambda: tensor_message(array).SerializeToString())
    read = best(rounds, lambda: floats_from_proto(tensor_pb2.Tensor.FromString(data), "tensor"))
    return Rate("tensor", len(data), write, read)


def batch_rate(size: int, rounds: int) -> Rate:
    """Measure a token batch with ``size`` MiB of token ids."""
    batch = batch_of(size * MEBIBYTE // 4)
    data = to_message(trajectory_pb2.TokenBatch, batch).SerializeToString()
    write = best(rounds, lambda: to_message(trajectory_pb2.TokenBatch, batch).SerializeToString())
    read = best(rounds, lambda: from_message(TokenBatch, trajectory_pb2.TokenBatch.FromString(data)))
    return Rate("token batch", len(data), write, read)


def experience_rate(tokens: int, rounds: int) -> Rate:
    """Measure the experience of a step with this many response tokens."""
    experience = experience_of(tokens)
    encoded = encode_experience(experience)
    # Separate bytes objects, as Redis returns them.
    chunks = {name: bytes(chunk) for name, chunk in encoded.chunks.items()}
    size = len(encoded.manifest) + sum(map(len, chunks.values()))
    write = best(rounds, lambda: encode_experience(experience))
    return Rate("experience", size, write, best(rounds, lambda: decode_experience(encoded.manifest, chunks.get)))


def rpc(rounds: int) -> tuple[list[Call], float]:
    """Measure unary calls of several sizes, and the number of small calls per second in sequence."""
    with replicas(Role.REFERENCE) as [address]:
        client = ReferenceClient(address, TimeoutsConfig())
        client.wait_until_ready()
        calls = []
        for size in SIZES:
            # The largest message stays slightly below the size limit.
            batch = batch_of(min(size * MEBIBYTE, MAX_MESSAGE_BYTES - MEBIBYTE) // 4)
            response = client.log_probs(batch, 1.0).result()
            seconds = best(rounds if size < 64 else 3, lambda batch=batch: client.log_probs(batch, 1.0).result())
            calls.append(Call(batch.token_ids.nbytes + response.nbytes, seconds))
        small = batch_of(LENGTH)

        def many() -> None:
            for _ in range(SMALL_CALLS):
                client.log_probs(small, 1.0).result()

        return calls, SMALL_CALLS / best(3, many)


def table(rates: Sequence[Rate], calls: Sequence[Call], calls_per_second: float, host: str) -> str:
    """Return the tables for the page, with the best of several measurements."""
    lines = [
        f"{host}. GB/s, the best of several measurements. The codec must reach {LIMIT / 1e9:g} in both directions, for messages "
        f"of up to {MAX_USUAL_MESSAGE} MiB and for experience of any size. Larger messages are limited by the kernel, which "
        "allocates new memory for them.",
        "",
        "| message | MB | write | read |",
        "|---|---|---|---|",
    ]
    for rate in rates:
        write, read = rate.size / rate.write / 1e9, rate.size / rate.read / 1e9
        lines.append(f"| {rate.kind} | {rate.size / 1e6:.1f} | {write:.2f} | {read:.2f} |")
    lines += ["", "| unary call, request and response | ms | GB/s |", "|---|---|---|"]
    for call in calls:
        lines.append(f"| {call.size / 1e6:.1f} MB | {1000 * call.seconds:.1f} | {call.size / call.seconds / 1e9:.2f} |")
    lines += ["", f"Calls with one sequence of {LENGTH:,} tokens, in sequence: **{calls_per_second:.0f}** per second."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
