"""Response times of metrics requests for a long run: complete HTTP requests on files that have the format of a run.

Prints the results as JSON, in milliseconds, and writes a table into docs/evidence/performance.md. The exit status is 1 if the
median time of the dashboard's request, with a warm cache, is LIMIT or more.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import page
from benchmarks.options import add_page, page_of, positive
from quartet.config.loading import parse_config
from quartet.run_directory.run_files import RunFiles

LIMIT = 100.0
"""Maximum median time of the dashboard's request, in milliseconds."""
TOKEN = "a token of this benchmark".replace(" ", "-")
NAMES = [f"metric_{number:02d}" for number in range(30)]
REQUESTS = {
    "12 metrics, 600 points": f"/runs/long/metrics?names={','.join(NAMES[:12])}&points=600",
    "30 metrics, 1000 points": "/runs/long/metrics?points=1000",
    "1 metric, the last 1000 steps": f"/runs/long/metrics?names={NAMES[0]}&first=99001",
    "the newest 50 steps": "/runs/long/steps",
    "the run itself": "/runs/long",
}
DASHBOARD = "12 metrics, 600 points"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=positive, default=100_000)
    parser.add_argument("--repeats", type=positive, default=31)
    add_page(parser, Path("docs/evidence/performance.md"))
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        megabytes = write_run(Path(folder), options.steps)
        results = measure(Path(folder), options.repeats)
    report = {"steps": options.steps, "metrics": len(NAMES), "file_megabytes": round(megabytes, 1), **results}
    print(json.dumps(report, indent=2))
    page.write(page_of(parser, options), "gateway_metrics", table(report))
    median = results[DASHBOARD]["median"]
    print(f"{DASHBOARD}: median {median} ms, limit {LIMIT:g} ms", file=sys.stderr)
    return 0 if median < LIMIT else 1


def table(report: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    rows = [
        f"| {name} | {results['median']} | {results['p95']} |" for name, results in report.items() if name in REQUESTS
    ]
    cold = report["first response, which includes reading the file"]["once"]
    return "\n".join(["| request | median, ms | 95th percentile, ms |", "|---|---|---|", *rows]) + (
        f"\n\n{report['steps']:,} steps of {report['metrics']} metrics, {report['file_megabytes']} MB. The first "
        f"response, which includes reading the file, took {cold / 1000:.1f} s."
    )


def write_run(folder: Path, steps: int) -> float:
    """Create a run with this many steps; return the size of its metrics in megabytes."""
    tree = {"data": {"prompts": "prompts.jsonl"}, "actor": {"model": "actor"}, "reward": {"model": "reward"}}
    config = parse_config({**tree, "run": {"name": "long", "steps": steps, "directory": str(folder)}}, "benchmark")
    files = RunFiles(config.run_directory)
    files.write_config(config.to_yaml())
    generator = random.Random(0)
    with files.metrics.open("w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            values = {name: math.log(step) + generator.random() for name in NAMES}
            file.write(json.dumps({"step": step, **values}) + "\n")
    return files.metrics.stat().st_size / 1e6


def measure(folder: Path, repeats: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds of each request. The first response, `cold`, includes reading the file."""
    reader, writer = os.pipe()
    gateway = subprocess.Popen(
        [sys.executable, "-m", "quartet.gateway", "--runs", str(folder), "--ready-fd", str(writer)],
        env={**os.environ, "QUARTET_GATEWAY_TOKEN": TOKEN},
        pass_fds=(writer,),
        stderr=subprocess.DEVNULL,
    )
    os.close(writer)
    try:
        with os.fdopen(reader) as pipe:
            address = json.loads(pipe.readline())["address"]
        connection = http.client.HTTPConnection(address, timeout=60)
        cold = request(connection, REQUESTS[DASHBOARD])
        report = {}
        for name, path in REQUESTS.items():
            times = sorted(request(connection, path) for _ in range(repeats))
            report[name] = {
                "median": round(statistics.median(times), 2),
                "p95": round(times[min(len(times) - 1, math.ceil(0.95 * len(times)) - 1)], 2),
            }
        return {"first response, which includes reading the file": {"once": round(cold, 1)}, **report}
    finally:
        gateway.terminate()
        gateway.wait()


def request(connection: http.client.HTTPConnection, path: str) -> float:
    """Return the milliseconds until the complete response. Raises RuntimeError if it is an error."""
    started = time.perf_counter()
    connection.request("GET", f"/api/v1{path}", headers={"authorization": f"Bearer {TOKEN}"})
    response = connection.getresponse()
    content = response.read()
    milliseconds = 1000 * (time.perf_counter() - started)
    if response.status != 200:
        raise RuntimeError(f"{path}: {response.status} {content[:300]!r}")
    return milliseconds


if __name__ == "__main__":
    sys.exit(main())
