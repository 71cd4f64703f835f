"""The table of a sweep for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from quartet.launcher.sweep.grid import short_keys
from quartet.launcher.sweep.results import Estimate, SettingResult, columns
from quartet.telemetry.step_metrics import definition_of

MAX_SHOWN_ERRORS = 20
WIDTH = 160
"""Columns of the table if the output is not a terminal."""
SHOWN = ("reward_mean", "kl_mean", "eval_reward_sampled", "eval_reward_greedy", "eval_judge_win_rate")
"""Metrics in the table for people. The files have all."""


def make_table(results: Sequence[SettingResult], metric: str | None) -> Table:
    """Return one row for each setting: its values, its runs, and mean ± half width of the 95 % interval of metrics."""
    names = [name for name in columns(results, metric) if name in SHOWN or name == metric]
    labels = short_keys(list(results[0].setting)) if results else {}
    table = Table(box=None, pad_edge=False)
    for label in labels.values():
        table.add_column(label)
    for title in ("finished", "failed", *(name if name.startswith("eval_") else _title(name) for name in names)):
        table.add_column(title, justify="right")
    table.add_column("")
    for result in results:
        failed = str(result.count("failed") or "")
        finished = f"{result.count('finished')} of {len(result.runs)}"
        numbers = (_text(result.metrics.get(name)) for name in names)
        table.add_row(*result.setting.values(), finished, failed, *numbers, "best" if result.best else "")
    return table


def _title(name: str) -> str:
    definition = definition_of(name)
    return (definition and definition.label) or name


def _text(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    width = "" if estimate.half_width is None else f" ± {estimate.half_width:.2g}"
    return f"{estimate.mean:.4g}{width}"


def best_note(results: Sequence[SettingResult], metric: str | None) -> str | None:
    """Return which settings cannot be the best, or else how certain the best one is. None if there is nothing to say."""
    incomplete = sum(not result.is_complete for result in results)
    if metric is None:
        return None
    if incomplete:
        return f"{incomplete} of {len(results)} settings cannot be the best yet: not all of their runs have finished"
    best = next((result for result in results if result.best), None)
    if best is None or len(results) == 1:
        return None
    leading = best.metrics[metric]
    if leading.half_width is None:
        return "one run per setting gives no interval, so chance may decide which is best; --seeds 3 runs three of each"
    others = [result.metrics[metric] for result in results if not result.best and metric in result.metrics]
    overlapping = sum(
        abs(other.mean - leading.mean) <= leading.half_width + (other.half_width or 0) for other in others
    )
    return f"settings whose interval overlaps with that of the best: {overlapping}" if overlapping else None


def error_lines(results: Sequence[SettingResult]) -> Iterator[str]:
    """Yield a line for each run that has not finished, up to a limit."""
    open_runs = [
        each for result in results for each in result.runs if each.state in ("failed", "stopped", "unfinished")
    ]
    for each in open_runs[:MAX_SHOWN_ERRORS]:
        error = f": {each.error}" if each.error else ""
        yield f"{each.run.name}: {each.state} at step {each.step} of {each.run.config.run.steps}{error}"
    if len(open_runs) > MAX_SHOWN_ERRORS:
        yield f"... and {len(open_runs) - MAX_SHOWN_ERRORS} more"
