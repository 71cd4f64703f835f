"""Charts of a report: groups of metrics, with curves reduced to a limited number of points."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quartet.telemetry.step_metrics import CHARTS, METRICS

MAX_POINTS = 1500
"""Maximum number of points of a curve. With more steps, a point is the mean of several consecutive steps."""
Metrics = Mapping[str, float]

_INSIDE = {"step", "reward_std", "response_tokens", "prompt_tokens"}
"""Metrics that are not charted separately."""


def main_charts(steps: Sequence[Metrics], kl_target: float | None) -> list[dict[str, Any]]:
    """Return the main charts of a run, as input of the script of the report. Charts without data are omitted."""
    charts = []
    for title, definitions in CHARTS.items():
        names = [definition.name for definition in definitions if _has(steps, definition.name)]
        lines = [_line(name, steps, _of(name)) for name in names]
        if names == ["reward_mean"] and _has(steps, "reward_std"):
            lines[0] |= _band(steps)
        if lines:
            target = kl_target if names == ["kl_mean"] else None
            charts.append({"title": title, "unit": definitions[0].unit, "lines": lines, "target": target})
    if _has(steps, "response_tokens") and _has(steps, "seconds"):
        pace = _line("response tokens per second", steps, _tokens_per_second)
        charts.append({"title": "Throughput", "unit": "tokens per second", "lines": [pace], "target": None})
    return charts


def further_charts(steps: Sequence[Metrics]) -> list[dict[str, Any]]:
    """Return one chart for each metric that is not in a main chart."""
    shown = _INSIDE | {name for name, definition in METRICS.items() if definition.chart}
    names = sorted({name for step in steps for name in step} - shown)
    return [{"title": name, "unit": "", "lines": [_line(name, steps, _of(name))], "target": None} for name in names]


def evaluation_charts(summaries: Sequence[Metrics]) -> list[dict[str, Any]]:
    """Return the charts of evaluation metrics."""
    groups = (("Validation reward", "reward"), ("Win rate against the initial policy", "win_rate"))
    charts = []
    for title, word in groups:
        names = sorted({name for summary in summaries for name in summary if word in name})
        if names:
            lines = [_line(name, summaries, _of(name)) for name in names]
            charts.append({"title": title, "unit": "", "lines": lines, "target": None})
    return charts


def _has(steps: Sequence[Metrics], name: str) -> bool:
    return any(name in step for step in steps)


def _of(name: str) -> Callable[[Metrics], float | None]:
    return lambda step: step.get(name)


def _tokens_per_second(step: Metrics) -> float | None:
    tokens, seconds = step.get("response_tokens"), step.get("seconds")
    return tokens / seconds if tokens is not None and seconds else None


def _line(name: str, steps: Sequence[Metrics], value: Callable[[Metrics], float | None]) -> dict[str, Any]:
    parts = _parts(steps)
    return {"name": name, "x": [part[-1]["step"] for part in parts], "y": [_mean(part, value) for part in parts]}


def _band(steps: Sequence[Metrics]) -> dict[str, list[float | None]]:
    middle = [(_mean(part, _of("reward_mean")), _mean(part, _of("reward_std"))) for part in _parts(steps)]
    return {
        "low": [None if mean is None or width is None else mean - width for mean, width in middle],
        "high": [None if mean is None or width is None else mean + width for mean, width in middle],
    }


def _parts(steps: Sequence[Metrics]) -> list[Sequence[Metrics]]:
    """Split the steps into at most ``MAX_POINTS`` parts."""
    size = max(1, math.ceil(len(steps) / MAX_POINTS))
    return [steps[start : start + size] for start in range(0, len(steps), size)]


def _mean(part: Sequence[Metrics], value: Callable[[Metrics], float | None]) -> float | None:
    """Return the mean over the steps that have the metric. None, a gap in the curve, if no step has it."""
    values = [number for step in part if (number := value(step)) is not None and math.isfinite(number)]
    return float(f"{math.fsum(values) / len(values):.7g}") if values else None
