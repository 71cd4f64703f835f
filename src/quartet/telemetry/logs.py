"""Logs: one line an event, key=value, on standard error."""

from __future__ import annotations

import sys
from typing import Any

import structlog


def configure_logs(role: str) -> None:
    """Sets structlog up for this process; every line carries the role."""

    def with_role(_: Any, __: str, event: Any) -> Any:
        event["role"] = role
        return event

    structlog.configure(
        processors=[
            with_role,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "role", "event"]),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
