"""A run of 1,000 steps on a tiny model, with samples of the memory and open files of every process and the memory of Redis.

Writes samples and results below build/, and a table into docs/evidence/durability.md. The exit status is 1 if memory or open
files grow.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import yaml

from benchmarks import page
from benchmarks.options import add_shared, page_of, parser_of, positive
from quartet.buffer.connection import Redis, connect
from quartet.buffer.embedded_redis import EmbeddedRedis
from quartet.contract.status import MODEL_ROLES
from quartet.demo.pretraining import Schedule, Shape
from quartet.demo.toy_task import Recipe, make_toy_task
from quartet.system.child_processes import tied_to_parent

RUN = "soak"
RECIPE = Recipe(
    vocabulary=300,
    shape=Shape(hidden=16, layers=1, heads=2, positions=128),
    reviews=64,
    preferences=32,
    policy=Schedule(steps=4, batch_sequences=8),
    reward=Schedule(steps=3, batch_sequences=8),
)
CHECKPOINT_EVERY = 50
INTERVAL = 1.0
"""Seconds between samples."""
WARM_UP = 0.2
"""Fraction of the steps after which memory must be flat."""
ALLOWED = 0.1
"""Maximum growth per step, as a fraction of the sealed experience of one step. A process that keeps one of ten trajectories grows
that much. The growth caused by the allocator is far below it in a run of this length."""
SILENCE = 120.0
"""Seconds without a new step after which the run counts as hung."""
KIB = 1024


@dataclass(frozen=True)
class Sample:
    """Resident memory in bytes and open files of each process, and bytes that Redis uses."""

    step: int
    seconds: float
    resident: dict[str, int]
    files: dict[str, int]
    redis_used: int


@dataclass(frozen=True)
class Row:
    """One process: MiB after the warm-up and at the end, slope in KiB per 100 steps, and open files at both times if known."""

    name: str
    mebibytes_first: float
    mebibytes_last: float
    slope: float
    files_first: int | None
    files_last: int | None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("soak", __doc__)
    parser.add_argument("--steps", type=positive, default=1000)
    add_shared(parser, "build/soak", Path("docs/evidence/durability.md"), contents="run and results")
    options = parser.parse_args(arguments)
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    with EmbeddedRedis(options.folder / "redis", options.folder / "redis.log") as server:
        samples, experience = _run(options.folder, options.steps, server)
    bound = ALLOWED * experience * 100 / KIB
    rows = rows_of(samples, options.steps)
    faults = faults_of(rows, bound)
    seconds = samples[-1].seconds
    report = {
        "steps": options.steps,
        "seconds": seconds,
        "experience_bytes": experience,
        "bound_kib_per_100_steps": bound,
        "rows": [asdict(row) for row in rows],
        "faults": faults,
        "samples": [asdict(sample) for sample in samples],
    }
    (options.folder / "soak.json").write_text(json.dumps(report, indent=1) + "\n")
    text = table(rows, options.steps, seconds, experience, bound, faults)
    print(text)
    page.write(page_of(parser, options), "soak", text)
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    return 1 if faults else 0


def _config(folder: Path, steps: int, url: str) -> Path:
    toy_task = make_toy_task(folder / "toy-task", recipe=RECIPE)
    tree = {
        "run": {"name": RUN, "steps": steps, "directory": str(folder / "runs")},
        "data": {"prompts": str(toy_task.prompts), "validation": str(toy_task.prompts), "max_prompt_tokens": 24},
        "algorithm": {"score": {"normalize": "running"}, "kl_controller": {"kind": "adaptive"}},
        "rollout": {"prompts_per_step": 32, "max_response_tokens": 24, "score_batch_size": 8},
        "actor": {"model": str(toy_task.policy), "learning_rate": 1e-5},
        "critic": {"learning_rate": 1e-5},
        "reward": {"model": str(toy_task.reward)},
        "evaluation": {"every_steps": CHECKPOINT_EVERY, "max_prompts": 8},
        "checkpoint": {"every_steps": CHECKPOINT_EVERY, "keep_last": 2},
        "buffer": {"url": url},
        "services": {role.value: {"num_threads": 1} for role in MODEL_ROLES},
    }
    path = folder / "soak.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def _run(folder: Path, steps: int, server: EmbeddedRedis) -> tuple[list[Sample], int]:
    """Run training. Return the samples, and the bytes of one step's sealed experience. Raises RuntimeError if the run fails."""
    config = _config(folder.absolute(), steps, server.url)
    command = [str(Path(sys.executable).with_name("quartet")), "train", str(config)]
    redis = connect(server.url)
    metrics = folder / "runs" / RUN / "metrics.jsonl"
    step_of, watchdog = _counter(metrics), _Watchdog()
    samples: list[Sample] = []
    experience: list[int] = []
    with (folder / "train.log").open("wb") as log:
        run = subprocess.Popen(tied_to_parent(command), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            while run.poll() is None:
                time.sleep(INTERVAL)
                step = step_of()
                watchdog.check(step)
                if step:
                    samples.append(
                        _sample(step, watchdog.seconds, {**_processes(run.pid), "redis": server.process.pid}, redis)
                    )
                    experience += _experience_bytes(redis)
                if sys.stdout.isatty():
                    print(f"\rstep {step} of {steps}", end="", flush=True)
        finally:
            if run.poll() is None:
                run.terminate()
            run.wait(60)
    if run.returncode or step_of() != steps:
        raise RuntimeError(
            f"the run ended with status {run.returncode} after step {step_of()}; see {folder / 'train.log'}"
        )
    return samples, int(statistics.median(experience))


class _Watchdog:
    """Detector of a run without new steps; ``check`` raises RuntimeError."""

    def __init__(self) -> None:
        self._started = self._since = time.monotonic()
        self._step = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def check(self, step: int) -> None:
        now = time.monotonic()
        if step != self._step:
            self._step, self._since = step, now
        if now - self._since > SILENCE:
            raise RuntimeError(f"no step after step {step} for {SILENCE:g} s")


def _counter(metrics: Path) -> Callable[[], int]:
    """Return a function that counts the lines of a growing file and reads each line once."""
    read, lines = 0, 0

    def count() -> int:
        nonlocal read, lines
        if metrics.exists():
            with metrics.open("rb") as file:
                file.seek(read)
                appended = file.read()
            read, lines = read + len(appended), lines + appended.count(b"\n")
        return lines

    return count


def _processes(launcher: int) -> dict[str, int]:
    """Return the process ids of the launcher and its services, by name."""
    result = {"launcher": launcher}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The command is in parentheses and may contain any character; the parent is the second field after it.
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            line = (entry / "cmdline").read_bytes().decode(errors="replace")
        except (OSError, IndexError):
            continue
        if parent == launcher and line.startswith("quartet.services "):
            result[line.split()[1]] = int(entry.name)
    return result


def _sample(step: int, seconds: float, processes: dict[str, int], redis: Redis) -> Sample:
    resident, files = {}, {}
    for name, pid in processes.items():
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            files[name] = len(os.listdir(f"/proc/{pid}/fd"))
            resident[name] = KIB * int(status.partition("VmRSS:")[2].split()[0])
        except (OSError, IndexError):  # The process has ended.
            continue
    return Sample(step, seconds, resident, files, int(redis.info("memory")["used_memory"]))


def _experience_bytes(redis: Redis) -> list[int]:
    keys = list(redis.scan_iter(match=f"quartet:{RUN}:experience:*", count=1000))
    # None if the key was freed in the meantime.
    return [int(redis.memory_usage(keys[0], samples=0) or 0)] if keys else []


def rows_of(samples: Sequence[Sample], steps: int) -> list[Row]:
    """Return a row for each process, and one for the memory that Redis reports, without the samples of the warm-up."""
    warm = [sample for sample in samples if sample.step >= WARM_UP * steps]
    names = sorted(set.intersection(*(set(sample.resident) for sample in warm[: len(warm) // 2])))
    rows = []
    for name in names:
        present = [sample for sample in warm if name in sample.resident and name in sample.files]
        memory = [sample.resident[name] for sample in present]
        rows.append(_row(name, present, memory, [sample.files[name] for sample in present]))
    rows.append(_row("redis, used_memory", warm, [sample.redis_used for sample in warm], None))
    return rows


def _row(name: str, samples: Sequence[Sample], memory: Sequence[int], files: Sequence[int] | None) -> Row:
    tenth = max(1, len(samples) // 10)
    first, last = statistics.median(memory[:tenth]), statistics.median(memory[-tenth:])
    counts = (
        (None, None)
        if files is None
        else (statistics.median_high(files[:tenth]), statistics.median_low(files[-tenth:]))
    )
    return Row(
        name, first / KIB**2, last / KIB**2, 100 * slope([sample.step for sample in samples], memory) / KIB, *counts
    )


def slope(steps: Sequence[int], values: Sequence[int]) -> float:
    """Return the median slope between all pairs of samples (Theil 1950, Sen 1968), which ignores short drops of memory."""
    x, y = np.asarray(steps, np.float64), np.asarray(values, np.float64)
    later, earlier = np.nonzero(x[:, None] > x[None, :])
    return float(np.median((y[later] - y[earlier]) / (x[later] - x[earlier])))


def faults_of(rows: Sequence[Row], bound: float) -> list[str]:
    """Return a message for each process that grows. ``bound``: maximum slope in KiB per 100 steps."""
    result = [
        f"{row.name}: memory rises by {row.slope:.0f} KiB per 100 steps, at most {bound:.0f} are allowed"
        for row in rows
        if row.slope > bound
    ]
    return result + [
        f"{row.name}: had {row.files_first} open files, has {row.files_last}"
        for row in rows
        if row.files_first is not None and row.files_last is not None and row.files_last > row.files_first
    ]


def table(rows: Sequence[Row], steps: int, seconds: float, experience: int, bound: float, faults: Sequence[str]) -> str:
    """Return the table for the page."""
    lines = [
        f"{steps} steps in {seconds / 60:.0f} minutes on {os.cpu_count()} CPU cores, {seconds / steps:.2f} s per step: "
        + ("memory and open files stay flat." if not faults else f"**not flat**: {'; '.join(faults)}."),
        "",
        f"The sealed experience of a step has {experience / KIB:.0f} KiB. A leak of one in ten trajectories has a slope of "
        f"{bound:.0f} KiB per 100 steps.",
        "",
        "| process | MiB after warm-up | MiB at the end | slope, KiB per 100 steps | open files after warm-up, at the end |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        files = "" if row.files_first is None else f"{row.files_first}, {row.files_last}"
        lines.append(
            f"| {row.name} | {row.mebibytes_first:.1f} | {row.mebibytes_last:.1f} | {row.slope:+.1f} | {files} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
