"""The rollout buffer: trajectories a second from a process that writes to one that reads, and experience in gigabytes a second.

`make buffer`, or python -m benchmarks.buffer. The Redis is the embedded one as `quartet train` starts it: its append-only file is
flushed to the disk every second. The writer appends as the actor does, the reader reads as the orchestrator does and frees what
it has read. Writes the figures below build/, the table into docs/performance.md. Exits 1 when trajectories come more slowly than
they should.
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

from benchmarks import machine, page
from benchmarks.options import add_shared, page_of, parser_of, positive
from benchmarks.transport import best, experience_of
from quartet.buffer.connection import connect
from quartet.buffer.embedded_redis import EmbeddedRedis
from quartet.buffer.experience_store import ExperienceStore
from quartet.buffer.rollout_stream import RolloutStream
from quartet.processes import tied_to_parent
from quartet.services.actor.actor import FLUSH
from quartet.types import FinishReason, Trajectory, TrajectoryId

LIMIT = 5_000
"""Trajectories of 1,000 tokens a second."""
RUN = "buffer"
PROMPT, RESPONSE = 100, 900
"""Tokens."""
READ = 16
"""Trajectories that a read asks for, as with rollout.score_batch_size as it is by default."""


@dataclass(frozen=True)
class Stream:
    """One round: so many trajectories; seconds that the writer took, and that all took from the first append to the last read."""

    trajectories: int
    write: float
    all: float

    @property
    def rate(self) -> float:
        """Trajectories a second, all in all."""
        return self.trajectories / self.all


@dataclass(frozen=True)
class Sealed:
    """Experience of so many response tokens: its bytes, and the shortest time to seal and to load it."""

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
    where = machine.describe()
    shutil.rmtree(options.folder, ignore_errors=True)
    with EmbeddedRedis(options.folder / "redis", options.folder / "redis.log") as server:
        rounds = [stream(server.url, options.trajectories) for _ in range(options.rounds + 1)][1:]
        sealed = [seal(server.url, tokens, options.rounds) for tokens in (options.tokens // 10, options.tokens)]
    shutil.rmtree(options.folder / "redis")
    figures = {
        "machine": where,
        "streams": [asdict(each) for each in rounds],
        "experience": [asdict(each) for each in sealed],
    }
    (options.folder / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    text = table(rounds, sealed, where)
    print(text)
    page.write(page_of(parser, options), "buffer", text)
    return 0 if max(each.rate for each in rounds) >= LIMIT else 1


def trajectories(count: int) -> Iterator[Trajectory]:
    """Trajectories of PROMPT and RESPONSE tokens, the same for each."""
    prompt, response = np.arange(PROMPT, dtype=np.int32), np.arange(RESPONSE, dtype=np.int32)
    log_probs = np.full(RESPONSE, -1.0, np.float32)
    for index in range(count):
        yield Trajectory(TrajectoryId(RUN, 1, index, 0), 0, prompt, response, log_probs, FinishReason.LENGTH)


def write(url: str, count: int) -> int:
    """The writer: begins when it is told to, and says on one line when it began and ended."""
    stream = RolloutStream(connect(url), url, RUN)
    made = list(trajectories(count))
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.monotonic()
    for first in range(0, count, FLUSH):
        stream.append(made[first : first + FLUSH])
    print(json.dumps([start, time.monotonic()]), flush=True)
    return 0


def stream(url: str, count: int) -> Stream:
    """One round with a writer in a process of its own, and this one as the reader."""
    rollouts = RolloutStream(connect(url), url, RUN)
    rollouts.reset()
    command = [sys.executable, "-m", "benchmarks.buffer", "--write", url, "--trajectories", str(count)]
    with subprocess.Popen(tied_to_parent(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        if not writer.stdout.readline():
            raise RuntimeError(f"the writer ended with status {writer.wait()}; its error stands above")
        writer.stdin.write("\n")
        writer.stdin.flush()
        read: list[str] = []
        while len(read) < count:
            read += [delivery.entry_id for delivery in rollouts.read(READ, 1.0)]
        end = time.monotonic()
        started, written = json.loads(writer.stdout.readline())
    rollouts.acknowledge(read)
    # Both read the machine's clock.
    return Stream(count, written - started, end - started)


def seal(url: str, tokens: int, rounds: int) -> Sealed:
    """Experience sealed and loaded over one connection, with its checksum both times."""
    client = connect(url)
    store, experience = ExperienceStore(client, url, "transport"), experience_of(tokens)
    seconds = best(rounds, lambda: store.seal(experience))
    size = sum(client.hstrlen(store.chunks_key(1), name) for name in client.hkeys(store.chunks_key(1)))
    result = Sealed(len(experience.advantages), size, seconds, best(rounds, lambda: store.load(1)))
    store.discard([1])
    return result


def table(rounds: Sequence[Stream], sealed: Sequence[Sealed], where: str) -> str:
    """What the page says."""
    rates = [each.rate for each in rounds]
    writes = [each.trajectories / each.write for each in rounds]
    lines = [
        f"{where}. {rounds[0].trajectories:,} trajectories of {PROMPT + RESPONSE:,} tokens a round, appended by {FLUSH}, read by "
        f"{READ}; at least {LIMIT:,} a second are asked for.",
        "",
        "| trajectories a second | best | median | least |",
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
