"""The API's paths, a module for each kind of thing."""

from __future__ import annotations

from fastapi import APIRouter

from quartet.gateway.routes import (
    checkpoints,
    commands,
    evaluations,
    events,
    guards,
    live,
    logs,
    metrics,
    runs,
    session,
    static,
    steps,
    trajectories,
)

ROUTERS: tuple[APIRouter, ...] = (
    session.router,
    runs.router,
    metrics.router,
    steps.router,
    trajectories.router,
    evaluations.router,
    checkpoints.router,
    guards.router,
    logs.router,
    live.router,
    events.router,
    commands.router,
    static.router,
)
"""In the order in which the OpenAPI document lists them."""
