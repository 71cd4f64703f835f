"""Throughput of the rollout buffer: trajectories per second from one process to another, and experience in GB/s.

Uses the embedded Redis as `quartet train` starts it, with an append-only file that is flushed to the disk every second. One
process appends as the actor does, another reads and acknowledges as the orchestrator does. Writes the results below build/ and
a table to docs/evidence/performance.md. The exit status is 1 if fewer than LIMIT trajectories pass per second.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks import machine
from benchmarks.options import add_shared, parser_of, positive, publish
from benchmarks.transport import best, experience_of
from quartet.buffer.connection import connect
from quartet.buffer.embedded_redis import EmbeddedRedis
from quartet.buffer.experience_store import ExperienceStore
from quartet.buffer.rollout_stream import RolloutStream
from quartet.contract.trajectory import FinishReason, Trajectory, TrajectoryId
from quartet.services.generator.generator import FLUSH
from quartet.system.child_processes import tied_to_parent

LIMIT = 5_000
"""Fewest trajectories of 1,000 tokens per second."""
RUN = "buffer"
PROMPT, RESPONSE = 100, 900
"""Tokens."""
READ = 16
"""Trajectories in one read, as with the default rollout.score_batch_size."""


@dataclass(frozen=True)
class Stream:
    """One round: number of trajectories, seconds of the writer, and seconds from the first append to the last read."""

    trajectories: int
    write: float
    all: float

    @property
    def rate(self) -> float:
        """Trajectories per second, appended and read."""
        return self.trajectories / self.all


@dataclass(frozen=True)
class Sealed:
    """Experience of ``tokens`` response tokens: its bytes, and the shortest times to seal and to load it, in seconds."""

    tokens: int
    size: int
    seal: float
    load: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("buffer", __doc__)
    parser.add_argument("--trajectories", type=positive, default=20_000)
    parser.add_argument("--tokens", type=positive, default=10_000_000, help="of the largest experience")
    add_shared(parser, "build/buffer", rounds=5)
    parser.add_argument("--write", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.write:
        return write(options.write, options.trajectories)
    host = machine.describe()
    shutil.rmtree(options.folder, ignore_errors=True)
    with EmbeddedRedis(options.folder / "redis", options.folder / "redis.log") as server:
        rounds = [stream(server.url, options.trajectories) for _ in range(options.rounds + 1)][1:]
        sealed = [seal(server.url, tokens, options.rounds) for tokens in (options.tokens // 10, options.tokens)]
    shutil.rmtree(options.folder / "redis")
    results = {
        "machine": host,
        "streams": [asdict(each) for each in rounds],
        "experience": [asdict(each) for each in sealed],
    }
    publish(parser, options, results, table(rounds, sealed, host))
    return 0 if max(each.rate for each in rounds) >= LIMIT else 1


def trajectories(count: int) -> Iterator[Trajectory]:
    """Yield trajectories of PROMPT and RESPONSE tokens with equal content."""
    prompt, response = np.arange(PROMPT, dtype=np.int32), np.arange(RESPONSE, dtype=np.int32)
    log_probs = np.full(RESPONSE, -1.0, np.float32)
    for index in range(count):
        yield Trajectory.of_response(
            TrajectoryId(RUN, 1, index, 0), 0, prompt, response, log_probs, FinishReason.LENGTH
        )


def write(url: str, count: int) -> int:
    """Run the writer: start after a line on standard input, and print the times of start and end."""
    stream = RolloutStream(connect(url), url, RUN)
    batch = list(trajectories(count))
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.monotonic()
    for first in range(0, count, FLUSH):
        stream.append(batch[first : first + FLUSH])
    print(json.dumps([start, time.monotonic()]), flush=True)
    return 0


def stream(url: str, count: int) -> Stream:
    """Run one round, with a writer in a separate process and the reader in this one."""
    rollouts = RolloutStream(connect(url), url, RUN)
    rollouts.reset()
    command = [sys.executable, "-m", "benchmarks.buffer", "--write", url, "--trajectories", str(count)]
    with subprocess.Popen(tied_to_parent(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        if not writer.stdout.readline():
            raise RuntimeError(f"the writer ended with status {writer.wait()}; see its error above")
        writer.stdin.write("\n")
        writer.stdin.flush()
        read: list[str] = []
        while len(read) < count:
            read += [delivery.entry_id for delivery in rollouts.read(READ, 1.0)]
        end = time.monotonic()
        started, written = json.loads(writer.stdout.readline())
    rollouts.acknowledge(read)
    # Both processes use the machine's monotonic clock.
    return Stream(count, written - started, end - started)


def seal(url: str, tokens: int, rounds: int) -> Sealed:
    """Seal and load experience over one connection, with checksums both times."""
    client = connect(url)
    store, experience = ExperienceStore(client, url, "transport"), experience_of(tokens)
    seconds = best(rounds, lambda: store.seal(experience))
    size = sum(client.hstrlen(store.chunks_key(1), name) for name in client.hkeys(store.chunks_key(1)))
    result = Sealed(len(experience.advantages), size, seconds, best(rounds, lambda: store.load(1)))
    store.discard([1])
    return result


def table(rounds: Sequence[Stream], sealed: Sequence[Sealed], host: str) -> str:
    """Return the table for the page."""
    rates = [each.rate for each in rounds]
    writes = [each.trajectories / each.write for each in rounds]
    lines = [
        f"{host}. {rounds[0].trajectories:,} trajectories of {PROMPT + RESPONSE:,} tokens per round, appended in batches of "
        f"{FLUSH}, read in batches of {READ}; at least {LIMIT:,} per second are required.",
        "",
        "| trajectories per second | best | median | minimum |",
        "|---|---|---|---|",
        f"| appended | {max(writes):,.0f} | {statistics.median(writes):,.0f} | {min(writes):,.0f} |",
        f"| appended and read | **{max(rates):,.0f}** | {statistics.median(rates):,.0f} | {min(rates):,.0f} |",
        "",
        "| experience, response tokens | MB | seal, s | GB/s | load, s | GB/s |",
        "|---|---|---|---|---|---|",
    ]
    for each in sealed:
        seal, load = (f"{seconds:.3f} | {each.size / seconds / 1e9:.2f}" for seconds in (each.seal, each.load))
        lines.append(f"| {each.tokens:,} | {each.size / 1e6:.0f} | {seal} | {load} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
