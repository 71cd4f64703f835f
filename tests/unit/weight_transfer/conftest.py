"""A weight source and a mirror."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quartet.weight_transfer.receiver import WeightMirror
from quartet.weight_transfer.source import WeightSource


@pytest.fixture
def source() -> Iterator[WeightSource]:
    source = WeightSource(capacity=3, num_threads=2)
    yield source
    source.close()


@pytest.fixture
def mirror() -> Iterator[WeightMirror]:
    mirror = WeightMirror(num_threads=2, shares=False)
    yield mirror
    mirror.close()


@pytest.fixture
def mapping_mirror() -> Iterator[WeightMirror]:
    """A mirror that maps the memory of its source."""
    mirror = WeightMirror(num_threads=2)
    yield mirror
    mirror.close()
