"""Duration of GAE for a million response tokens, for several distributions of response lengths.

Writes the results below build/ and the table into docs/evidence/performance.md. The exit status is 1 if the best of several
calls takes LIMIT or longer.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import machine
from benchmarks.options import add_shared, parser_of, positive, publish
from quartet.ppo.gae import generalized_advantages

LIMIT = 0.05
"""Maximum seconds for a million tokens."""
KINDS = {
    "many short": "1 to 63",
    "few long, many short": "4,000 to 8,000 in 1 %, else 16 to 512",
    "few very long": "32,768 in 0.1 %, else 16 to 512",
    "equal": "1,000",
}


@dataclass(frozen=True)
class Result:
    """One kind of batch, and the seconds of each call."""

    kind: str
    tokens: int
    responses: int
    longest: int
    seconds: list[float]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("gae", __doc__)
    parser.add_argument("--tokens", type=positive, default=1_000_000)
    add_shared(parser, "build/gae", rounds=30)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # As in the orchestrator.
    host = machine.describe()
    results = [measure(kind, lengths_of(kind, options.tokens), options.rounds) for kind in KINDS]
    report = {"machine": host, "results": [asdict(result) for result in results]}
    publish(parser, options, report, table(results, host))
    return 0 if all(min(result.seconds) < LIMIT * options.tokens / 1e6 for result in results) else 1


def lengths_of(kind: str, tokens: int) -> NDArray[np.int64]:
    """Return lengths of responses of one of the KINDS that add up to ``tokens``, from a fixed seed."""
    random = np.random.default_rng(0)
    count = tokens  # An upper bound: each response has at least one token.
    usual = random.integers(16, 513, count)
    sampled = {
        "many short": lambda: random.integers(1, 64, count),
        "few long, many short": lambda: np.where(
            random.random(count) < 0.01, random.integers(4000, 8001, count), usual
        ),
        "few very long": lambda: np.where(random.random(count) < 0.001, 32_768, usual),
        "equal": lambda: np.full(count, 1000),
    }[kind]()
    ends = np.cumsum(sampled)
    last = int(np.searchsorted(ends, tokens))
    result = sampled[: last + 1].astype(np.int64)
    result[-1] -= ends[last] - tokens
    return result


def measure(kind: str, lengths: NDArray[np.int64], rounds: int) -> Result:
    """Time ``rounds`` calls, after a warm-up call."""
    tokens, sizes = int(lengths.sum()), torch.from_numpy(lengths)
    rewards, values = torch.randn(tokens), torch.randn(tokens)
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        generalized_advantages(rewards, values, sizes, 0.99, 0.95)
        seconds.append(time.perf_counter() - start)
    return Result(kind, tokens, len(lengths), int(lengths.max()), seconds[1:])


def table(results: Sequence[Result], host: str) -> str:
    """Return the table for the page."""
    lines = [
        f"{host}. {results[0].tokens:,} tokens, one thread. The best of {len(results[0].seconds)} calls may take at most "
        f"{1000 * LIMIT:.0f} ms for a million tokens.",
        "",
        "| responses | tokens per response | longest | best, ms | median, ms |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        best, median = 1000 * min(result.seconds), 1000 * statistics.median(result.seconds)
        row = f"{result.responses:,} | {KINDS[result.kind]} | {result.longest:,} | **{best:.1f}** | {median:.1f}"
        lines.append(f"| {row} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
