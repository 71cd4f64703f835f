"""Memory of each rank and updates per second of a model in 1, 2 and 4 processes.

Writes a model with random weights, and runs each group on it in new processes of one CPU thread each. Bytes of tensors are
counted after updates, those of gradients in the optimizer step. Peaks are of resident memory, above that of a rank before it
loads the model. They include pages of files. The largest rank counts. The groups take turns. Writes the results below build/
and the table into docs/evidence/performance.md.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine, random_models
from benchmarks.options import add_shared, parser_of, positive, publish

SIZES = (1, 2, 4)
MEBIBYTE = 2**20
Reports = list[dict[str, Any]]
"""Reports of the ranks of a group."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("sharding", __doc__)
    parser.add_argument("--layers", type=positive, default=6)
    parser.add_argument("--vocabulary", type=positive, default=16_384)
    parser.add_argument("--updates", type=positive, default=2)
    add_shared(parser, "build/sharding", rounds=1)
    options = parser.parse_args(arguments)
    host = machine.describe()
    shape = ["--layers", str(options.layers), "--vocabulary", str(options.vocabulary), "--dtype", "float32"]
    random_models.main([str(options.folder / "models"), *shape])
    model = options.folder / "models" / "policy"
    cases = [(size, False) for size in SIZES] + [(2, True)]
    runs: dict[tuple[int, bool], list[Reports]] = {case: [] for case in cases}
    for _ in range(options.rounds):
        for size, offload in cases:
            runs[size, offload].append(run_group(model, options.updates, size, offload))
    results = [{"size": size, "offload": offload, "rounds": rounds} for (size, offload), rounds in runs.items()]
    publish(parser, options, {"machine": host, "results": results}, table(results, host))
    return 0


def run_group(model: Path, updates: int, size: int, offload: bool) -> Reports:
    """Run a group of ``size`` processes and return the report of each."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=size)
    port, descriptor = listener.getsockname()[1], listener.fileno()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.sharding_rank", model),
                *map(str, (updates, int(offload), rank, size, port, descriptor)),
            ],
            env=environment,
            pass_fds=() if rank else (descriptor,),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    listener.close()
    reports = []
    try:
        for process in processes:
            output, _ = process.communicate()
            if process.returncode:
                raise RuntimeError(f"a rank of {size} ended with status {process.returncode}; see its error above")
            reports.append(json.loads(output.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return reports


def table(results: Sequence[dict[str, Any]], host: str) -> str:
    """Return the table for the page: the largest rank, medians over the rounds."""

    def largest(result: dict[str, Any], name: str) -> float:
        return statistics.median(max(report[name] for report in reports) for reports in result["rounds"]) / MEBIBYTE

    def rate(result: dict[str, Any]) -> float:
        return 1 / statistics.median(second for reports in result["rounds"] for second in reports[0]["seconds"])

    single = results[0]
    lines = [
        f"{host}. A model of {largest(single, 'parameters') * MEBIBYTE / 4e6:.0f}M parameters in float32, one CPU thread "
        "per rank. MiB of the largest rank, and medians. All ranks: the sum of the peaks while they load.",
        "",
        "| ranks | parameters | gradients | optimizer | peak, loading | all ranks | peak, updates | updates/s, ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        loading = statistics.median(sum(report["loading"] for report in reports) for reports in result["rounds"])
        name = f"{result['size']}, offload" if result["offload"] else result["size"]
        held = " | ".join(
            f"{largest(result, part):.0f}" for part in ("parameters", "gradients", "optimizer", "loading")
        )
        lines.append(
            f"| {name} | {held} | {loading / MEBIBYTE:.0f} | {largest(result, 'peak'):.0f} | {rate(result) / rate(single):.2f} |"
        )
    lines += ["", *_on_gpus(results, largest)]
    return "\n".join(lines)


def _on_gpus(results: Sequence[dict[str, Any]], largest: Any) -> list[str]:
    """Return the table of the tensors that the same ranks hold on a GPU, computed from the measured bytes."""
    lines = [
        "On a GPU, a rank would hold these tensors (computed from the table above, MiB, without activations):",
        "",
        "| ranks | no offload | `offload.optimizer` | `offload.parameters` | gathered during an update |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        if result["offload"]:
            continue
        parameters, gradients, moments, one, gathered = (
            largest(result, part) for part in ("parameters", "gradients", "optimizer", "largest", "gathered")
        )
        held = parameters + gradients
        offloaded = "–" if result["size"] == 1 else "0"
        lines.append(f"| {result['size']} | {held + moments:.0f} | {held + one:.0f} | {offloaded} | {gathered:.0f} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
