"""The results of a sweep: each run from its files, and each setting as means over its seeds."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal

from quartet.errors import ConfigError
from quartet.launcher.sweep.grid import PlannedRun
from quartet.run_directory.run_files import RunFiles
from quartet.run_directory.step_lines import read_step_lines

State = Literal["finished", "failed", "stopped", "unfinished", "waiting"]
Direction = Literal["max", "min"]
STOPPED = "stopped"
"""Outcome of a run that ended before its last step without an error."""
TAIL_FRACTION = 10
"""A run's result is the mean of a metric over its last steps: one in this many, at least one."""
STEP_COLUMNS = ("reward_mean", "kl_mean", "entropy", "response_tokens_mean")
"""Metrics of steps in every table. Evaluations add theirs."""
_NOT_COMPARED = ("step",)


@dataclass(frozen=True, slots=True)
class RunResult:
    """A run of a sweep: its state, its last committed step, and its metrics if it has finished."""

    run: PlannedRun
    state: State
    step: int
    metrics: Mapping[str, float]
    """Means over the last tenth of the steps, and the metrics of the last evaluation."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean of a metric over the finished seeds, half the width of its 95 % confidence interval, and the values.

    ``half_width`` is None with fewer than two values.
    """

    mean: float
    half_width: float | None
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SettingResult:
    """All runs of one setting."""

    setting: Mapping[str, str]
    runs: tuple[RunResult, ...]
    metrics: Mapping[str, Estimate]
    """Estimates by name, over the finished runs that have the metric."""
    best: bool = False

    def count(self, state: State) -> int:
        """Return the number of runs in a state."""
        return sum(result.state == state for result in self.runs)

    @property
    def is_complete(self) -> bool:
        """True if all runs have finished."""
        return self.count("finished") == len(self.runs)


def is_finished(run: PlannedRun) -> bool:
    """Return whether a run has taken all its steps and has saved the policy of the last one.

    Raises ConfigError if it has taken more steps.
    """
    files = RunFiles(run.config.run_directory)
    steps, last = run.config.run.steps, files.last_step()
    if last > steps:
        raise ConfigError(
            f"run.steps is {steps}, but {files.root} has already trained for {last} steps; set run.steps to at least {last}, "
            "or choose another folder with --name"
        )
    return last == steps and files.policy_step() == steps and not files.rolling_back.exists()


def run_result(run: PlannedRun, outcome: str | None) -> RunResult:
    """Return the result of a run from its files. ``outcome``: why it ended before its last step. Raises ConfigError."""
    files = RunFiles(run.config.run_directory)
    if is_finished(run):
        return RunResult(run, "finished", run.config.run.steps, _metrics(files))
    step = files.last_step()
    if outcome == STOPPED:
        return RunResult(run, "stopped", step, {})
    if outcome is not None:
        return RunResult(run, "failed", step, {}, outcome)
    return RunResult(run, "unfinished" if files.config.exists() else "waiting", step, {})


def _metrics(files: RunFiles) -> dict[str, float]:
    lines = read_step_lines(files.metrics)
    tail = lines[-math.ceil(len(lines) / TAIL_FRACTION) :]
    metrics = {
        name: fmean(values)
        for name in dict.fromkeys(name for line in tail for name in line)
        if (values := [line[name] for line in tail if isinstance(line.get(name), int | float)])
    }
    if evaluations := read_step_lines(files.evaluation_summaries):
        metrics |= {name: value for name, value in evaluations[-1].items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in metrics.items() if name not in _NOT_COMPARED}


def setting_results(
    results: Sequence[RunResult], metric: str | None = "reward_mean", direction: Direction = "max"
) -> list[SettingResult]:
    """Return the results by setting, in the order of the grid. The best by ``metric`` is marked; None marks none.

    Only a setting whose runs have all finished can be the best: failures may depend on the metric, so the mean over the
    other seeds is biased. Of settings with the same mean, the first of the grid is the best.

    Raises ConfigError if runs have finished and none of them has the metric.
    """
    groups: dict[tuple[tuple[str, str], ...], list[RunResult]] = {}
    for result in results:
        groups.setdefault(tuple(result.run.setting.items()), []).append(result)
    estimates = [_estimates(group) for group in groups.values()]
    best = _best(list(groups.values()), estimates, metric, direction)
    return [
        SettingResult(dict(setting), tuple(group), estimate, index == best)
        for index, ((setting, group), estimate) in enumerate(zip(groups.items(), estimates, strict=True))
    ]


def _estimates(results: Iterable[RunResult]) -> dict[str, Estimate]:
    values: dict[str, list[float]] = {}
    for result in results:
        for name, value in result.metrics.items():
            values.setdefault(name, []).append(value)
    return {name: _estimate(each) for name, each in values.items()}


def _estimate(values: Sequence[float]) -> Estimate:
    mean, half_width = mean_interval(values)
    return Estimate(mean, None if math.isnan(half_width) else half_width, tuple(values))


