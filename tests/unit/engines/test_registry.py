"""What the kinds of engines state, against their names and against the engines themselves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from quartet.config.rollout import ENGINES, engine_names
from quartet.engines.engine import COLUMNS, find_engine
from quartet.errors import ConfigError
from quartet.models.generation.torch_engine import DetachedTorchEngine, TorchEngine
from quartet.models.generation.torch_kind import KIND
from quartet.preflight.generators import check_generators
from quartet.services.generator.factory import create_engine
from tests.unit.config.test_engines import config as engine_config
from tests.unit.models import tiny

MODULE = """
from quartet.engines.engine import EngineKind, ServedModel

def create(config):
    return "the engine", ServedModel("a", "float32", frozenset({1}), 600, 64)

KIND = EngineKind("sprinter", "sprinter", (), create=create)
"""


@pytest.fixture
def sprinter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with an engine that Quartet does not know."""
    (tmp_path / "sprinter.py").write_text(MODULE)
    metadata = tmp_path / "sprinter-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sprinter\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[quartet.engines]\nsprinter = sprinter:KIND\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("sprinter", None)


@pytest.mark.usefixtures("sprinter")
def test_an_engine_of_another_package_needs_no_change_here() -> None:
    config = engine_config("sprinter", rollout={"generators": 1, "max_off_policy_steps": 1})
    assert "sprinter" in engine_names()
    engine, model, status = create_engine(config)
    assert (engine, model.vocabulary_size) == ("the engine", 600)
    assert (status.role, status.model) == ("generator", "a")
    assert find_engine("sprinter").package == "sprinter"


@pytest.mark.usefixtures("sprinter")
def test_where_an_engine_of_another_package_runs_is_checked_before_the_start() -> None:
    (problem,) = [each for each in check_generators(engine_config("sprinter")) if each.level == "error"]
    assert problem.where == "rollout.engine sprinter"
    assert problem.what.startswith("runs in generators; set rollout.generators to 1 or more")
    assert not [each for each in check_generators(engine_config("torch")) if each.level == "error"]


@pytest.mark.usefixtures("sprinter")
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("class KIND: pass", "is type, expected an EngineKind"),
        ("KIN = 1", "AttributeError"),
        ("import absent_1", "absent_1"),
    ],
)
def test_an_entry_point_that_is_no_engine_is_an_error_of_the_config(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "sprinter.py").write_text(text)
    with pytest.raises(ConfigError, match=rf"^rollout\.engine sprinter: the entry point sprinter:KIND .*{problem}"):
        find_engine("sprinter")


@pytest.mark.usefixtures("sprinter")
def test_an_absent_engine_is_refused_with_the_names_of_all() -> None:
    names = "torch, vllm, vllm-server, .*sprinter"
    with pytest.raises(
        ConfigError, match=rf"rollout\.engine.*: no installed package has this engine; expected one of {names}"
    ):
        engine_config("sprint")
    with pytest.raises(ConfigError, match=r"rollout\.engine sprint: no installed package has this engine"):
        find_engine("sprint")


@pytest.mark.parametrize("name", ENGINES)
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
    places = [place for name in ENGINES for place in find_engine(name).guarantees]
    assert not any(place.properties.batch_invariant for place in places)
    cells = {
        place.properties.name: dict(zip(COLUMNS, place.cells(), strict=True))["batch-invariant"] for place in places
    }
    assert cells["torch"] == "if its trial at the start passes"
    assert "yes" not in cells.values()
