"""From pairs to a policy: the three commands of examples/dialogue with a tiny model, their times and curves.

Runs tiny.py, quartet sft, quartet reward-model and quartet train in a new folder, with one thread per process. Writes the times,
the mean of each part of the steps, and a plot to docs/pairs.md.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import matplotlib

from benchmarks import machine
from benchmarks.options import add_shared, page_of, parser_of, publish
from quartet.run_directory.step_lines import read_step_lines

matplotlib.use("svg")
import matplotlib.pyplot as plt

EXAMPLE = Path("examples/dialogue").absolute()
STAGES = (
    ("sft", "tiny-sft.yaml", "dialogue-sft", "loss", "validation_loss"),
    ("reward-model", "tiny-reward-model.yaml", "dialogue-reward-model", "accuracy", "validation_accuracy"),
    ("train", "tiny.yaml", "dialogue-tiny", "reward_mean", "eval_reward_sampled"),
)
"""Command, config, run, metric, and its name for held-out rows."""
PARTS = 5
"""Parts of the steps in the table."""


def main() -> None:
    """Run the commands and write the page."""
    parser = parser_of("pairs", __doc__)
    add_shared(parser, "build/pairs", Path("docs/pairs.md"), contents="runs")
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    first = [sys.executable, str(EXAMPLE / "tiny.py"), "build/dialogue/data", "build/dialogue/base"]
    quartet = str(Path(sys.executable).with_name("quartet"))
    rows, report = [], {"tiny.py": {"seconds": timed(first, options.folder)}}
    figure, axes = plt.subplots(1, len(STAGES), figsize=(11, 3), layout="constrained")
    for axis, (command, config, name, metric, held_out) in zip(axes, STAGES, strict=True):
        seconds = timed([quartet, command, str(EXAMPLE / config)], options.folder)
        folder = options.folder / "runs" / name
        lines = read_step_lines(folder / "metrics.jsonl")
        values = [line[metric] for line in lines]
        points = [line for line in lines + read_step_lines(folder / "evaluations.jsonl") if held_out in line]
        axis.plot([line["step"] for line in lines], values, label="training")
        axis.plot([line["step"] for line in points], [line[held_out] for line in points], "o-", label="held out")
        axis.set(title=f"quartet {command}", xlabel="step", ylabel=metric)
        axis.legend()
        parts = [len(values) * part // PARTS for part in range(PARTS + 1)]
        means = [statistics.fmean(values[a:b]) for a, b in pairwise(parts)]
        last = points[-1][held_out]
        report[command] = {"seconds": seconds, "steps": len(lines), "means": means, "held_out": last}
        cells = [f"`{command}`", f"{seconds:.0f} s", str(len(lines)), f"`{metric}`", *(f"{mean:.2f}" for mean in means)]
        rows.append(f"| {' | '.join([*cells, f'{last:.2f}'])} |")
    if (page := page_of(parser, options)) is not None:
        with plt.rc_context({"svg.hashsalt": "quartet"}):
            figure.savefig(page.with_name("pairs.svg"), metadata={"Date": None})
    fifths = " | ".join(f"{part}/{PARTS}" for part in range(1, PARTS + 1))
    text = "\n".join(
        [
            f"{machine.describe()}. Means of each fifth of the steps; the last column is the last evaluation on held-out "
            f"rows. `tiny.py` took {report['tiny.py']['seconds']:.0f} s.",
            "",
            f"| command | time | steps | metric | {fifths} | held out |",
            "|---|---|---|---|" + "---|" * (PARTS + 1),
            *rows,
            "",
            "![loss of sft, accuracy of the reward model and reward of RLHF over their steps](pairs.svg)",
        ]
    )
    publish(parser, options, report, text)


def timed(command: list[str], folder: Path) -> float:
    """Run a command in ``folder``, and return its duration in seconds. Raises CalledProcessError."""
    begun = time.monotonic()
    subprocess.run(command, cwd=folder, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return time.monotonic() - begun


if __name__ == "__main__":
    main()
