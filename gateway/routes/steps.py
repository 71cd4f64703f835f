"""Committed steps: their metrics, and the timeline of the processes."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, TypeVar

from fastapi import Query
from pydantic import TypeAdapter

from quartet.errors import ConfigError
from quartet.gateway.access.callers import Viewer
from quartet.gateway.http.api_router import api_router
from quartet.gateway.http.http_errors import NotFound
from quartet.gateway.http.pagination import cursor_after, read_cursor
from quartet.gateway.routes.dependencies import Cursor, Limit, Step, TheReaders, TheRunFiles
from quartet.gateway.schemas import DeviceSamples, Page, StepDetail, StepSummary
from quartet.services.orchestrator.telemetry.step_profiler import Span

router = api_router("steps")

Item = TypeVar("Item")
_SPANS, _DEVICES = TypeAdapter(list[Span]), TypeAdapter(list[DeviceSamples])
_SUMMARY_METRICS = [name for name in StepSummary.model_fields if name not in ("step", "failed_trajectories")]


@router.get("/runs/{run}/steps")
def list_steps(
    _: Viewer,
    files: TheRunFiles,
    readers: TheReaders,
    first: Annotated[int, Query(ge=1, le=1_000_000_000, description="First step.")] = 1,
    last: Annotated[int, Query(ge=1, le=1_000_000_000, description="Last step.")] = 1_000_000_000,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[StepSummary]:
    """List the committed steps, newest first."""
    columns = readers.metrics(files.metrics)
    request = ["steps", files.root.name, first, last]
    end = min(last, columns.count())
    total = max(0, end - first + 1)
    if cursor is not None:
        end = min(end, int(read_cursor(cursor, request, (int,))[0]) - 1)
    steps = list(range(end, max(first, end - limit + 1) - 1, -1))
    failed = (
        Counter(record.get("step") for record in readers.records(files.failed_trajectories)) if steps else Counter()
    )
    rows = columns.rows(steps, _SUMMARY_METRICS)
    items = [_summary(step, row, failed[step]) for step, row in zip(steps, rows, strict=False)]
    more = bool(steps) and steps[-1] > first
    return Page(items=items, total=total, next=cursor_after([steps[-1]], request) if more else None)


@router.get("/runs/{run}/steps/{step}")
def get_step(_: Viewer, step: Step, files: TheRunFiles, readers: TheReaders) -> StepDetail:
    """Return one committed step: all its metrics, and when each process worked or waited."""
    columns = readers.metrics(files.metrics)
    if step > columns.count():
        raise NotFound(f"step {step}: not committed; the run has steps 1 to {columns.count()}")
    timeline = readers.timeline(files.timeline).step(step)
    return StepDetail(
        step=step,
        metrics=columns.row(step),
        started=None if timeline is None else timeline.get("started"),
        spans=[]
        if timeline is None
        else sorted(_valid(_SPANS, timeline.get("spans"), step), key=lambda span: (span.service, span.start, span.end)),
        devices=[] if timeline is None else _valid(_DEVICES, timeline.get("devices", []), step),
        has_tokens=(files.tokens / f"step-{step:06d}.safetensors").is_file(),
    )


def _summary(step: int, row: dict[str, float | None], failed_trajectories: int) -> StepSummary:
    tokens = row["response_tokens"]
    metrics: dict[str, Any] = {**row, "response_tokens": None if tokens is None else int(tokens)}
    return StepSummary(step=step, **metrics, failed_trajectories=failed_trajectories)


def _valid(adapter: TypeAdapter[list[Item]], value: Any, step: int) -> list[Item]:
    try:
        return adapter.validate_python(value)
    except ValueError:
        raise ConfigError(
            f"timeline.jsonl: step {step}: not in Quartet's format; remove the file, which the run does not need"
        ) from None
