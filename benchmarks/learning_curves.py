"""Learning curves of examples whose model and prompts the example makes, for three seeds each.

For each example: prepare.py, then for each seed a run of the example's config with one thread per process. Writes the mean
score of each PART steps, and plots, to docs/evidence/learning.md.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib

from benchmarks import machine, page
from benchmarks.options import add_shared, page_of, parser_of
from quartet.run_directory.step_lines import read_step_lines

matplotlib.use("svg")
import matplotlib.pyplot as plt

SEEDS = (0, 1, 2)
PART = 10
"""Steps of which the table has the mean."""
PAGE = Path("docs/evidence/learning.md")


@dataclass(frozen=True, slots=True)
class Example:
    """An example: its config, its plot, and the arguments of prepare.py that create a folder with policy and prompts.

    ``folder`` is that folder's name, "" for the example's name. ``service``: a command that runs beside the example.
    """

    config: str
    prepare: tuple[str, ...]
    plot: str
    folder: str = ""
    service: tuple[str, ...] = ()


SHOP = (".", "--tasks", "shop")
EXAMPLES = {
    "arithmetic": Example("examples/arithmetic/arithmetic.yaml", ("arithmetic",), "verifiers"),
    "code": Example("examples/code/code.yaml", ("code",), "verifiers"),
    "guessing": Example("examples/multi_turn/guessing.yaml", (".", "--games", "guessing"), "environments"),
    "calculator": Example("examples/multi_turn/calculator.yaml", (".", "--games", "calculator"), "environments"),
    "puzzle": Example("examples/multi_turn/puzzle.yaml", (".", "--games", "puzzle"), "environments"),
    "pydantic-ai": Example("examples/agents/pydantic_ai.yaml", SHOP, "agents", "shop"),
    "agents-sdk": Example(
        "examples/agents/agents_sdk.yaml",
        SHOP,
        "agents",
        "shop",
        ("build/agents-sdk/bin/python", "examples/agents/agents_sdk_service.py"),
    ),
    "node": Example("examples/agents/node.yaml", SHOP, "agents", "shop"),
    "compaction": Example("examples/agents/compaction.yaml", (".", "--tasks", "compaction"), "compaction"),
}
USUAL = [name for name, each in EXAMPLES.items() if not each.config.startswith("examples/agents/")]
"""Examples that need nothing but Quartet."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The mean score of each step, and what the run took, its start and end included."""

    scores: list[float]
    seconds: float
    cpu_seconds: float


Curves = Mapping[tuple[str, int], Curve]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("learning_curves", __doc__)
    parser.add_argument("--examples", nargs="+", choices=EXAMPLES, default=USUAL, help="default: those without agents")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    add_shared(parser, "build/learning-curves", PAGE, contents="models, runs and results")
    options = parser.parse_args(arguments)
    folder: Path = options.folder.absolute()
    host = machine.describe()
    folder.mkdir(parents=True, exist_ok=True)
    curves = {}
    for example in options.examples:
        prepare(example, folder)
        for seed in options.seeds:
            curves[example, seed] = curve(example, seed, folder)
            results = {f"{name} {of}": asdict(each) for (name, of), each in curves.items()}
            (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(table(curves, host))
    plot(curves, folder / "curves.svg")
    if (path := page_of(parser, options)) is not None:
        text = table(curves, host)
        for group in dict.fromkeys(EXAMPLES[example].plot for example in options.examples):
            picture = path.with_name(f"{path.stem}-{group}.svg")
            plot({key: each for key, each in curves.items() if EXAMPLES[key[0]].plot == group}, picture)
            text += f"\n\n![score of each step of the {group}, a line for each seed]({picture.name})"
        chosen = "" if options.examples == USUAL else f" --examples {' '.join(options.examples)}"
        page.write(path, f"learning_curves{chosen}", text)
    return 0


def prepare(example: str, folder: Path) -> None:
    """Create the policy and the prompts of an example, unless they are there. Raises CalledProcessError."""
    each = EXAMPLES[example]
    if (folder / (each.folder or example) / "prompts.jsonl").exists():
        return
    out, *others = each.prepare
    program = Path(each.config).with_name("prepare.py")
    subprocess.run([sys.executable, program, folder / out, *others], check=True, env=environment())


def curve(example: str, seed: int, folder: Path) -> Curve:
    """Train an example. Raises CalledProcessError."""
    begun, cpu_before = time.monotonic(), cpu_seconds_of_children()
    name, each = f"{example}-{seed}", EXAMPLES[example]
    made = folder / (each.folder or example)
    settings = {
        "run.name": name,
        "run.seed": seed,
        "run.directory": folder / "runs",
        "actor.model": made / "policy",
        "data.prompts": made / "prompts.jsonl",
    }
    command: list[str | Path] = [Path(sys.executable).with_name("quartet"), "train", each.config]
    for setting, value in settings.items():
        command += ["--set", f"{setting}={value}"]
    service = subprocess.Popen(each.service, env=environment()) if each.service else None
    try:
        subprocess.run([*command, "--overwrite"], check=True, env=environment())
    finally:
        if service is not None:
            service.terminate()
            service.wait()
    steps = read_step_lines(folder / "runs" / name / "metrics.jsonl")
    scores = [step["score_mean"] for step in steps]
    return Curve(scores, time.monotonic() - begun, cpu_seconds_of_children() - cpu_before)


def environment() -> dict[str, str]:
    """Return the environment of the programs: one thread per process."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def cpu_seconds_of_children() -> float:
    """Return the CPU time of all processes that have ended below this one."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def table(curves: Curves, host: str) -> str:
    """Return the table for the page."""
    longest = max(len(each.scores) for each in curves.values())
    parts = range(0, longest, PART)
    columns = " | ".join(f"{at + 1}-{min(at + PART, longest)}" for at in parts)
    lines = [
        f"{host}, one thread per process. Mean score, from 0 to 1, of the first step and of each {PART} steps.",
        "",
        f"| example | seed | step 1 | {columns} | CPU seconds | seconds |",
        f"|---|---|---|{'---|' * len(parts)}---|---|",
    ]
    for (example, seed), each in curves.items():
        means = [f"{statistics.fmean(part):.2f}" if (part := each.scores[at : at + PART]) else "" for at in parts]
        lines.append(
            f"| {example} | {seed} | {each.scores[0]:.2f} | {' | '.join(means)} | {each.cpu_seconds:.0f} | {each.seconds:.0f} |",
        )
    return "\n".join(lines)


def plot(curves: Curves, path: Path) -> None:
    """Write a plot with a panel for each example and a line for each seed."""
    examples = list(dict.fromkeys(example for example, _ in curves))
    figure, axes = plt.subplots(
        1, len(examples), figsize=(4.5 * len(examples), 3.2), layout="constrained", squeeze=False
    )
    for axis, example in zip(axes[0], examples, strict=True):
        for (name, seed), each in curves.items():
            if name == example:
                axis.plot(range(1, len(each.scores) + 1), each.scores, label=f"seed {seed}", linewidth=1.2)
        axis.set_title(f"{example}: mean score of a step")
        axis.set_xlabel("step")
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.3)
    axes[0][0].legend(frameon=False)
    with plt.rc_context({"svg.hashsalt": "quartet"}):
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
