"""The paths of the REST API and the dashboard, one module per resource."""

from __future__ import annotations

from fastapi import APIRouter

from quartet.gateway.routes import (
    checkpoints,
    commands,
    dashboard_files,
    evaluations,
    events,
    guards,
    health,
    logs,
    metrics,
    profiles,
    runs,
    services,
    session,
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
    services.router,
    profiles.router,
    events.router,
    commands.router,
    health.router,
    dashboard_files.router,
)
"""In the order of the OpenAPI document."""
