"""An API server for the chart's checks, and a connection of Helm to it."""

from __future__ import annotations

from collections.abc import Iterator

import helm_python
import pytest

from tests.helm.cluster import ApiServer, api_server, connected


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with api_server() as server:
        yield server


@pytest.fixture
def cluster(api: ApiServer) -> Iterator[helm_python.Config]:
    with connected(api) as config:
        yield config
