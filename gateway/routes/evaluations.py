"""EvaluationSchedule: their means over the steps, and the answers of each."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path

from quartet.gateway.access import Viewer
from quartet.gateway.http_errors import NotFound
from quartet.gateway.pagination import cursor_after, read_cursor
from quartet.gateway.routing import Cursor, Limit, TheReading, TheRun, api_router
from quartet.gateway.schemas import EvaluationRow, EvaluationSummary, Page

router = api_router("evaluations")


@router.get("/runs/{run}/evaluations")
def list_evaluations(
    _: Viewer, files: TheRun, reading: TheReading, limit: Limit = 50, cursor: Cursor = None
) -> Page[EvaluationSummary]:
    """EvaluationSchedule, the earliest first; step 0 is the initial policy's."""
    question = ["evaluations", files.root.name]
    after = int(read_cursor(cursor, question, (int,))[0]) if cursor is not None else -1
    records = reading.records.of(files.evaluation_summaries)
    left = [record for record in records if int(record["step"]) > after]
    items = [
        EvaluationSummary(
            step=record["step"], metrics={name: _number(value) for name, value in record.items() if name != "step"}
        )
        for record in left[:limit]
    ]
    return Page(
        items=items, total=len(records), next=cursor_after([items[-1].step], question) if len(left) > limit else None
    )


@router.get("/runs/{run}/evaluations/{step}")
def get_evaluation(
    _: Viewer,
    step: Annotated[int, Path(ge=0, le=1_000_000_000, description="A step with an evaluation.")],
    files: TheRun,
    reading: TheReading,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[EvaluationRow]:
    """What the policy answered to each validation prompt, in the prompts' order."""
    question = ["evaluation", files.root.name, step]
    begin = int(read_cursor(cursor, question, (int,))[0]) if cursor is not None else 0
    path = files.evaluations / f"step-{step:06d}.jsonl"
    if not path.is_file():
        raise NotFound(f"step {step}: has no evaluation; GET /api/v1/runs/{files.root.name}/evaluations lists them")
    records = reading.records.of(path)
    items = [EvaluationRow(values=record) for record in records[begin : begin + limit]]
    end = begin + limit
    return Page(items=items, total=len(records), next=cursor_after([end], question) if end < len(records) else None)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e308 else None
