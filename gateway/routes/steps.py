"""Committed steps: their figures, and what each process did when."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

from fastapi import Query

from quartet.errors import ConfigError
from quartet.gateway.access import Viewer
from quartet.gateway.http_errors import NotFound
from quartet.gateway.pagination import cursor_after, read_cursor
from quartet.gateway.routing import Cursor, Limit, Step, TheReading, TheRun, api_router
from quartet.gateway.schemas import Page, Span, StepDetail, StepSummary

router = api_router("steps")

_SHOWN = ("seconds", "generate_seconds", "score_seconds", "update_seconds", "reward_mean", "kl_mean", "response_tokens")


@router.get("/runs/{run}/steps")
def list_steps(
    _: Viewer,
    files: TheRun,
    reading: TheReading,
    first: Annotated[int, Query(ge=1, le=1_000_000_000, description="First step.")] = 1,
    last: Annotated[int, Query(ge=1, le=1_000_000_000, description="Last step.")] = 1_000_000_000,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[StepSummary]:
    """Committed steps, the newest first."""
    columns = reading.metrics.of(files.metrics)
    question = ["steps", files.root.name, first, last]
    top = min(last, columns.count())
    total = max(0, top - first + 1)
    if cursor is not None:
        top = min(top, int(read_cursor(cursor, question, (int,))[0]) - 1)
    steps = list(range(top, max(first, top - limit + 1) - 1, -1))
    aside = (
        Counter(record.get("step") for record in reading.records.of(files.failed_trajectories)) if steps else Counter()
    )
    items = [_summary(step, row, aside[step]) for step, row in zip(steps, columns.rows(steps, _SHOWN), strict=False)]
    more = bool(steps) and steps[-1] > first
    return Page(items=items, total=total, next=cursor_after([steps[-1]], question) if more else None)


@router.get("/runs/{run}/steps/{step}")
def get_step(_: Viewer, step: Step, files: TheRun, reading: TheReading) -> StepDetail:
    """One committed step: all its metrics, and who worked and who waited when."""
    columns = reading.metrics.of(files.metrics)
    if step > columns.count():
        raise NotFound(f"step {step}: not committed; the run has steps 1 to {columns.count()}")
    timeline = reading.timelines.step(files.timeline, step)
    return StepDetail(
        step=step,
        metrics=columns.row(step),
        started=None if timeline is None else timeline.get("started"),
        spans=[] if timeline is None else _spans(timeline, step),
        has_tokens=(files.tokens / f"step-{step:06d}.safetensors").is_file(),
    )


def _summary(step: int, row: dict[str, float | None], failed_trajectories: int) -> StepSummary:
    tokens = row["response_tokens"]
    figures: dict[str, Any] = {**row, "response_tokens": None if tokens is None else int(tokens)}
    return StepSummary(step=step, **figures, failed_trajectories=failed_trajectories)


def _spans(timeline: dict[str, Any], step: int) -> list[Span]:
    try:
        spans = [Span.model_validate(span) for span in timeline["spans"]]
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f"timeline.jsonl: step {step}: not spans of Quartet's; remove the file, the run does without"
        ) from None
    return sorted(spans, key=lambda span: (span.service, span.start, span.end))
