"""Tables and plots of the evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import matplotlib

from benchmarks.evidence.experiments import VARIATIONS, Experiment
from benchmarks.evidence.runs import Result
from quartet.runs.intervals import mean_interval

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

WINDOW = 10
"""Steps whose mean is one value of a curve in the tables."""
EQUAL_REWARDS = (0.5, 1.0, 1.5)
"""Rewards at which the KL is compared."""

Results = Mapping[Experiment, Result]


def interval(values: Sequence[float], digits: int = 2) -> str:
    """Return the mean with the half width of its 95 % confidence interval."""
    if not values:
        return "–"
    mean, half = mean_interval(values)
    return f"{mean:.{digits}f} ± {half:.{digits}f}" if len(values) > 1 else f"{mean:.{digits}f}"


def kl_at(curves: Mapping[str, Sequence[float]], reward: float) -> float | None:
    """Return the mean KL over the first ``WINDOW`` steps whose mean reward is at least ``reward``; None if there are none."""
    rewards, kl = curves["reward_mean"], curves["kl_mean"]
    for end in range(WINDOW, len(rewards) + 1):
        if fmean(rewards[end - WINDOW : end]) >= reward:
            return fmean(kl[end - WINDOW : end])
    return None


def algorithm_table(results: Results) -> str:
    """Return the table of the final policies of each algorithm."""
    groups = _by(results, lambda each: each.config.stem)
    lines = [
        f"| config | runs | reward | over model seeds | KL, nats per response | reward per nat | EOS rate | {_kl_titles()} |",
        f"|---|---|---|---|---|---|---|{'---|' * len(EQUAL_REWARDS)}",
    ]
    for name, runs in sorted(groups.items(), key=lambda item: -fmean(run.final.reward for run in item[1].values())):
        final = [run.final for run in runs.values()]
        per_model = [
            fmean(run.final.reward for run in some.values())
            for some in _by(runs, lambda each: str(each.model_seed)).values()
        ]
        cells = [
            interval([each.reward for each in final]),
            interval(per_model),
            interval([each.kl for each in final]),
            interval([each.reward / each.kl for each in final]),
            interval([each.eos_rate for each in final]),
            *(_kl_cell(list(runs.values()), reward) for reward in EQUAL_REWARDS),
        ]
        lines.append(f"| `{name}.yaml` | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def variation_table(results: Results) -> str:
    """Return the table of variations of the default config: one run on each model seed, and differences on the same models."""
    titles = {settings: title for title, settings in VARIATIONS.items()}
    lines = [
        "| `ppo.yaml` with | runs | reward | difference from as shipped | KL, nats per response | difference | EOS rate "
        f"| {_kl_titles()} |",
        f"|---|---|---|---|---|---|---|{'---|' * len(EQUAL_REWARDS)}",
    ]
    groups: dict[str, dict[int, Result]] = {}
    for experiment, result in results.items():
        groups.setdefault(titles[experiment.settings], {})[experiment.model_seed] = result
    shipped = groups[next(iter(VARIATIONS))]
    for title, by_model in groups.items():
        runs = list(by_model.values())
        pairs = [(run.final, shipped[model].final) for model, run in by_model.items() if model in shipped]
        cells = [
            interval([run.final.reward for run in runs]),
            interval([own.reward - other.reward for own, other in pairs]),
            interval([run.final.kl for run in runs]),
            interval([own.kl - other.kl for own, other in pairs]),
            interval([run.final.eos_rate for run in runs]),
            *(_kl_cell(runs, reward) for reward in EQUAL_REWARDS),
        ]
        lines.append(f"| {title} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def default_table(results: Results) -> str:
    """Return the table of runs with the default config: reward and KL at the middle and at the end."""
    lines = [
        "| model seed | steps | reward at half | KL at half | reward at the end | KL at the end | largest KL of "
        f"{WINDOW} steps | β at the end | final policy: reward | KL |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for experiment, run in results.items():
        rewards, kl = run.curves["reward_mean"], run.curves["kl_mean"]
        half = len(rewards) // 2
        largest = max(fmean(kl[end - WINDOW : end]) for end in range(WINDOW, len(kl) + 1))
        cells = [
            f"{fmean(rewards[half - WINDOW : half]):.2f}",
            f"{fmean(kl[half - WINDOW : half]):.2f}",
            f"{fmean(rewards[-WINDOW:]):.2f}",
            f"{fmean(kl[-WINDOW:]):.2f}",
            f"{largest:.2f}",
            f"{run.curves['kl_coefficient'][-1]:.3f}",
            f"{run.final.reward:.2f}",
            f"{run.final.kl:.2f}",
        ]
        lines.append(f"| {experiment.model_seed} | {len(rewards)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def beside_table(results: Results) -> str:
    """Return the table of Quartet beside TRL: final policies, and the differences of pairs with the same models and seed."""
    lines = [
        "| config | pairs | reward, TRL | Quartet | difference | over model seeds | KL, TRL | Quartet | difference "
        "| over model seeds | EOS rate, TRL | Quartet |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in _by(results, lambda each: each.config.stem).items():
        sides = {
            side: {(each.model_seed, each.run_seed): run.final for each, run in runs.items() if each.side == side}
            for side in ("trl", "quartet")
        }
        pairs = sorted(sides["trl"].keys() & sides["quartet"].keys())
        trl, quartet = ([sides[side][pair] for pair in pairs] for side in ("trl", "quartet"))
        cells = []
        for metric in ("score", "kl"):
            ours, theirs = ([getattr(each, metric) for each in side] for side in (quartet, trl))
            difference = [own - other for own, other in zip(ours, theirs, strict=True)]
            per_model: dict[int, list[float]] = {}
            for (model, _), value in zip(pairs, difference, strict=True):
                per_model.setdefault(model, []).append(value)
            cells += [
                interval(theirs),
                interval(ours),
                f"**{interval(difference)}**",
                interval([fmean(values) for values in per_model.values()]),
            ]
        cells += [interval([each.eos_rate for each in side]) for side in (trl, quartet)]
        lines.append(f"| `{name}.yaml` | {len(pairs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot_default(results: Results, path: Path) -> None:
    """Plot reward, KL, KL coefficient and EOS rate of each default run over the steps."""
    titles = {
        "reward_mean": "reward",
        "kl_mean": "KL, nats per response",
        "kl_coefficient": "KL coefficient β",
        "eos_rate": "EOS rate",
    }
    figure, axes = plt.subplots(1, len(titles), figsize=(13, 3.2), layout="constrained")
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        for experiment, run in results.items():
            curve = _smooth(run.curves[name])
            axis.plot(
                range(WINDOW, WINDOW + len(curve)), curve, label=f"model seed {experiment.model_seed}", linewidth=1.2
            )
        axis.set_title(f"{title}, mean of {WINDOW} steps", fontsize=9)
        axis.set_xlabel("step")
    axes[0].legend(frameon=False, fontsize=8)
    _save(figure, path)


def plot_algorithms(results: Results, path: Path) -> None:
    """Plot reward over steps and reward over KL: the mean of each algorithm's runs, with the range of the runs over steps."""
    figure, (over_steps, over_kl) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, runs in _by(results, lambda each: each.config.stem).items():
        rewards = [_smooth(run.curves["reward_mean"]) for run in runs.values()]
        kl = [_smooth(run.curves["kl_mean"]) for run in runs.values()]
        mean = [fmean(values) for values in zip(*rewards, strict=True)]
        steps = range(WINDOW, WINDOW + len(mean))
        (line,) = over_steps.plot(steps, mean, label=name.replace("_", " "), linewidth=1.4)
        low, high = ([choose(values) for values in zip(*rewards, strict=True)] for choose in (min, max))
        over_steps.fill_between(steps, low, high, color=line.get_color(), alpha=0.1, linewidth=0)
        over_kl.plot([fmean(values) for values in zip(*kl, strict=True)], mean, color=line.get_color(), linewidth=1.4)
    over_steps.set_xlabel("step")
    over_steps.set_ylabel(f"reward, mean of {WINDOW} steps")
    over_kl.set_xlabel("KL, nats per response")
    over_steps.legend(frameon=False, fontsize=8)
    _save(figure, path)


