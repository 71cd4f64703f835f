"""Fixtures of the RPC tests, from ``tests.services.model_services``."""

from tests.services.model_services import (  # noqa: F401
    _one_thread,
    checkpoints,
    clients,
    make_config,
    services,
    session_services,
)
