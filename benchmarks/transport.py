"""Codec and RPC: gigabytes a second of what travels between the processes, and calls a second.

`make transport`, or python -m benchmarks.transport. The codec: arrays to the bytes of their message, and back to arrays that are
checked. RPC: the reference's method over real gRPC on loopback, with a server in a separate process that answers at once; what
is counted goes both ways. Writes the results below build/, the table into docs/performance.md. Exits 1 when the codec is slower
than it should be.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks import machine, page
from benchmarks.options import add_shared, page_of, parser_of
from benchmarks.simulated import replicas
from quartet import codec
from quartet.config import TimeoutsConfig
from quartet.rpc.clients import ReferenceClient
from quartet.rpc.limits import MAX_MESSAGE_BYTES
from quartet.types import Experience, FloatArray, Role, TokenBatch
from quartet.v1 import tensor_pb2, trajectory_pb2

LIMIT = 1e9
"""Bytes a second of the codec, at the sizes that a step has."""
MEBIBYTE = 2**20
SIZES = (1, 4, 64, 256)
"""MiB of a tensor, a batch or a request."""
TRAVELLING = 16
"""MiB that a message has at most in a usual step: a batch of 16 sequences of 200,000 tokens. Larger ones are timed, too."""
EXPERIENCES = (100_000, 1_000_000, 10_000_000)
"""Response tokens."""
LENGTH = 1_000
"""Tokens of a sequence: a tenth of it the prompt."""
SMALL_CALLS = 500


@dataclass(frozen=True)
class Rate:
    """Of one kind of message of ``size`` bytes: the best of several times, in seconds."""

    kind: str
    size: int
    write: float
    read: float

    @property
    def slower(self) -> float:
        """Bytes a second of the slower way."""
        return self.size / max(self.write, self.read)


@dataclass(frozen=True)
class Call:
    """A unary call with so many bytes there and back together; ``seconds`` is the best of several."""

    size: int
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("transport", __doc__)
    add_shared(parser, "build/transport", rounds=9)
    options = parser.parse_args(arguments)
    where = machine.describe()
    # The largest first: malloc keeps what it has had before, as in a process that has been at work for a while.
    rates = [
        rate
        for size in reversed(SIZES)
        for rate in (batch_rate(size, options.rounds), tensor_rate(size, options.rounds))
    ][::-1]
    rates += [experience_rate(tokens, options.rounds) for tokens in EXPERIENCES]
    calls, each_second = rpc(options.rounds)
    options.folder.mkdir(parents=True, exist_ok=True)
    report = {
        "machine": where,
        "codec": [asdict(rate) for rate in rates],
        "rpc": [asdict(call) for call in calls],
        "calls_per_second": each_second,
    }
    (options.folder / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    text = table(rates, calls, each_second, where)
    print(text)
    page.write(page_of(parser, options), "transport", text)
    return 0 if all(rate.slower >= LIMIT for rate in rates if counts(rate)) else 1


def counts(rate: Rate) -> bool:
    """Return whether the limit is for it: experience of any size, and what a usual step sends at once."""
    return rate.kind == "experience" or rate.size <= TRAVELLING * MEBIBYTE


def best(rounds: int, work: Callable[[], object]) -> float:
    """The shortest time of ``work``, in seconds, after one that is not counted."""
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def floats(count: int, seed: int = 0) -> FloatArray:
    """Return this many numbers, the same for a seed."""
    return np.random.default_rng(seed).random(count, np.float32)


def batch_of(tokens: int) -> TokenBatch:
    """Sequences of LENGTH, the last one longer, with so many tokens in all."""
    count = max(1, tokens // LENGTH)
    prompts = np.full(count, LENGTH // 10, np.int32)
    responses = np.full(count, LENGTH - LENGTH // 10, np.int32)
    responses[-1] += tokens - count * LENGTH
    ids = np.random.default_rng(0).integers(0, 32_000, tokens).astype(np.int32)
    return TokenBatch(ids, prompts, responses)


def experience_of(tokens: int) -> Experience:
    """Experience of so many response tokens."""
    batch = batch_of(tokens * 10 // 9)
    tokens = int(batch.response_lengths.sum())
    # Six different arrays: equal ones would be stored once.
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
    data = codec.tensor_to_proto(array).SerializeToString()
    write = best(rounds, lambda: codec.tensor_to_proto(array).SerializeToString())
    read = best(rounds, lambda: codec.floats_from_proto(tensor_pb2.Tensor.FromString(data), "tensor"))
    return Rate("tensor", len(data), write, read)


def batch_rate(size: int, rounds: int) -> Rate:
    """Ragged sequences with ``size`` MiB of token ids."""
    batch = batch_of(size * MEBIBYTE // 4)
    data = codec.batch_to_proto(batch).SerializeToString()
    write = best(rounds, lambda: codec.batch_to_proto(batch).SerializeToString())
    read = best(rounds, lambda: codec.batch_from_proto(trajectory_pb2.TokenBatch.FromString(data)))
    return Rate("token batch", len(data), write, read)


def experience_rate(tokens: int, rounds: int) -> Rate:
    """A step's experience of so many response tokens."""
    experience = experience_of(tokens)
    encoded = codec.encode_experience(experience)
    # As Redis hands them out: separate bytes.
    chunks = {name: bytes(chunk) for name, chunk in encoded.chunks.items()}
    size = len(encoded.manifest) + sum(map(len, chunks.values()))
    write = best(rounds, lambda: codec.encode_experience(experience))
    return Rate("experience", size, write, best(rounds, lambda: codec.decode_experience(encoded.manifest, chunks.get)))


