"""Mutated requests to every RPC method of real service processes: `python -m tests.fuzz`, or python -m tests.fuzz.

The exit status is 1 if a process ends, hangs or leaks, writes outside its run directory, or sends an invalid response.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import structlog

from tests.fuzz.campaign import DEADLINE, Campaign
from tests.fuzz.environment import processes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"), help="folder of logs and failed requests")
    parser.add_argument("--replay", nargs=2, metavar=("ADDRESS", "FILE"), help="send a failed request again")
    options = parser.parse_args(arguments)
    if options.replay:
        return _replay(*options.replay)
    # The weight source in this process logs every request that it refuses.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    shutil.rmtree(options.folder, ignore_errors=True)
    with processes(options.folder) as environment:
        campaign = Campaign(environment, options.requests, options.seed)
        started = time.monotonic()
        campaign.run()
        seconds = time.monotonic() - started
    lines = [*campaign.table(), *campaign.growth]
    lines.append(f"{options.requests} requests in {seconds:.0f} s, seed {options.seed}")
    lines.append(f"slowest response of health and status: {campaign.slowest:.2f} s")
    print("\n".join(lines))
    (options.folder / "report.txt").write_text("\n".join(lines) + "\n")
    problems = campaign.problems + [f"{path}: no request succeeded" for path in campaign.unreached()]
    if campaign.failures:
        problems.append(f"{len(campaign.failures)} invalid responses; the requests are in {options.folder}/failures")
    for problem in problems[:50]:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _replay(address: str, file: str) -> int:
    failure = json.loads(Path(file).read_text())
    with grpc.insecure_channel(address) as channel:
        try:
            call = channel.unary_unary(failure["method"], None, None)
            response = call(bytes.fromhex(failure["request"]), timeout=DEADLINE)
        except grpc.RpcError as error:
            print(error.code().name, error.details())
            return 1
    print(f"OK, {len(response)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
