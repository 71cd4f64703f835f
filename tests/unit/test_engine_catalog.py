"""The catalog of engines against the engines themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from quartet.config.rollout import RolloutConfig
from quartet.engines.catalog import CATALOG, COLUMNS
from quartet.models.generation.detached_torch import DetachedTorchEngine
from quartet.models.generation.torch_engine import TorchEngine
from tests.unit.models import tiny


def test_the_catalog_has_every_engine() -> None:
    assert {entry.engine for entry in CATALOG} == set(get_args(RolloutConfig.model_fields["engine"].annotation))


@pytest.mark.parametrize("engine", [entry.engine for entry in CATALOG])
def test_names_begin_with_the_engine(engine: str) -> None:
    # The pool and `quartet doctor` compare this part with rollout.engine.
    assert {entry.properties.name.split(" ")[0] for entry in CATALOG if entry.engine == engine} == {engine}


def test_the_catalog_agrees_with_the_torch_engines() -> None:
    shared, detached = [entry.properties for entry in CATALOG if entry.engine == "torch"]
    model = tiny.causal("llama")
    engines = (TorchEngine(model, frozenset({1}), 8), DetachedTorchEngine(model, None, frozenset({1}), 8))
    for engine, expected in zip(engines, (shared, detached), strict=True):
        # The catalog says what is possible; a trial decides what is.
        assert replace(engine.properties, batch_invariant=False, trial="", trial_digest="") == expected


def test_the_catalog_promises_nothing_that_only_a_trial_can_tell() -> None:
    assert not any(entry.properties.batch_invariant for entry in CATALOG)
    cells = {entry.engine: dict(zip(COLUMNS, entry.cells(), strict=True))["batch-invariant"] for entry in CATALOG}
    assert cells["torch"] == "if its trial at the start passes"
    assert "yes" not in cells.values()