def rpc(rounds: int) -> tuple[list[Call], float]:
    """Unary calls by size, and how many small ones one caller makes in a second, one after the other."""
    with replicas(Role.REFERENCE) as [address]:
        client = ReferenceClient(address, TimeoutsConfig())
        client.wait_until_ready()
        calls = []
        for size in SIZES:
            # A little less than the most that a message may have.
            batch = batch_of(min(size * MEBIBYTE, MAX_MESSAGE_BYTES - MEBIBYTE) // 4)
            answer = client.log_probs(batch, 1.0).result()
            seconds = best(rounds if size < 64 else 3, lambda batch=batch: client.log_probs(batch, 1.0).result())
            calls.append(Call(batch.token_ids.nbytes + answer.nbytes, seconds))
        small = batch_of(LENGTH)

        def many() -> None:
            for _ in range(SMALL_CALLS):
                client.log_probs(small, 1.0).result()

        return calls, SMALL_CALLS / best(3, many)


def table(rates: Sequence[Rate], calls: Sequence[Call], each_second: float, where: str) -> str:
    """Return what the page says: the best of several."""
    lines = [
        f"{where}. GB/s, the best of several; at least {LIMIT / 1e9:g} is asked of the codec both ways, for messages of up to "
        f"{TRAVELLING} MiB and for experience of any size. Larger ones are bound by the kernel's handing out of fresh memory.",
        "",
        "| message | MB | write | read |",
        "|---|---|---|---|",
    ]
    for rate in rates:
        write, read = rate.size / rate.write / 1e9, rate.size / rate.read / 1e9
        lines.append(f"| {rate.kind} | {rate.size / 1e6:.1f} | {write:.2f} | {read:.2f} |")
    lines += ["", "| unary call, there and back | ms | GB/s |", "|---|---|---|"]
    for call in calls:
        lines.append(f"| {call.size / 1e6:.1f} MB | {1000 * call.seconds:.1f} | {call.size / call.seconds / 1e9:.2f} |")
    lines += ["", f"Calls of one sequence of {LENGTH:,} tokens, one after the other: **{each_second:.0f}** a second."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
