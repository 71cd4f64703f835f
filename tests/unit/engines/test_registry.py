"""What the kinds of engines state, against their names and against the engines themselves."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from typing import get_args

import pytest

from quartet.config.rollout import RolloutConfig
from quartet.engines import registry
from quartet.engines.engine import COLUMNS, EngineKind
from quartet.engines.registry import BUILT_IN, engine_names, find_engine
from quartet.errors import ConfigError
from quartet.models.generation.torch_engine import DetachedTorchEngine, TorchEngine
from quartet.models.generation.torch_kind import KIND
from tests.unit.models import tiny


def test_every_engine_of_the_config_is_found() -> None:
    assert set(engine_names()) == set(get_args(RolloutConfig.model_fields["engine"].annotation))


def test_an_engine_of_another_package_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = EngineKind("other", "other", ())
    monkeypatch.setattr(metadata.EntryPoint, "load", lambda entry: kind)
    points = [metadata.EntryPoint("other", "other:KIND", registry.GROUP)]
    monkeypatch.setattr(
        registry,
        "entry_points",
        lambda group, name="other": points if (group, name) == (registry.GROUP, "other") else (),
    )
    assert engine_names() == [*BUILT_IN, "other"]
    assert find_engine("other") is kind
    with pytest.raises(
        ConfigError, match=r"rollout\.engine absent: no installed package has it; expected one of torch, .*other"
    ):
        find_engine("absent")


@pytest.mark.parametrize("name", BUILT_IN)
def test_names_begin_with_the_engine(name: str) -> None:
    # The pool and `quartet doctor` compare this part with rollout.engine.
    kind = find_engine(name)
    assert {kind.name, *(place.properties.name.split(" ")[0] for place in kind.guarantees)} == {name}
    assert kind.create or kind.share


def test_torch_states_what_its_engines_declare() -> None:
    model = tiny.causal("llama")
    engines = (TorchEngine(model, frozenset({1}), 8), DetachedTorchEngine(model, None, frozenset({1}), 8))
    for engine, place in zip(engines, KIND.guarantees, strict=True):
        # The statement says what is possible; a trial decides what is.
        assert replace(engine.properties, batch_invariant=False, trial="", trial_digest="") == place.properties


def test_no_engine_promises_what_only_a_trial_can_tell() -> None:
    places = [place for name in BUILT_IN for place in find_engine(name).guarantees]
    assert not any(place.properties.batch_invariant for place in places)
    cells = {
        place.properties.name: dict(zip(COLUMNS, place.cells(), strict=True))["batch-invariant"] for place in places
    }
    assert cells["torch"] == "if its trial at the start passes"
    assert "yes" not in cells.values()
