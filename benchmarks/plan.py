"""Planned and measured memory and seconds on this CPU.

`make plan`, or python -m benchmarks.plan. One model calibrates the seconds of each phase. Then the seconds of updates and scoring
of other models are planned and measured. Fails if memory differs by more than 10 %, or seconds by more than 30 %. Other work on
the machine disturbs the seconds. Writes the tables into docs/plan.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import machine, page
from benchmarks.options import add_shared, page_of, parser_of
from benchmarks.plan_cases import Case, make_update, seconds_of
from benchmarks.update import matmul_peak
from quartet.models.forward.onednn_linear import onednn_linear
from quartet.models.forward.scoring import response_log_probs, response_values
from quartet.planner.device_memory import trained_memory
from quartet.planner.gpus import CPU, Cluster, calibrated
from quartet.planner.placement import Group, Placement
from quartet.planner.plan import scoring, update
from quartet.planner.roofline import Parallel
from quartet.types import Role

MEMORY_TOLERANCE, TIME_TOLERANCE = 0.1, 0.3
MEMORY_CASES = (
    Case("llama", 256, 4, 4096, responses=16, prompt=32, response=96, tokens=512),
    Case("llama", 384, 6, 4096, responses=32, prompt=32, response=96, tokens=1024, checkpointing=True),
    Case("gpt2", 384, 6, 4096, role="critic", responses=32, prompt=32, response=96, tokens=1024),
    Case("qwen2", 384, 4, 16_000, dtype="bfloat16", responses=32, prompt=32, response=96, tokens=1024),
    Case("llama", 512, 6, 8192, responses=32, prompt=32, response=96, tokens=1024, rank=8),
)
CALIBRATION = Case("llama", 384, 4, 4096, responses=32, prompt=32, response=96, tokens=1024)
# Not gpt2: its layers are no nn.Linear, so on AMD they run without oneDNN, at half of the rate (ADR 25).
TIME_CASES = (
    Case("llama", 512, 6, 8192, responses=32, prompt=32, response=96, tokens=1024),
    Case("qwen2", 256, 8, 16_000, responses=32, prompt=32, response=96, tokens=1024),
    Case("mistral", 512, 4, 8192, role="critic", responses=32, prompt=32, response=96, tokens=1024),
    Case("llama", 512, 4, 4096, responses=32, prompt=32, response=96, tokens=1024, checkpointing=True),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("plan", __doc__)
    add_shared(parser, "build/plan", page=Path("docs/plan.md"), rounds=5, threads=True)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    host = machine.describe()
    lines = ["| update | planned, MiB | measured, MiB | planned / measured |", "|---|---|---|---|"]
    failed = False
    for case in MEMORY_CASES:
        planned, measured = case.predicted_bytes(), case.measured_bytes()
        failed |= abs(planned / measured - 1) > MEMORY_TOLERANCE
        lines.append(
            f"| {case.role}: {case.name} | {planned / 2**20:.0f} | {measured / 2**20:.0f} | {planned / measured:.2f} |"
        )
    with onednn_linear():
        peak = matmul_peak()
    base = Cluster(calibrated(CPU, peak, 1e12), 1)
    factors = [
        measured / planned for planned, measured in zip(*seconds(CALIBRATION, base, options.rounds), strict=True)
    ]
    lines += [
        "",
        f"Matmul peak {peak / 1e9:.0f} GFLOP/s, CPU threads: {options.threads}. Calibrated with {CALIBRATION.name}.",
        "",
        "| model | phase | planned, s | measured, s | planned / measured |",
        "|---|---|---|---|---|",
    ]
    for case in TIME_CASES:
        results = zip(("update", "scoring"), factors, *seconds(case, base, options.rounds), strict=True)
        for phase, factor, planned, measured in results:
            ratio = factor * planned / measured
            failed |= abs(ratio - 1) > TIME_TOLERANCE
            lines.append(
                f"| {case.role}: {case.name} | {phase} | {factor * planned:.3f} | {measured:.3f} | {ratio:.2f} |"
            )
    text = "\n".join([f"{host}. Shortest of {options.rounds} rounds.", "", *lines])
    print(text)
    page.write(page_of(parser, options), "plan", text)
    return int(failed)


def seconds(case: Case, cluster: Cluster, rounds: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the planned and the measured seconds of update and scoring."""
    load = case.load()
    work = load.role(Role(case.role))
    assert work is not None
    memory = trained_memory(work, load, cluster.device, Parallel(), case.tokens, case.checkpointing, offload=False)
    placement = Placement(work.role, case.name, work, Group(0, 1), Parallel(), memory, case.tokens, case.checkpointing)
    planned = (update(cluster, load, placement).seconds, scoring(cluster, load, placement).seconds)
    model, run, experience = make_update(case)

    def score() -> None:
        if case.role == "actor":
            response_log_probs(model, experience.batch, 1.0, case.tokens)
        else:
            response_values(model, experience.batch, case.tokens)

    return planned, (seconds_of(run, rounds), seconds_of(score, rounds))


if __name__ == "__main__":
    sys.exit(main())
