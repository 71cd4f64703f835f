"""Mutated requests to every RPC method of real service processes: `make fuzz-rpc`, or python -m tests.fuzz.

Exits 1 when a process ends, hangs or grows, a file appears where none may be, or an answer is none that a caller can be told.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc

from tests.fuzz.campaign import DEADLINE, Campaign
from tests.fuzz.ground import processes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"), help="logs, and requests that failed")
    parser.add_argument("--replay", nargs=2, metavar=("ADDRESS", "FILE"), help="send a request that failed once more")
    options = parser.parse_args(arguments)
    if options.replay:
        return _replay(*options.replay)
    shutil.rmtree(options.folder, ignore_errors=True)
    with processes(options.folder) as ground:
        campaign = Campaign(ground, options.requests, options.seed)
        started = time.monotonic()
        campaign.run()
        seconds = time.monotonic() - started
    lines = [*campaign.table(), *campaign.growth]
    lines.append(f"{options.requests} requests in {seconds:.0f} s, seed {options.seed}")
    lines.append(f"health and status answered within {campaign.slowest:.2f} s")
    print("\n".join(lines))
    (options.folder / "report.txt").write_text("\n".join(lines) + "\n")
    problems = campaign.problems + [f"{path}: no request was taken" for path in campaign.unreached()]
    if campaign.failures:
        problems.append(
            f"{len(campaign.failures)} answers were improper; the requests are in {options.folder}/failures"
        )
    for problem in problems[:50]:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _replay(address: str, file: str) -> int:
    kept = json.loads(Path(file).read_text())
    with grpc.insecure_channel(address) as channel:
        try:
            answer = channel.unary_unary(kept["method"], None, None)(bytes.fromhex(kept["request"]), timeout=DEADLINE)
        except grpc.RpcError as error:
            print(error.code().name, error.details())
            return 1
    print(f"OK, {len(answer)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
