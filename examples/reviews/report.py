"""Write a page with table and plots of finished runs, one for each config in configs/reviews.

python examples/reviews/report.py runs/reviews-*
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

try:
    import matplotlib
except ModuleNotFoundError:
    sys.exit("error: the report needs matplotlib; make check installs it with the other tools for development")

matplotlib.use("svg")
import matplotlib.pyplot as plt

from quartet.config.loading import load_config
from quartet.config.root import Config
from quartet.errors import ConfigError
from quartet.run_directory.run_files import RunFiles
from quartet.run_directory.step_lines import read_step_lines

WINDOW = 10
TARGET_REWARD = 2.0
"""Target mean reward over a window."""
COLUMNS = {
    "reward_mean": "reward",
    "kl_mean": "KL, nats per response",
    "eos_rate": "EOS rate",
    "response_tokens_mean": "tokens per response",
    "entropy": "entropy, nats per token",
    "explained_variance": "explained variance",
    "seconds": "seconds per step",
}
DETAILED = "reviews-ppo"
"""Name of the run that the page shows in detail."""

Steps = list[dict[str, float]]


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run: its config and its metrics."""

    config: Config
    steps: Steps

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def title(self) -> str:
        """Return the estimator, and the settings that distinguish the run."""
        algorithm = self.config.algorithm
        parts = [algorithm.estimator]
        if not algorithm.estimator_spec.parameters.get("normalize_std", True):
            parts = ["grpo without the std"]
        if algorithm.policy_loss != "clipped":
            parts.append(algorithm.policy_loss)
        if self.config.actor.lora:
            parts.append("LoRA")
        return ", ".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="the runs' directories")
    parser.add_argument(
        "--out", type=Path, default=Path("build/reviews-report"), help="folder of results.md and its plots"
    )
    options = parser.parse_args()
    try:
        runs = [read(path) for path in options.runs]
    except (OSError, ConfigError) as error:
        print(f"error: not a finished run: {error}", file=sys.stderr)
        return 2
    detailed = next((run for run in runs if run.name == DETAILED), runs[0])
    options.out.mkdir(parents=True, exist_ok=True)
    plot_run(detailed.steps, options.out / "results.svg")
    plot_all_runs(runs, options.out / "estimators.svg")
    (options.out / "results.md").write_text(page(runs, detailed), encoding="utf-8")
    print(f"wrote {options.out / 'results.md'}")
    return 0


def read(directory: Path) -> Run:
    """Read a finished run. Raises OSError or ConfigError."""
    files = RunFiles(directory)
    return Run(load_config(files.config), read_step_lines(files.metrics))


def page(runs: list[Run], detailed: Run) -> str:
    return "\n".join(
        [
            "# Results",
            "",
            "What does each estimator learn on a small real task? To repeat the runs, data preparation included:",
            "",
            "```sh",
            "python examples/reviews/prepare.py positive.txt negative.txt build/reviews",
            "for config in configs/reviews/*.yaml; do quartet train $config --overwrite; done",
            "python examples/reviews/report.py runs/reviews-*",
            "```",
            "",
            "A small Llama (width 128, 2 layers), pretrained on film review sentences, learns to write more positive ones. A",
            "step has 64 responses of at most 48 tokens and 4 epochs, in float32. β follows a KL target of 6 nats.",
            "",
            *estimators(runs),
            "",
            *details(detailed),
            "",
            "Seconds depend on the machine. `examples/reviews/report.py` writes this page and its plots from the runs'",
            "`config.yaml` and `metrics.jsonl`.",
            "",
        ]
    )


def estimators(runs: list[Run]) -> list[str]:
    """Return the table with one row per run."""
    return [
        "## Each estimator",
        "",
        f"The configs are in `configs/reviews`. Rewards and KL are means over {WINDOW} steps. The initial policy's reward is",
        "about 0. Each run has seed 0. One seed per estimator is no ranking.",
        "",
        "| estimator | config | prompts × samples | learning rate | reward, last steps | KL there | EOS rate | tokens "
        f"| first at {TARGET_REWARD:g} | KL there |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *map(row, runs),
        "",
        "![reward over KL and over steps, each estimator](estimators.svg)",
    ]


