"""Runs: which there are, how each stands, with which settings it runs."""

from __future__ import annotations

from typing import Annotated

import yaml
from fastapi import Depends, Query

from quartet.gateway.access import Viewer
from quartet.gateway.http_errors import NotFound
from quartet.gateway.pagination import cursor_after, read_cursor
from quartet.gateway.routing import Cursor, Limit, RunName, TheConfig, TheLive, TheReading, TheRuns, api_router
from quartet.gateway.runs.summaries import Summaries
from quartet.gateway.schemas import Page, RunConfig, RunDetail, RunSummary, State

router = api_router("runs")


async def _summaries(runs: TheRuns, reading: TheReading, live: TheLive) -> Summaries:
    return Summaries(runs, reading, live)


TheSummaries = Annotated[Summaries, Depends(_summaries)]


@router.get("/runs")
def list_runs(
    _: Viewer,
    runs: TheRuns,
    summaries: TheSummaries,
    state: Annotated[State | None, Query(description="Only runs in this state.")] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[RunSummary]:
    """Every run of the gateway's folder, by name. One that cannot be read is among them, with its `problem`."""
    question = ["runs", state]
    after = str(read_cursor(cursor, question, (str,))[0]) if cursor is not None else ""
    names, items = [name for name in runs.names() if name > after], list[RunSummary]()
    for name in names:
        try:
            found = summaries.summary(name)
        except NotFound:  # Removed meanwhile.
            continue
        if state is None or found.state is state:
            if len(items) == limit:
                return Page(items=items, next=cursor_after([items[-1].name], question))
            items.append(found)
    return Page(items=items, total=len(items) if cursor is None else None)


@router.get("/runs/{run}")
def get_run(_: Viewer, run: RunName, summaries: TheSummaries) -> RunDetail:
    """One run: how it stands, what it does just now, what there is of it to look at."""
    return summaries.detail(run)


@router.get("/runs/{run}/config")
def get_config(_: Viewer, config: TheConfig) -> RunConfig:
    """The run's settings, defaults included, passwords replaced by stars."""
    text = config.to_yaml()
    return RunConfig(config=yaml.safe_load(text), yaml=text)
