"""Overlap of generation and updates on two simulated devices, by `rollout.max_off_policy_steps`.

A generator works on one simulated device, actor and critic train on the other. They sleep for a stated time per token
(`benchmarks/simulated.py`); gRPC, the embedded Redis, and the orchestrator with its files are real. Runs with different
settings take the same steps, whose responses differ in length. The services record the start and end of each generation and
each update. The critical path is the duration of the same steps if only the services took time: a generation starts when its
policy version exists and the generator is free, scoring starts when a batch is complete, and an update starts after its scores
and after the update before it. Writes the results below build/, and table and timeline into docs/evidence/performance.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.options import add_shared, parser_of, positive, publish
from benchmarks.orchestration import MAX_RESPONSE, PROMPT, SCORE_BATCH, SEED, critical_path, train
from benchmarks.simulated import Times, response_lengths
from quartet.contract.random_streams import prompt_order
from quartet.contract.status import Role
from quartet.errors import QuartetError
from quartet.telemetry.logs import configure_logs

OFF_POLICY = (0, 1, 2, 4)
"""Values of rollout.max_off_policy_steps."""
TRAJECTORIES = 8
"""Trajectories per step. With few, the steps differ in length."""
STATED = Times(generate=250e-6, score=8e-6, values=8e-6, update=225e-6)
"""Seconds per token: about 2 s of generation and 1.8 s of update per step."""
STEPS = 24
MARGIN = 4
"""Steps that are left out at the start and at the end of a run, where the generator is ahead or has nothing to do."""
DRAWN = 4
"""Updates in the drawing of a run."""
CELL = 0.2
"""Seconds per character in the drawing."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Work:
    """Seconds at which each step was generated and trained on, from step 1 on."""

    generations: list[Interval]
    updates: list[Interval]


@dataclass(frozen=True)
class Result:
    """One run: its work, and the work if only the services took time."""

    max_off_policy_steps: int
    work: Work
    critical: Work


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("overlap", __doc__)
    parser.add_argument("--steps", type=positive, default=STEPS, help=f"steps per run, more than {2 * MARGIN}")
    add_shared(parser, "build/overlap")
    options = parser.parse_args(arguments)
    if options.steps <= 2 * MARGIN:
        parser.error(f"--steps {options.steps}: expected more than {2 * MARGIN}")
    torch.set_num_threads(1)  # As in the orchestrator.
    host = machine.describe()
    options.folder.mkdir(parents=True, exist_ok=True)
    configure_logs("orchestrator")
    try:
        results = [measure(count, options.steps, STATED, options.folder) for count in OFF_POLICY]
    except QuartetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = {"machine": host, "stated": asdict(STATED), "results": [asdict(result) for result in results]}
    publish(parser, options, report, f"{table(results, host)}\n\n```\n{drawing(results)}\n```")
    return 0


def measure(max_off_policy_steps: int, steps: int, times: Times, folder: Path) -> Result:
    """Run ``steps`` steps. Raises the error of the run if it fails."""
    activity = (folder / "activity.jsonl").absolute()
    activity.unlink(missing_ok=True)
    rollout = {"prompts_per_step": TRAJECTORIES, "max_off_policy_steps": max_off_policy_steps}
    prompts = steps * TRAJECTORIES
    train(rollout, steps, prompts, 1, 1, times, folder, activity)
    lines = [json.loads(line) for line in activity.read_text().splitlines()]

    def of(role: Role) -> list[Interval]:
        own = sorted((line for line in lines if line["role"] == role), key=lambda line: line["step"])
        return [(line["start"] - start, line["end"] - start) for line in own]

    start = min(line["start"] for line in lines)
    order = prompt_order(SEED, 0, prompts).tolist()
    lengths = [
        response_lengths(sorted(order[first : first + TRAJECTORIES]), MAX_RESPONSE)
        for first in range(0, prompts, TRAJECTORIES)
    ]
    work = Work(of(Role.GENERATOR), of(Role.ACTOR))
    return Result(max_off_policy_steps, work, critical_work(lengths, max_off_policy_steps, times))