def row(run: Run) -> str:
    rollout, last = run.config.rollout, run.steps[-WINDOW:]
    reached = first_at(run.steps)
    cells = [
        run.title,
        f"`{run.name.removeprefix('reviews-').replace('-', '_')}.yaml`",
        f"{rollout.prompts_per_step} × {rollout.samples_per_prompt}",
        f"{run.config.actor.learning_rate:g}",
        f"**{mean(last, 'reward_mean'):.2f}**",
        f"{mean(last, 'kl_mean'):.1f}",
        f"{mean(last, 'eos_rate'):.2f}",
        f"{mean(last, 'response_tokens_mean'):.1f}",
        "–" if reached is None else f"step {reached}",
        "–" if reached is None else f"{mean(run.steps[reached - WINDOW : reached], 'kl_mean'):.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


def first_at(steps: Steps) -> int | None:
    """Return the last step of the first window that reaches the target mean reward."""
    ends = range(WINDOW, len(steps) + 1)
    return next((end for end in ends if mean(steps[end - WINDOW : end], "reward_mean") >= TARGET_REWARD), None)


def details(run: Run) -> list[str]:
    """Return the table with one row per ten steps of a run."""
    columns = {name: title for name, title in COLUMNS.items() if name in run.steps[0]}
    rows = ["| steps | " + " | ".join(columns.values()) + " |", "|" + "---|" * (len(columns) + 1)]
    for start in range(0, len(run.steps), WINDOW):
        part = run.steps[start : start + WINDOW]
        cells = [f"{mean(part, name):.2f}" for name in columns]
        rows.append(f"| {start + 1}-{start + len(part)} | " + " | ".join(cells) + " |")
    last, lowest_eos = run.steps[-WINDOW:], min(step["eos_rate"] for step in run.steps)
    return [
        f"## One run in detail: {run.title}",
        "",
        f"The mean reward is {mean(run.steps[:WINDOW], 'reward_mean'):.2f} over the first {WINDOW} steps and "
        f"**{mean(last, 'reward_mean'):.2f}** over the last {WINDOW}, at a KL of **{mean(last, 'kl_mean'):.1f}** nats per "
        f"response. The EOS rate is {mean(last, 'eos_rate'):.2f} in these steps and at least {lowest_eos:.2f} in every step.",
        "",
        "![reward, KL and EOS rate over the steps](results.svg)",
        "",
        *rows,
    ]


def mean(steps: Steps, name: str) -> float:
    return statistics.fmean(step[name] for step in steps)


def plot_run(steps: Steps, path: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
    numbers = [step["step"] for step in steps]
    reward = [step["reward_mean"] for step in steps]
    spread = [step["reward_std"] for step in steps]
    axes[0].fill_between(
        numbers,
        [r - s for r, s in zip(reward, spread, strict=True)],
        [r + s for r, s in zip(reward, spread, strict=True)],
        alpha=0.2,
    )
    axes[0].plot(numbers, reward)
    axes[0].set_title("reward (band: one standard deviation)")
    axes[1].plot(numbers, [step["kl_mean"] for step in steps], color="tab:orange")
    axes[1].set_title("KL to the initial policy, nats per response")
    axes[2].plot(numbers, [step["eos_rate"] for step in steps], color="tab:green")
    axes[2].set_ylim(0, 1.02)
    axes[2].set_title("share of finished responses")
    for axis in axes:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    save(figure, path)


def plot_all_runs(runs: list[Run], path: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for run in runs:
        ends = range(WINDOW, len(run.steps) + 1)
        reward = [mean(run.steps[end - WINDOW : end], "reward_mean") for end in ends]
        kl = [mean(run.steps[end - WINDOW : end], "kl_mean") for end in ends]
        axes[0].plot(list(ends), reward, label=run.title)
        axes[1].plot(list(ends), kl)
        axes[2].plot(kl, reward)
    axes[0].axhline(TARGET_REWARD, color="grey", linewidth=0.8, linestyle="--")
    for axis, title, label in zip(
        axes,
        (f"reward, mean over {WINDOW} steps", "KL, nats per response", "reward over KL"),
        ("step", "step", "KL, nats per response"),
        strict=True,
    ):
        axis.set_title(title)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(runs), frameon=False)
    save(figure, path)


def save(figure: plt.Figure, path: Path) -> None:
    plt.rcParams["svg.hashsalt"] = "quartet"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
