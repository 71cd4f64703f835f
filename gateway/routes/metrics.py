"""Metrics over the steps, as curves of as many points as a chart can show."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from pydantic import TypeAdapter
from starlette.responses import Response

from quartet.gateway.access import Viewer
from quartet.gateway.http_errors import WrongField
from quartet.gateway.readers import Reading
from quartet.gateway.readers.metrics import Columns
from quartet.gateway.routing import RunName, TheReading, TheRun, TheRuns, api_router
from quartet.gateway.runs.catalog import Runs
from quartet.gateway.schemas import Curve, Metrics

router = api_router("metrics")

MAX_NAMES = 100
MAX_RUNS = 20
MAX_POINTS = 400_000
"""Of an answer: points times metrics times runs."""
MANY = TypeAdapter(list[Metrics])

Names = Annotated[
    list[str] | None,
    Query(
        description="Metrics, separated by commas or each as a parameter of its own; all of them by default.",
        max_length=MAX_NAMES,
    ),
]
First = Annotated[int, Query(ge=1, le=1_000_000_000, description="First step.")]
Last = Annotated[int, Query(ge=1, le=1_000_000_000, description="Last step.")]
Points = Annotated[
    int,
    Query(
        ge=1,
        le=10_000,
        description="Most points of a curve: where there are more steps, each stands for several in a row.",
    ),
]


@router.get("/runs/{run}/metrics", response_model=Metrics)
def get_metrics(
    _: Viewer,
    run: RunName,
    files: TheRun,
    reading: TheReading,
    names: Names = None,
    first: First = 1,
    last: Last = 1_000_000_000,
    points: Points = 1000,
) -> Response:
    """Metrics of one run: each point with mean, least and greatest value of the steps that it stands for."""
    columns = reading.metrics.of(files.metrics)
    wanted = _names(names, columns)
    _check_size(len(wanted), points)
    # Written out here: validating hundreds of thousands of numbers once more would take longer than all else.
    return _json(_metrics(run, columns, wanted, first, last, points).model_dump_json().encode())


@router.get("/metrics", response_model=list[Metrics])
def compare_metrics(
    _: Viewer,
    all_runs: TheRuns,
    reading: TheReading,
    runs: Annotated[
        list[str],
        Query(
            description="Runs, separated by commas or each as a parameter of its own.",
            min_length=1,
            max_length=MAX_RUNS,
        ),
    ],
    names: Names = None,
    first: First = 1,
    last: Last = 1_000_000_000,
    points: Points = 1000,
) -> Response:
    """The same metrics of several runs, in the order in which the runs were named."""
    chosen = _split(runs)
    if not 1 <= len(chosen) <= MAX_RUNS:
        raise WrongField("query.runs", f"expected 1 to {MAX_RUNS} runs, not {len(chosen)}")
    found = [_of_run(all_runs, reading, run, names) for run in chosen]
    _check_size(sum(len(wanted) for _, wanted in found), points)
    curves = [
        _metrics(run, columns, wanted, first, last, points)
        for run, (columns, wanted) in zip(chosen, found, strict=True)
    ]
    return _json(MANY.dump_json(curves))


def _of_run(runs: Runs, reading: Reading, run: str, names: list[str] | None) -> tuple[Columns, list[str]]:
    columns = reading.metrics.of(runs.find(run).metrics)
    return columns, _names(names, columns, strict=False)


def _metrics(run: str, columns: Columns, names: list[str], first: int, last: int, points: int) -> Metrics:
    if first > last:
        raise WrongField("query.first", f"expected at most query.last {last}, not {first}")
    found = columns.curves(names, first, last, points)
    curves = {
        # NaN is written as null.
        name: Curve.model_construct(
            steps=curve.steps, mean=curve.mean.tolist(), low=curve.low.tolist(), high=curve.high.tolist()
        )
        for name, curve in found.curves.items()
    }
    return Metrics.model_construct(run=run, first=found.first, last=found.last, bucket=found.bucket, curves=curves)


def _names(names: list[str] | None, columns: Columns, strict: bool = True) -> list[str]:
    """The metrics asked for. Of several runs one may lack what another has: its curve is empty then."""
    known = columns.names()
    if names is None:
        return known
    wanted = _split(names)
    if not 1 <= len(wanted) <= MAX_NAMES:
        raise WrongField("query.names", f"expected 1 to {MAX_NAMES} metrics, not {len(wanted)}")
    unknown = [name for name in wanted if name not in known]
    if strict and unknown and known:
        raise WrongField("query.names", f"the run has no {', '.join(unknown)[:200]}; it has {', '.join(known)}")
    return wanted


def _split(values: list[str]) -> list[str]:
    return list(dict.fromkeys(part for value in values for part in value.split(",") if part))


def _check_size(curves: int, points: int) -> None:
    if curves * points > MAX_POINTS:
        raise WrongField(
            "query.points", f"{curves} curves of {points} points; expected at most {MAX_POINTS} points in all"
        )


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
