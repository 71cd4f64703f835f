"""Writes docs/results.md and its plot from a finished run on the reviews.

python examples/reviews/report.py runs/reviews
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

try:
    import matplotlib
except ModuleNotFoundError:
    sys.exit("error: the report needs matplotlib; make check installs it with the other tools for development")

matplotlib.use("svg")
import matplotlib.pyplot as plt

from quartet.errors import ConfigError
from quartet.telemetry.run_files import read_metrics

WINDOW = 10
COLUMNS = {
    "reward_mean": "reward",
    "kl_mean": "KL, nats per response",
    "eos_rate": "EOS rate",
    "response_tokens_mean": "tokens per response",
    "entropy": "entropy, nats per token",
    "explained_variance": "explained variance",
    "seconds": "seconds per step",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's directory")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where results.md goes")
    options = parser.parse_args()
    try:
        steps = read_metrics(options.run / "metrics.jsonl")
    except (OSError, ConfigError) as error:
        print(f"error: {options.run}: no finished run there ({error})", file=sys.stderr)
        return 2
    plot(steps, options.docs / "results.svg")
    (options.docs / "results.md").write_text(page(steps), encoding="utf-8")
    print(f"wrote {options.docs / 'results.md'}")
    return 0


def page(steps: list[dict[str, float]]) -> str:
    header = "| steps | " + " | ".join(COLUMNS.values()) + " |"
    rows = [header, "|" + "---|" * (len(COLUMNS) + 1)]
    for start in range(0, len(steps), WINDOW):
        part = steps[start : start + WINDOW]
        cells = [f"{mean(part, name):.2f}" for name in COLUMNS]
        rows.append(f"| {start + 1}-{start + len(part)} | " + " | ".join(cells) + " |")
    last = steps[-WINDOW:]
    lowest_eos = min(step["eos_rate"] for step in steps)
    return "\n".join(
        [
            "# Results",
            "",
            "## Film reviews",
            "",
            "A small Llama (width 128, 2 layers), trained on 10,662 review sentences, learns by PPO to write more positive",
            "ones: 64 prompts a step, at most 48 tokens, 4 epochs, β 0.05, constant learning rate, fp32, on two CPU cores.",
            "The whole of it, data preparation included:",
            "",
            "```sh",
            "make acceptance POSITIVE=positive.txt NEGATIVE=negative.txt",
            "```",
            "",
            f"The mean reward is {mean(steps[:WINDOW], 'reward_mean'):.2f} over the first {WINDOW} steps and "
            f"**{mean(last, 'reward_mean'):.2f}** over the last {WINDOW}, at a KL of **{mean(last, 'kl_mean'):.1f}** nats per "
            f"response. The EOS rate is {mean(last, 'eos_rate'):.2f} there, and {lowest_eos:.2f} in the step where it is lowest.",
            "",
            "![reward, KL and EOS rate over the steps](results.svg)",
            "",
            *rows,
            "",
            "Means over ten steps each. Seconds are of the machine at hand, and no claim. The page and the plot are written by",
            "`examples/reviews/report.py` from the run's `metrics.jsonl`.",
            "",
        ]
    )


def mean(steps: list[dict[str, float]], name: str) -> float:
    return statistics.fmean(step[name] for step in steps)


def plot(steps: list[dict[str, float]], path: Path) -> None:
    plt.rcParams["svg.hashsalt"] = "quartet"
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
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
