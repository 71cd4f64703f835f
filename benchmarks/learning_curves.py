"""Learning curves of examples whose model and prompts the example makes, for three seeds each.

`make learning-curves`, or python -m benchmarks.learning_curves. For each example: prepare.py, then for each seed a run of the
example's config. Writes the mean reward of each PART steps to docs/verifiers.md.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import machine, page
from benchmarks.options import add_shared, page_of, parser_of
from quartet.run_directory.step_lines import read_step_lines

EXAMPLES = ("arithmetic", "code")
SEEDS = (0, 1, 2)
PART = 10
"""Steps of which the table has the mean."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("learning_curves", __doc__)
    parser.add_argument("--examples", nargs="+", choices=EXAMPLES, default=list(EXAMPLES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    add_shared(parser, "build/learning-curves", Path("docs/verifiers.md"))
    options = parser.parse_args(arguments)
    host = machine.describe()
    for example in options.examples:
        prepare = [sys.executable, f"examples/{example}/prepare.py", str(options.folder.absolute() / example)]
        subprocess.run(prepare, check=True)
    curves = {
        (example, seed): curve(example, seed, options.folder) for example in options.examples for seed in options.seeds
    }
    (options.folder / "results.json").write_text(
        json.dumps({f"{example} {seed}": rewards for (example, seed), (rewards, _) in curves.items()}, indent=1) + "\n"
    )
    text = table(curves, host)
    print(text)
    page.write(page_of(parser, options), "learning-curves", text)
    return 0


def curve(example: str, seed: int, folder: Path) -> tuple[list[float], float]:
    """Train an example. Return the mean reward of each step and the seconds of the run. Raises CalledProcessError."""
    inputs = folder.absolute() / example
    begun = time.monotonic()
    settings = {
        "run.name": f"{example}-{seed}",
        "run.seed": str(seed),
        "run.directory": str(folder.absolute() / "runs"),
        "actor.model": str(inputs / "policy"),
        "data.prompts": str(inputs / "prompts.jsonl"),
    }
    command = [
        str(Path(sys.executable).with_name("quartet")),
        "train",
        f"examples/{example}/{example}.yaml",
        "--overwrite",
    ]
    subprocess.run([*command, *(f"{name}={value}" for name, value in settings.items())], check=True)
    seconds = time.monotonic() - begun
    steps = read_step_lines(folder / "runs" / f"{example}-{seed}" / "metrics.jsonl")
    return [step["score_mean"] for step in steps], seconds


def table(curves: dict[tuple[str, int], tuple[list[float], float]], host: str) -> str:
    """Return the table for the page."""
    longest = max(len(rewards) for rewards, _ in curves.values())
    parts = range(0, longest, PART)
    lines = [
        f"{host}. Mean score of each {PART} steps, from 0 to 1.",
        "",
        f"| example | seed | {' | '.join(f'{at + 1}-{min(at + PART, longest)}' for at in parts)} | seconds |",
        f"|---|---|{'---|' * len(parts)}---|",
    ]
    for (example, seed), (rewards, seconds) in curves.items():
        means = [f"{statistics.fmean(rewards[at : at + PART]):.2f}" if rewards[at:] else "" for at in parts]
        lines.append(f"| {example} | {seed} | {' | '.join(means)} | {seconds:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
