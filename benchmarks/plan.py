"""Planned and measured memory and seconds on this CPU.

One model calibrates the seconds of each phase. Then the seconds of updates and scoring of other models are planned and
measured, and of updates by groups of processes. Fails if memory differs by more than 10 %, or seconds by more than 30 %. Other
work on the machine disturbs the seconds: `python -m benchmarks plan --memory-only` measures the memory only. Writes the tables
into docs/evidence/performance.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import machine, page
from benchmarks.options import add_shared, page_of, parser_of
from benchmarks.plan_cases import Case, make_update, seconds_of
from quartet.contract.status import Role
from quartet.models.forward.scoring import response_log_probs, response_values
from quartet.models.matmul_peak import matmul_peak
from quartet.planner.device_memory import trained_memory
from quartet.planner.gpus import CPU, Cluster, calibrated
from quartet.planner.placement import Group, Placement
from quartet.planner.plan import scoring, update
from quartet.planner.roofline import Parallel, efficiency_of

MEMORY_TOLERANCE, TIME_TOLERANCE = 0.1, 0.3
MEMORY_CASES = (
    Case("llama", 256, 4, 4096, responses=16, prompt=32, response=96, tokens=512),
    Case("llama", 384, 6, 4096, responses=32, prompt=32, response=96, tokens=1024, checkpointing=True),
    Case("gpt2", 384, 6, 4096, role="critic", responses=32, prompt=32, response=96, tokens=1024),
    Case("qwen2", 384, 4, 16_000, dtype="bfloat16", responses=32, prompt=32, response=96, tokens=1024),
    Case("llama", 512, 6, 8192, responses=32, prompt=32, response=96, tokens=1024, rank=8),
    Case("llama", 384, 4, 4096, responses=16, prompt=32, response=96, tokens=256, processes=2),
    Case("llama", 384, 8, 512, responses=16, prompt=32, response=96, tokens=256, processes=2),
    Case("llama", 256, 2, 16_000, responses=16, prompt=32, response=96, tokens=256, processes=2),
    Case("llama", 512, 6, 8192, responses=32, prompt=32, response=96, tokens=1024, rank=8, processes=2),
    Case("qwen2", 384, 4, 4096, dtype="bfloat16", responses=32, prompt=32, response=96, tokens=1024, processes=2),
)
CALIBRATION = Case("llama", 384, 4, 4096, responses=32, prompt=32, response=96, tokens=1024)
# Not gpt2: its layers are no nn.Linear, so on AMD they run without oneDNN, at half of the rate (ADR 25).
TIME_CASES = (
    Case("llama", 512, 6, 8192, responses=32, prompt=32, response=96, tokens=1024),
    Case("qwen2", 256, 8, 16_000, responses=32, prompt=32, response=96, tokens=1024),
    Case("mistral", 512, 4, 8192, role="critic", responses=32, prompt=32, response=96, tokens=1024),
    Case("llama", 512, 4, 4096, responses=32, prompt=32, response=96, tokens=1024, checkpointing=True),
)
GROUP_CASES = (
    Case("llama", 512, 4, 4096, responses=32, prompt=32, response=96, tokens=1024, processes=2),
    Case("qwen2", 256, 8, 16_000, responses=32, prompt=32, response=96, tokens=1024, processes=2),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("plan", __doc__)
    add_shared(parser, "build/plan", page=Path("docs/evidence/performance.md"), rounds=5, threads=True)
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--memory-only", action="store_true", help="measure no seconds, on a machine with other work")
    parts.add_argument("--seconds-only", action="store_true", help="measure no memory")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    host, target = machine.describe(), page_of(parser, options)
    failed = not options.seconds_only and measure_memory(host, target)
    if not options.memory_only:
        failed |= measure_seconds(host, target, options.rounds, options.threads)
    return int(failed)


def measure_memory(host: str, target: Path | None) -> bool:
    """Write the table of planned and measured memory. Return whether a difference is too large."""
    lines = [
        f"{host}.",
        "",
        "| update | planned, MiB | tensors, MiB | planned / tensors | resident, MiB |",
        "|---|---|---|---|---|",
    ]
    failed = False
    for case in MEMORY_CASES:
        planned, (tensors, resident) = case.predicted_bytes(), case.measured_bytes()
        failed |= abs(planned / tensors - 1) > MEMORY_TOLERANCE
        cells = f"{planned / 2**20:.0f} | {tensors / 2**20:.0f} | {planned / tensors:.2f} | {resident / 2**20:.0f}"
        lines.append(f"| {case.role}: {case.name} | {cells} |")
        print(lines[-1], flush=True)
        page.write(target, "plan --memory-only", "\n".join(lines))
    return failed


def measure_seconds(host: str, target: Path | None, rounds: int, threads: int) -> bool:
    """Write the table of planned and measured seconds. Return whether a difference is too large."""
    failed = False
    peak = matmul_peak("cpu", "float32", threads)
    base = Cluster(calibrated(CPU, peak, 1e12), 1)
    planned, calibrate = seconds_of_case(CALIBRATION, base, rounds)
    lines = [
        f"{host}. Shortest of {rounds} rounds.",
        "",
        f"Matmul peak {peak / 1e9:.0f} GFLOP/s, CPU threads: {threads}. Calibrated before and after each model, with "
        f"{CALIBRATION.name}.",
        "",
        "| model | phase | planned, s | measured, s | planned / measured |",
        "|---|---|---|---|---|",
    ]

    def compare(case: Case, phase: str, predicted: float, measured: float) -> bool:
        cells = f"{predicted:.3f} | {measured:.3f} | {predicted / measured:.2f}"
        lines.append(f"| {case.role}: {case.name} | {phase} | {cells} |")
        print(lines[-1], flush=True)
        return abs(predicted / measured - 1) > TIME_TOLERANCE

    before = calibrate()
    for case in TIME_CASES:
        plans, measure = seconds_of_case(case, base, rounds)
        results, after = measure(), calibrate()
        for phase, *row in zip(("update", "scoring"), plans, results, before, after, planned, strict=True):
            plan, measured, *calibration, expected = row
            # The speed of a shared machine changes within minutes.
            failed |= compare(case, phase, plan * min(calibration) / expected, measured)
        before = after
    for case in GROUP_CASES:
        failed |= compare(case, "update", *group_seconds(case, peak, planned[0], rounds))
    page.write(target, "plan", "\n".join(lines))
    return failed


def group_seconds(case: Case, peak: float, calibration: float, rounds: int) -> tuple[float, float]:
    """Return the planned and the measured seconds of an update by a group, whose ranks share the threads of this process.

    ``calibration``: planned seconds of the calibration at ``peak``. As many processes at once as the group has ranks update the
    calibration's model and give the rate of computation. The measured rate of the collectives is the link.
    """
    before = CALIBRATION.seconds_beside(case.processes, rounds)
    measured, link = case.measured_seconds(rounds)
    fastest = min(before, CALIBRATION.seconds_beside(case.processes, rounds))
    device = calibrated(CPU, peak * calibration / fastest, 1e12)
    device = replace(device, link=link / efficiency_of(device).link)
    load = case.load()
    work = load.role(Role(case.role))
    assert work is not None
    group = Group(0, case.processes)
    placement = Placement(work.role, case.name, work, group, case.parallel, {}, case.tokens, case.checkpointing)
    return update(Cluster(device, case.processes), load, placement).seconds, measured


def seconds_of_case(
    case: Case, cluster: Cluster, rounds: int
) -> tuple[tuple[float, float], Callable[[], tuple[float, float]]]:
    """Return the planned seconds of update and scoring, and a function that measures them."""
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

    return planned, lambda: (seconds_of(run, rounds), seconds_of(score, rounds))


if __name__ == "__main__":
    sys.exit(main())
