"""Fixtures of the RPC tests, from ``tests.services.model_services`` and the tests of environments."""

from tests.environments.conftest import folder, host, model  # noqa: F401
from tests.services.model_services import (  # noqa: F401
    _one_thread,
    checkpoints,
    clients,
    make_config,
    services,
    session_services,
)
