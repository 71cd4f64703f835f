"""Evaluations of a run: their mean metrics, and the responses of each."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path

from quartet.config.section import NAME_PATTERN
from quartet.gateway.access.callers import Viewer
from quartet.gateway.http.api_router import api_router
from quartet.gateway.http.http_errors import NotFound
from quartet.gateway.http.pagination import cursor_after, read_cursor
from quartet.gateway.readers.run_readers import RunReaders
from quartet.gateway.routes.dependencies import Cursor, Limit, TheReaders, TheRunFiles
from quartet.gateway.schemas import EvaluationRow, EvaluationSummary, Page
from quartet.run_directory.run_files import RunFiles

router = api_router("evaluations")

Step = Annotated[int, Path(ge=0, le=1_000_000_000, description="A step with an evaluation.")]
SetName = Annotated[str, Path(pattern=NAME_PATTERN, description="Name of a set of `evaluation.sets`.")]


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
            step=record["step"],
            policy_version=record.get("policy_version"),
            sets=files.evaluation_sets(record["step"]),
            metrics={name: _number(value) for name, value in record.items() if name not in ("step", "policy_version")},
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
    step: Step,
    files: TheRunFiles,
    readers: TheReaders,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[EvaluationRow]:
    """List the responses of one evaluation, in the order of the validation prompts."""
    return _rows(files, readers, step, None, limit, cursor)


@router.get("/runs/{run}/evaluations/{step}/sets/{name}")
def get_evaluation_set(
    _: Viewer,
    step: Step,
    name: SetName,
    files: TheRunFiles,
    readers: TheReaders,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[EvaluationRow]:
    """List the samples of one evaluation for one evaluation set, in the order of its prompts."""
    return _rows(files, readers, step, name, limit, cursor)


def _rows(
    files: RunFiles, readers: RunReaders, step: int, set_name: str | None, limit: int, cursor: str | None
) -> Page[EvaluationRow]:
    request = ["evaluation", files.root.name, step, set_name]
    start = int(read_cursor(cursor, request, (int,))[0]) if cursor is not None else 0
    path = files.evaluation_of(step, set_name)
    if not path.is_file():
        of_set = f" of the set {set_name}" if set_name is not None else ""
        raise NotFound(
            f"step {step}: has no evaluation{of_set}; GET /api/v1/runs/{files.root.name}/evaluations lists them"
        )
    records = readers.records(path)
    end = start + limit
    items = [EvaluationRow(values=record) for record in records[start:end]]
    return Page(items=items, total=len(records), next=cursor_after([end], request) if end < len(records) else None)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e308 else None