def critical_work(lengths: Sequence[Sequence[int]], max_off_policy_steps: int, times: Times) -> Work:
    """Return the work of a run in which only the services take time. ``lengths``: response lengths of each step."""
    work, without_update = Work([], []), Times(times.generate, times.score, times.values)
    for index, step in enumerate(lengths):
        updates_needed = max(0, index - max_off_policy_steps)
        policy = work.updates[updates_needed - 1][1] if updates_needed else 0.0
        generation = max(policy, work.generations[-1][1] if index else 0.0)
        work.generations.append((generation, generation + sum(step) * times.generate))
        scored = generation + critical_path(step, PROMPT, SCORE_BATCH, 1, without_update)
        update = max(scored, work.updates[-1][1] if index else 0.0)
        work.updates.append((update, update + sum(step) * times.update))
    return work


def seconds_per_step(work: Work) -> float:
    """Return the seconds from the end of one update to the end of the next, without the margins."""
    first, last = work.updates[MARGIN - 1][1], work.updates[-MARGIN - 1][1]
    return (last - first) / (len(work.updates) - 2 * MARGIN)


def busy(work: Work) -> tuple[float, float, float]:
    """Return the shares of the time, without the margins, in which the generator works, updates run, and both do."""
    first, last = work.updates[MARGIN - 1][1], work.updates[-MARGIN - 1][1]

    def clipped(intervals: Sequence[Interval]) -> list[Interval]:
        return [(max(start, first), min(end, last)) for start, end in intervals if start < last and end > first]

    generations, updates = clipped(work.generations), clipped(work.updates)
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in generations for b in updates)
    totals = [sum(end - start for start, end in intervals) for intervals in (generations, updates)]
    return totals[0] / (last - first), totals[1] / (last - first), both / (last - first)


def table(results: Sequence[Result], host: str) -> str:
    """Return the table for the page."""
    generate, update = (f"{1e6 * seconds:g} µs" for seconds in (STATED.generate, STATED.update))
    steps = len(results[0].work.updates)
    lines = [
        f"{host}; the services run on it, too. Stated times: generation {generate} per response token, updates {update}, scores "
        f"and values {1e6 * STATED.score:g} µs per token of prompt and response. {TRAJECTORIES} responses of "
        f"{MAX_RESPONSE // 4} to {MAX_RESPONSE:,} tokens per step. Steps {MARGIN + 1} to {steps - MARGIN} of {steps}. "
        f"Overlap: share of the update time during which the generator works.",
        "",
        "| `max_off_policy_steps` | seconds per step | critical path, s | wall / critical path | generator busy | updates busy "
        "| overlap | speedup |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        wall, critical = seconds_per_step(result.work), seconds_per_step(result.critical)
        generator, updates, both = busy(result.work)
        speedup = seconds_per_step(results[0].work) / wall
        lines.append(
            f"| {result.max_off_policy_steps} | {wall:.2f} | {critical:.2f} | {wall / critical:.3f} | {generator:.0%} "
            f"| {updates:.0%} | **{both / updates:.0%}** | {speedup:.2f} |"
        )
    return "\n".join(lines)


def drawing(results: Sequence[Result]) -> str:
    """Return both devices over time as text: each character is CELL seconds, and shows the last digit of a step."""
    blocks = [f"one character: {CELL:g} s; digit: last digit of the step that is generated or trained on"]
    for result in results:
        work, index = result.work, MARGIN
        start, end = work.updates[index - 1][1], work.updates[index + DRAWN - 1][1]
        cells = round((end - start) / CELL)
        rows = [_row(intervals, start, cells) for intervals in (work.generations, work.updates)]
        blocks.append(
            f"\nmax_off_policy_steps: {result.max_off_policy_steps}\n  generator  {rows[0]}\n  updates    {rows[1]}"
        )
    return "\n".join(blocks)


def _row(intervals: Sequence[Interval], start: float, cells: int) -> str:
    characters = ["·"] * cells
    for step, (first, last) in enumerate(intervals, 1):
        for cell in range(max(0, round((first - start) / CELL)), min(cells, round((last - start) / CELL))):
            characters[cell] = str(step % 10)
    return "".join(characters)


if __name__ == "__main__":
    sys.exit(main())
