"""Fixtures of the tests of services: see ``tests.services.model_services``."""

from tests.services.model_services import (  # noqa: F401
    _one_thread,
    checkpoints,
    clients,
    make_config,
    services,
    session_services,
)
from tests.training.conftest import _measured_once  # noqa: F401
