"""Tables and plots of the evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import matplotlib

from benchmarks.evidence.experiments import TRL_SIDES, VARIATIONS, Experiment
from benchmarks.evidence.runs import Result
from quartet.config.root import Config
from quartet.launcher.sweep.results import mean_interval

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

WINDOW = 10
"""Steps whose mean is one value of a curve in the tables."""
EQUAL_GAINS = (0.5, 1.0, 1.5)
"""Gains of reward at which the KL is compared."""

LABELS = {"trl": "TRL", "trl_eos": "TRL, score at EOS", "quartet": "Quartet"}
"""Names of the sides that are compared."""

Results = Mapping[Experiment, Result]


def interval(values: Sequence[float]) -> str:
    """Return the mean with the half width of its 95 % confidence interval."""
    if not values:
        return "–"
    mean, half = mean_interval(values)
    return f"{mean:.2f} ± {half:.2f}" if len(values) > 1 else f"{mean:.2f}"


def kl_at(curves: Mapping[str, Sequence[float]], reward: float) -> float | None:
    """Return the KL at which the reward passes ``reward`` upwards; None if it never does.

    A noisy curve passes several times. The first time is too early and the last one too late, by the same amount on average,
    so the mean of the two is returned. Rewards are means of ``WINDOW`` steps, with straight lines between them.
    """
    rewards, kl = _smooth(curves["reward_mean"]), _smooth(curves["kl_mean"])
    crossings = [
        kl[at - 1] + (kl[at] - kl[at - 1]) * (reward - rewards[at - 1]) / (rewards[at] - rewards[at - 1])
        for at in range(1, len(rewards))
        if rewards[at - 1] < reward <= rewards[at]
    ]
    return (crossings[0] + crossings[-1]) / 2 if crossings else None


def algorithm_table(results: Results, initial: Results) -> str:
    """Return the table of the final policies of each algorithm. ``initial``: the policy of each model before training."""
    start = {each.model_seed: run.final.reward for each, run in initial.items()}
    groups = _by(results, lambda each: each.config.stem)
    gains = {
        name: {each: run.final.reward - start[each.model_seed] for each, run in runs.items()}
        for name, runs in groups.items()
    }
    ppo = _per_model(gains["ppo"]) if "ppo" in gains else {}
    lines = [
        "| config | runs | gain, ± over runs | ± over models | less the gain of PPO | KL, nats per response | gain per nat "
        f"| EOS rate | {_kl_titles()} |",
        f"|---|---|---|---|---|---|---|---|{'---|' * len(EQUAL_GAINS)}",
    ]
    for name, runs in sorted(groups.items(), key=lambda item: -fmean(gains[item[0]].values())):
        per_model = _per_model(gains[name])
        cells = [
            interval(list(gains[name].values())),
            interval(list(per_model.values())),
            interval([gain - ppo[model] for model, gain in per_model.items() if model in ppo])
            if name != "ppo"
            else "–",
            *(
                interval(list(_per_model(values).values()))
                for values in (
                    {each: run.final.kl for each, run in runs.items()},
                    {each: gains[name][each] / run.final.kl for each, run in runs.items()},
                    {each: run.final.eos_rate for each, run in runs.items()},
                )
            ),
            *_kl_cells(runs, start),
        ]
        lines.append(f"| `{name}.yaml` | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def variation_table(results: Results, initial: Results) -> str:
    """Return the table of variations of a config: one run on each model, and differences on the same models."""
    start = {each.model_seed: run.final.reward for each, run in initial.items()}
    titles = {settings: title for title, settings in VARIATIONS.items()}
    lines = [
        f"| `ppo.yaml` with | runs | gain | difference | KL, nats per response | difference | EOS rate | {_kl_titles()} |",
        f"|---|---|---|---|---|---|---|{'---|' * len(EQUAL_GAINS)}",
    ]
    groups = _by(results, lambda each: titles[each.settings])
    shipped = {each.model_seed: run.final for each, run in groups[next(iter(VARIATIONS))].items()}
    for title, runs in groups.items():
        final = {each.model_seed: run.final for each, run in runs.items()}
        cells = [
            interval([each.reward - start[model] for model, each in final.items()]),
            interval([each.reward - shipped[model].reward for model, each in final.items()]),
            interval([each.kl for each in final.values()]),
            interval([each.kl - shipped[model].kl for model, each in final.items()]),
            interval([each.eos_rate for each in final.values()]),
            *_kl_cells(runs, start),
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


def beside_settings(results: Results) -> list[str]:
    """Return a list item for each config, with the settings that both sides have."""
    items = []
    for name, runs in _by(results, lambda each: each.config.stem).items():
        experiment = next(iter(runs))
        config = experiment.load()
        algorithm, actor, optimizer = config.algorithm, config.actor, config.actor.optimizer
        settings = [
            f"learning rate {actor.learning_rate:g}, {actor.schedule}",
            *([f"{config.critic.learning_rate:g} of the critic"] if algorithm.estimator == "gae" else []),
            f"β {algorithm.kl_coefficient:g}, {algorithm.kl_controller.kind}",
            f"Adam's β₁ {optimizer.betas[0]:g}, β₂ {optimizer.betas[1]:g}",
            f"limit of the gradient norm {optimizer.max_grad_norm:g}"
            if optimizer.max_grad_norm
            else "no limit of the gradient norm",
            f"epochs {algorithm.num_epochs}, mini-batches {algorithm.num_mini_batches}",
            f"ε {algorithm.clip_range[0]:g}, ratio per {algorithm.ratio_level}",
            f"`{algorithm.aggregation}`",
            f"prompts per step {config.rollout.prompts_per_step}, responses per prompt {config.rollout.samples_per_prompt}",
            *_critic_settings(config),
        ]
        items.append(f"- `{name}.yaml`, {experiment.steps} steps: {'; '.join(settings)}")
    return items


def _critic_settings(config: Config) -> list[str]:
    algorithm = config.algorithm
    if algorithm.estimator != "gae":
        return []
    # The critic has its own parameters, so the coefficient changes only the scale of its gradient, which Adam removes.
    return [
        f"γ {algorithm.gamma:g}, λ {algorithm.gae_lambda:g}",
        f"ε of values {algorithm.value_clip:g}",
        "TRL's `vf_coef` 1",
    ]


def beside_table(results: Results) -> str:
    """Return the table of Quartet beside TRL: final policies, and the differences of pairs with the same models and seed."""
    lines = [
        "| config | pairs | score, TRL | Quartet | difference | ± over models | KL, TRL | Quartet | difference | ± over models "
        "| EOS rate, TRL | Quartet |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    compared = [
        (config, side, runs)
        for config, runs in _by(results, lambda each: each.config.stem).items()
        for side in TRL_SIDES
        if any(each.side == side for each in runs)
    ]
    for config, other, runs in compared:
        sides = {
            side: {(each.model_seed, each.run_seed): run.final for each, run in runs.items() if each.side == side}
            for side in (other, "quartet")
        }
        pairs = sorted(sides[other].keys() & sides["quartet"].keys())
        trl, quartet = ([sides[side][pair] for pair in pairs] for side in (other, "quartet"))
        cells = []
        for metric in ("score", "kl"):
            ours, theirs = ([getattr(each, metric) for each in side] for side in (quartet, trl))
            difference = [own - other for own, other in zip(ours, theirs, strict=True)]
            by_model = [
                fmean(value for (model, _), value in zip(pairs, difference, strict=True) if model == each)
                for each in sorted({model for model, _ in pairs})
            ]
            cells += [interval(theirs), interval(ours), f"**{interval(difference)}**", interval(by_model)]
        cells += [interval([each.eos_rate for each in side]) for side in (trl, quartet)]
        place = ", score at EOS" if other == "trl_eos" else ""
        lines.append(f"| `{config}.yaml`{place} | {len(pairs)} | {' | '.join(cells)} |")
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
        for side, color in (("trl", "tab:orange"), ("trl_eos", "tab:green"), ("quartet", "tab:blue")):
            curves = [_smooth(run.curves["score_mean"]) for each, run in runs.items() if each.side == side]
            if not curves:
                continue
            for curve in curves:
                axis.plot(range(WINDOW, WINDOW + len(curve)), curve, color=color, linewidth=0.5, alpha=0.5)
            mean = [fmean(values) for values in zip(*curves, strict=True)]
            axis.plot(range(WINDOW, WINDOW + len(mean)), mean, color=color, linewidth=2, label=LABELS[side])
        axis.set_title(name)
        axis.set_xlabel("step")
    axes[0][0].set_ylabel(f"score, mean of {WINDOW} steps")
    axes[0][0].legend(frameon=False)
    _save(figure, path)


def _per_model(values: Mapping[Experiment, float]) -> dict[int, float]:
    """Return the mean over the run seeds of each model."""
    models = dict.fromkeys(each.model_seed for each in values)
    return {model: fmean(value for each, value in values.items() if each.model_seed == model) for model in models}


def _kl_titles() -> str:
    return " | ".join(f"KL at gain {gain:g}" for gain in EQUAL_GAINS)


def _kl_cells(runs: Results, start: Mapping[int, float]) -> list[str]:
    """Return the KL at each of ``EQUAL_GAINS``. Without all runs, the mean would be over other models than in the next row."""
    cells = []
    for gain in EQUAL_GAINS:
        kl = {each: kl_at(run.curves, start[each.model_seed] + gain) for each, run in runs.items()}
        reached = {each: value for each, value in kl.items() if value is not None}
        complete = len(reached) == len(runs)
        cells.append(
            interval(list(_per_model(reached).values())) if complete else f"{len(reached)} of {len(runs)} runs"
        )
    return cells


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