def plot_beside(results: Results, path: Path) -> None:
    """Plot the score over steps of both sides: each run thin, means thick."""
    groups = _by(results, lambda each: each.config.stem)
    figure, axes = plt.subplots(1, len(groups), figsize=(5 * len(groups), 4), layout="constrained", squeeze=False)
    for axis, (name, runs) in zip(axes[0], groups.items(), strict=True):
        for side, color in (("trl", "tab:orange"), ("quartet", "tab:blue")):
            curves = [_smooth(run.curves["score_mean"]) for each, run in runs.items() if each.side == side]
            for curve in curves:
                axis.plot(range(WINDOW, WINDOW + len(curve)), curve, color=color, linewidth=0.5, alpha=0.5)
            mean = [fmean(values) for values in zip(*curves, strict=True)]
            axis.plot(range(WINDOW, WINDOW + len(mean)), mean, color=color, linewidth=2, label=side)
        axis.set_title(name)
        axis.set_xlabel("step")
    axes[0][0].set_ylabel(f"score, mean of {WINDOW} steps")
    axes[0][0].legend(frameon=False)
    _save(figure, path)


def _kl_titles() -> str:
    return " | ".join(f"KL at reward {reward:g}" for reward in EQUAL_REWARDS)


def _kl_cell(runs: Sequence[Result], reward: float) -> str:
    values = [value for run in runs if (value := kl_at(run.curves, reward)) is not None]
    missing = len(runs) - len(values)
    return interval(values) + (f" ({missing} below)" if missing else "")


def _smooth(values: Sequence[float]) -> list[float]:
    return [fmean(values[end - WINDOW : end]) for end in range(WINDOW, len(values) + 1)]


def _by(results: Results, key: Callable[[Experiment], str]) -> dict[str, dict[Experiment, Result]]:
    groups: dict[str, dict[Experiment, Result]] = {}
    for experiment, result in results.items():
        groups.setdefault(key(experiment), {})[experiment] = result
    return groups


def _save(figure: Figure, path: Path) -> None:
    for axis in figure.axes:
        axis.grid(alpha=0.3)
    with plt.rc_context({"svg.hashsalt": "quartet"}):
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