def _best(
    groups: Sequence[Sequence[RunResult]],
    estimates: Sequence[Mapping[str, Estimate]],
    metric: str | None,
    direction: Direction,
) -> int | None:
    if metric is None:
        return None
    known = {name for each in estimates for name in each}
    if known and metric not in known:
        raise ConfigError(
            f"--metric {metric}: the finished runs have no such metric; they have {', '.join(sorted(known))}"
        )
    sign = 1 if direction == "max" else -1
    means = {
        index: sign * each[metric].mean
        for index, (group, each) in enumerate(zip(groups, estimates, strict=True))
        # Only finished runs have metrics.
        if metric in each and len(each[metric].values) == len(group) and math.isfinite(each[metric].mean)
    }
    # ``max`` returns the first of equal ones, and the settings are in the order of the grid.
    return max(means, key=lambda index: means[index], default=None)


def columns(results: Sequence[SettingResult], metric: str | None) -> list[str]:
    """Return the metrics to show: those of every table, the chosen one, and those of evaluations."""
    known = dict.fromkeys(name for result in results for name in result.metrics)
    evaluations = [name for name in known if name.startswith("eval_")]
    return [name for name in dict.fromkeys([*STEP_COLUMNS, metric, *evaluations]) if name is not None and name in known]


def as_json(results: Sequence[SettingResult], metric: str | None, direction: Direction) -> str:
    """Return the results as a JSON object. Numbers that are not finite are null."""
    names = columns(results, metric)
    settings = [
        {
            "settings": dict(result.setting),
            "best": result.best,
            "finished": result.count("finished"),
            "failed": result.count("failed"),
            "metrics": {
                name: {
                    "mean": _finite(estimate.mean),
                    "half_width": _finite(estimate.half_width),
                    "values": [_finite(value) for value in estimate.values],
                }
                for name in names
                if (estimate := result.metrics.get(name)) is not None
            },
            "runs": [
                {
                    "name": each.run.name,
                    "seed": each.run.seed,
                    "state": each.state,
                    "step": each.step,
                    "error": each.error,
                }
                for each in result.runs
            ],
        }
        for result in results
    ]
    content: dict[str, Any] = {"metric": metric, "mode": direction, "confidence": 0.95, "settings": settings}
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def as_csv(results: Sequence[SettingResult], metric: str | None) -> str:
    """Return the results as CSV: one row for each setting, and two columns for each metric, its mean and half width."""
    names = columns(results, metric)
    keys = list(results[0].setting) if results else []
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    heads = [head for name in names for head in (name, f"{name}_half_width")]
    writer.writerow([*keys, "runs", "finished", "failed", "best", *heads])
    for result in results:
        numbers: list[float | None] = []
        for name in names:
            estimate = result.metrics.get(name)
            numbers += (None, None) if estimate is None else (estimate.mean, estimate.half_width)
        counts = [len(result.runs), result.count("finished"), result.count("failed"), int(result.best)]
        writer.writerow([*result.setting.values(), *counts, *numbers])
    return text.getvalue()


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


CONFIDENCE = 0.95
"""Probability that the interval of a normally distributed value contains its mean."""


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the mean and half the width of its confidence interval by Student's t, both in the unit of the values.

    The half width is NaN for fewer than two values, because one value shows no spread. The mean of no values is NaN.
    """
    if not values:
        return math.nan, math.nan
    if len(values) < 2:
        return values[0], math.nan
    mean = fmean(values)
    if not math.isfinite(mean):
        return mean, math.nan
    quantile = t_quantile((1 + confidence) / 2, len(values) - 1)
    return mean, quantile * stdev(values) / math.sqrt(len(values))


def t_quantile(probability: float, degrees_of_freedom: int) -> float:
    """Return the quantile of Student's t distribution, for a probability of at least 0.5 and less than 1.

    Bisects the finite sums for the central probability (Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and
    26.7.4) in the angle atan(t / sqrt(degrees of freedom)). Raises ValueError if an argument is out of range.
    """
    if not 0.5 <= probability < 1:
        raise ValueError(f"probability {probability}: expected at least 0.5 and less than 1")
    if degrees_of_freedom < 1:
        raise ValueError(f"degrees of freedom {degrees_of_freedom}: expected at least 1")
    central = 2 * probability - 1
    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        if _central_probability(middle, degrees_of_freedom) < central:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees_of_freedom) * math.tan(high)


def _central_probability(angle: float, degrees_of_freedom: int) -> float:
    """Return the probability of a value between -t and t, for t = sqrt(degrees of freedom) * tan(angle)."""
    sine, squared_cosine = math.sin(angle), math.cos(angle) ** 2
    odd = degrees_of_freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0 if degrees_of_freedom == 1 else term
    for factor in range(3 if odd else 2, degrees_of_freedom - 1, 2):
        term *= squared_cosine * (factor - 1) / factor
        total += term
    return (angle + sine * total) * 2 / math.pi if odd else sine * total
