"""Time from `quartet train` to the dashboard and to the first step, CPU seconds and memory of a whole run.

Each round is a run of 3 steps on a toy task. With `--compare COMMAND`, a run of another checkout's quartet command follows each
one. Memory is the maximum of the sum over all processes of the run, by proportional set size: a page that several processes
share counts once. Linux only.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import yaml

from benchmarks import machine
from benchmarks.options import add_shared, parser_of, publish
from benchmarks.soak import RECIPE
from quartet.demo.toy_task import make_toy_task
from quartet.system.child_processes import tied_to_parent

MARKS = {"dashboard": "dashboard: ", "first step": "step 1/"}
"""Beginnings of the lines of `quartet train` whose times are measured."""
INTERVAL = 0.1
"""Seconds between samples of memory and CPU time."""
MIB = 2**20


@dataclass
class Result:
    """One run: seconds to each mark and to the end, CPU seconds, and MiB of memory."""

    command: str
    marks: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    memory: float = 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("startup", __doc__)
    parser.add_argument("--compare", type=Path, metavar="COMMAND", help="quartet command of another checkout")
    add_shared(parser, "build/startup", rounds=3)
    options = parser.parse_args(arguments)
    commands = {"this checkout": Path(sys.executable).with_name("quartet")}
    if options.compare is not None:
        commands["compared"] = options.compare.absolute()
    host = machine.describe()
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder))
        results = [
            measure(name, command, Path(folder)) for _ in range(options.rounds) for name, command in commands.items()
        ]
    report = {"machine": host, "results": [asdict(result) for result in results]}
    publish(parser, options, report, table(results, host))
    return 0


def write_config(folder: Path) -> None:
    toy_task = make_toy_task(folder / "toy-task", recipe=RECIPE)
    tree = {
        "run": {"name": "startup", "steps": 3},
        "data": {"prompts": str(toy_task.prompts), "max_prompt_tokens": 24},
        "rollout": {"prompts_per_step": 8, "max_response_tokens": 12, "score_batch_size": 4},
        "actor": {"model": str(toy_task.policy)},
        "reward": {"model": str(toy_task.reward)},
        "services": {role: {"num_threads": 1} for role in ("actor", "critic", "reward", "reference")},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))


def measure(name: str, command: Path, folder: Path) -> Result:
    """Run ``command train`` once. Raises RuntimeError if it fails."""
    result = Result(name)
    start = time.monotonic()
    process = subprocess.Popen(
        tied_to_parent([str(command), "train", "config.yaml", "--overwrite"]),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            for mark, text in MARKS.items():
                if line.startswith(text):
                    result.marks.setdefault(mark, time.monotonic() - start)

    reader = threading.Thread(target=read)
    reader.start()
    cpu_seconds: dict[int, float] = {}
    while process.poll() is None:
        result.memory = max(result.memory, sample(process.pid, cpu_seconds))
        time.sleep(INTERVAL)
    reader.join()
    result.seconds, result.cpu_seconds = time.monotonic() - start, sum(cpu_seconds.values())
    if process.returncode != 0:
        raise RuntimeError(f"{command}: {process.stderr.read() if process.stderr else ''}")
    return result


def sample(pid: int, cpu_seconds: dict[int, float]) -> float:
    """Return the MiB of memory of a process and its descendants now, and update their CPU seconds by process id."""
    memory = 0
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    for process in processes:
        try:
            times = process.cpu_times()
            cpu_seconds[process.pid] = times.user + times.system
            memory += process.memory_full_info().pss
        except psutil.Error:  # The process has ended.
            continue
    return memory / MIB


def table(results: Sequence[Result], host: str) -> str:
    """Return the medians and ranges of each command as a Markdown table."""
    names = list(dict.fromkeys(result.command for result in results))
    rows = [
        *((f"seconds to the {mark}", [result.marks[mark] for result in results]) for mark in MARKS),
        ("seconds in total", [result.seconds for result in results]),
        ("CPU seconds", [result.cpu_seconds for result in results]),
        ("memory in MiB", [result.memory for result in results]),
    ]
    lines = [
        f"{len(results) // len(names)} runs each, {host}: median, and range in parentheses.",
        "",
        f"| | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    for label, values in rows:
        cells = []
        for name in names:
            own = [value for value, result in zip(values, results, strict=True) if result.command == name]
            digits = 0 if "MiB" in label else 1
            cells.append(f"{statistics.median(own):.{digits}f} ({min(own):.{digits}f} to {max(own):.{digits}f})")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
