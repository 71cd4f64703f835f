"""Metrics over the steps, as curves with as many points as a chart can show."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from pydantic import TypeAdapter
from starlette.responses import Response

from quartet.gateway.access.callers import Viewer
from quartet.gateway.http.api_router import api_router
from quartet.gateway.http.http_errors import WrongField
from quartet.gateway.readers.metric_columns import MetricColumns, Metrics
from quartet.gateway.readers.run_catalog import RunCatalog
from quartet.gateway.readers.run_readers import RunReaders
from quartet.gateway.routes.dependencies import TheCatalog, TheReaders, TheRunFiles
from quartet.telemetry.metric_definition import MetricDefinition
from quartet.telemetry.step_metrics import CHARTS, METRICS

router = api_router("metrics")

MAX_NAMES = 100
MAX_RUNS = 20
MAX_POINTS = 400_000
"""Points in one response: points times metrics times runs."""
_METRICS, _METRICS_LIST = TypeAdapter(Metrics), TypeAdapter(list[Metrics])

Names = Annotated[
    list[str] | None,
    Query(
        description="Names of metrics, separated by commas or as repeated parameters. Defaults to all metrics.",
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
        description="Maximum number of points per curve. If there are more steps, each point covers several in a row.",
    ),
]


@router.get("/metric-definitions")
def list_metric_definitions(_: Viewer) -> list[MetricDefinition]:
    """List the metrics of steps and evaluations: those with a chart in the order of the charts, then the others."""
    charted = [definition for definitions in CHARTS.values() for definition in definitions]
    return [*charted, *(definition for definition in METRICS.values() if not definition.chart)]


@router.get("/runs/{run}/metrics", response_model=Metrics)
def get_metrics(
    _: Viewer,
    files: TheRunFiles,
    readers: TheReaders,
    names: Names = None,
    first: First = 1,
    last: Last = 1_000_000_000,
    points: Points = 1000,
) -> Response:
    """Return metrics of one run. Each point has the mean, minimum and maximum of the steps that it covers."""
    columns = readers.metrics(files.metrics)
    selected = _names(names, columns)
    _check_size(len(selected), points)
    # Serialized here: FastAPI would validate hundreds of thousands of numbers again, which takes longer than all else.
    return _json(_METRICS.dump_json(_metrics(columns, selected, first, last, points)))


@router.get("/metrics", response_model=list[Metrics])
def compare_metrics(
    _: Viewer,
    catalog: TheCatalog,
    readers: TheReaders,
    runs: Annotated[
        list[str],
        Query(
            description="Names of runs, separated by commas or as repeated parameters.",
            min_length=1,
            max_length=MAX_RUNS,
        ),
    ],
    names: Names = None,
    first: First = 1,
    last: Last = 1_000_000_000,
    points: Points = 1000,
) -> Response:
    """Return the same metrics of several runs, in the order of the `runs` parameter."""
    run_names = _split(runs)
    if not 1 <= len(run_names) <= MAX_RUNS:
        raise WrongField("query.runs", f"expected 1 to {MAX_RUNS} runs, not {len(run_names)}")
    selected = [_of_run(catalog, readers, run, names) for run in run_names]
    _check_size(sum(len(metric_names) for _, metric_names in selected), points)
    metrics = [_metrics(columns, metric_names, first, last, points) for columns, metric_names in selected]
    return _json(_METRICS_LIST.dump_json(metrics))


def _of_run(
    catalog: RunCatalog, readers: RunReaders, run: str, names: list[str] | None
) -> tuple[MetricColumns, list[str]]:
    columns = readers.metrics(catalog.find(run).metrics)
    return columns, _names(names, columns, allow_unknown=True)


def _metrics(columns: MetricColumns, names: list[str], first: int, last: int, points: int) -> Metrics:
    if first > last:
        raise WrongField("query.first", f"expected at most query.last {last}, not {first}")
    return columns.curves(names, first, last, points)


def _names(names: list[str] | None, columns: MetricColumns, allow_unknown: bool = False) -> list[str]:
    """Return the requested metrics. In a comparison, a metric that one of the runs lacks gives an empty curve."""
    known = columns.names()
    if names is None:
        return known
    selected = _split(names)
    if not 1 <= len(selected) <= MAX_NAMES:
        raise WrongField("query.names", f"expected 1 to {MAX_NAMES} metrics, not {len(selected)}")
    unknown = [name for name in selected if name not in known]
    if not allow_unknown and unknown and known:
        raise WrongField("query.names", f"the run has no {', '.join(unknown)[:200]}; it has {', '.join(known)}")
    return selected


def _split(values: list[str]) -> list[str]:
    return list(dict.fromkeys(part for value in values for part in value.split(",") if part))


def _check_size(curves: int, points: int) -> None:
    if curves * points > MAX_POINTS:
        raise WrongField(
            "query.points", f"{curves} curves of {points} points; expected at most {MAX_POINTS} points in total"
        )


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
