"""The entropy coefficient as a live setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quartet.config.loading import parse_config
from quartet.errors import InvalidRequest
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.algorithm.state import AlgorithmState
from quartet.services.orchestrator.control.live_settings import LiveSettings
from quartet.services.orchestrator.control.run_control import RunControl


def settings_of(folder: Path, **algorithm: Any) -> LiveSettings:
    tree = {
        "run": {"steps": 9, "directory": str(folder)},
        "data": {"prompts": "p"},
        "actor": {"model": "a"},
        "reward": {"model": "r"},
        "algorithm": algorithm,
    }
    config = parse_config(tree, "test")
    files = RunFiles(config.run_directory)
    files.root.mkdir(parents=True, exist_ok=True)
    result = LiveSettings(config, files, RunControl(files, persist=False))
    result.resume(2, AlgorithmState(config))
    return result


def test_a_change_applies_from_the_next_step_and_survives_a_restart(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, entropy_coefficient=0.01)
    (change,) = settings.change({"entropy_coefficient": 0.03}, "me")
    assert (change.before, change.after, change.step) == (0.01, 0.03, 4)
    for each in (settings, settings_of(tmp_path, entropy_coefficient=0.01)):
        assert [each.config_at(step).algorithm.entropy_coefficient for step in (3, 4, 5)] == [0.01, 0.03, 0.03]
    (shown,) = [item for item in settings.settings() if item.name == "entropy_coefficient"]
    assert (shown.value, shown.low, shown.high) == (0.03, 0.0, 0.1)


@pytest.mark.parametrize(
    "algorithm",
    [{}, {"entropy_coefficient": 0.01, "entropy_controller": {"kind": "adaptive"}}],
    ids=["off", "adaptive"],
)
def test_a_coefficient_that_is_off_or_adaptive_cannot_be_set(algorithm: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="entropy_coefficient: not a live setting"):
        settings_of(tmp_path, **algorithm).change({"entropy_coefficient": 0.03}, "me")
