"""Evaluations of a run: their mean metrics, and the responses of each."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path

from quartet.gateway.access.callers import Viewer
from quartet.gateway.http.api_router import api_router
from quartet.gateway.http.http_errors import NotFound
from quartet.gateway.http.pagination import cursor_after, read_cursor
from quartet.gateway.routes.dependencies import Cursor, Limit, TheReaders, TheRunFiles
from quartet.gateway.schemas import EvaluationRow, EvaluationSummary, Page

router = api_router("evaluations")


@router.get("/runs/{run}/evaluations")
def list_evaluations(
    _: Viewer, files: TheRunFiles, readers: TheReaders, limit: Limit = 50, cursor: Cursor = None
) -> Page[EvaluationSummary]:
    """List the evaluations, oldest first. Step 0 evaluates the initial policy."""
    request = ["evaluations", files.root.name]
    after = int(read_cursor(cursor, request, (int,))[0]) if cursor is not None else -1
    records = readers.records(files.evaluation_summaries)
    remaining = [record for record in records if int(record["step"]) > after]
    items = [
        EvaluationSummary(
            step=record["step"], metrics={name: _number(value) for name, value in record.items() if name != "step"}
        )
        for record in remaining[:limit]
    ]
    return Page(
        items=items,
        total=len(records),
        next=cursor_after([items[-1].step], request) if len(remaining) > limit else None,
    )


@router.get("/runs/{run}/evaluations/{step}")
def get_evaluation(
    _: Viewer,
    step: Annotated[int, Path(ge=0, le=1_000_000_000, description="A step with an evaluation.")],
    files: TheRunFiles,
    readers: TheReaders,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[EvaluationRow]:
    """List the responses of one evaluation, in the order of the validation prompts."""
    request = ["evaluation", files.root.name, step]
    start = int(read_cursor(cursor, request, (int,))[0]) if cursor is not None else 0
    path = files.evaluations / f"step-{step:06d}.jsonl"
    if not path.is_file():
        raise NotFound(f"step {step}: has no evaluation; GET /api/v1/runs/{files.root.name}/evaluations lists them")
    records = readers.records(path)
    end = start + limit
    items = [EvaluationRow(values=record) for record in records[start:end]]
    return Page(items=items, total=len(records), next=cursor_after([end], request) if end < len(records) else None)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e308 else None
