"""Runs: the list of runs, and the state and config of each."""

from __future__ import annotations

from typing import Annotated

import yaml
from fastapi import Query

from quartet.gateway.access.callers import Viewer
from quartet.gateway.http.api_router import api_router
from quartet.gateway.http.http_errors import NotFound
from quartet.gateway.http.pagination import cursor_after, read_cursor
from quartet.gateway.routes.dependencies import Cursor, Limit, RunName, TheCatalog, TheRunSummaries
from quartet.gateway.schemas import Page, RunConfig, RunDetail, RunSummary, State

router = api_router("runs")


@router.get("/runs")
def list_runs(
    _: Viewer,
    catalog: TheCatalog,
    summaries: TheRunSummaries,
    state: Annotated[State | None, Query(description="Only runs in this state.")] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[RunSummary]:
    """List the runs of the gateway's folder by name. An unreadable run is included, with its `problem`."""
    request = ["runs", state]
    after = str(read_cursor(cursor, request, (str,))[0]) if cursor is not None else ""
    names, items = [name for name in catalog.names() if name > after], list[RunSummary]()
    for name in names:
        try:
            summary = summaries.summary(name)
        except NotFound:  # Removed meanwhile.
            continue
        if state is None or summary.state is state:
            if len(items) == limit:
                return Page(items=items, next=cursor_after([items[-1].name], request))
            items.append(summary)
    return Page(items=items, total=len(items) if cursor is None else None)


@router.get("/runs/{run}")
def get_run(_: Viewer, run: RunName, summaries: TheRunSummaries) -> RunDetail:
    """Return one run: its state, its current progress, and what it has recorded."""
    return summaries.detail(run)


@router.get("/runs/{run}/config")
def get_config(_: Viewer, run: RunName, catalog: TheCatalog) -> RunConfig:
    """Return the run's resolved config, with passwords replaced by asterisks."""
    text = catalog.any_config(run).to_yaml()
    return RunConfig(config=yaml.safe_load(text), yaml=text)
