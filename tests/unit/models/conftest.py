"""Fixtures of the tests of models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.training.measured_once import measured_once


@pytest.fixture(scope="module", autouse=True)
def _measured_once() -> Iterator[None]:
    """Try equal models once. Tests of the trials themselves override this fixture."""
    with measured_once():
        yield
