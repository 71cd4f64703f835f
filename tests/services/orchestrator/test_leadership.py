"""The run directory of an orchestrator without a launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.errors import ConfigError
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.leadership import acquire_run_directory


def first_event(config: Config) -> str:
    with capture_logs() as logs, acquire_run_directory(config):
        pass
    return str(logs[0]["event"])


def config_of(folder: Path, **sections: Any) -> Config:
    """Return the config of a run with external services."""
    (folder / "prompts.jsonl").write_text('{"text": "a"}\n')
    tree = {
        "run": {"directory": str(folder)},
        "data": {"prompts": str(folder / "prompts.jsonl")},
        "actor": {"model": "owner/a"},
        "reward": {"model": "owner/r"},
        "rollout": {"prompts_per_step": 1},
        "buffer": {"url": "redis://far"},
        "services": {role: {"address": "far:1"} for role in ("actor", "critic", "reward", "reference")},
    }
    return parse_config({**tree, **sections}, "test")


def test_a_run_with_a_committed_step_is_resumed(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert first_event(config) == "run started"
    # After a restart before the first step, the directory contains only the config.
    assert first_event(config) == "run started"
    RunFiles(config.run_directory).append_metrics({"step": 1})
    assert first_event(config) == "run resumed"


def test_a_run_with_an_invalid_config_leaves_no_files(tmp_path: Path) -> None:
    config = config_of(tmp_path, services={"actor": {"address": "far:1"}})
    with pytest.raises(ConfigError, match=r"(?m)^ *services\.critic\.address: null"), acquire_run_directory(config):
        pass
    assert not config.run_directory.exists()
