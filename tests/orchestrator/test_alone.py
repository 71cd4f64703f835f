"""What an orchestrator that was started by itself makes of the run's directory that it finds."""

from __future__ import annotations

from pathlib import Path

from structlog.testing import capture_logs

from quartet.config import Config, parse_config
from quartet.telemetry.run_files import RunFiles
from services.orchestrator.alone import taken_up


def said(config: Config) -> str:
    with capture_logs() as logs, taken_up(config):
        pass
    return str(logs[0]["event"])


def test_a_run_is_gone_on_with_once_it_has_taken_a_step(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"text": "a"}\n')
    elsewhere = {role: {"address": "far:1"} for role in ("actor", "critic", "reward", "reference")}
    config = parse_config(
        {
            "run": {"directory": str(tmp_path)},
            "data": {"prompts": str(tmp_path / "prompts.jsonl")},
            "actor": {"model": "owner/a"},
            "reward": {"model": "owner/r"},
            "rollout": {"prompts_per_step": 1},
            "buffer": {"url": "redis://far"},
            "services": elsewhere,
        },
        "test",
    )
    assert said(config) == "beginning the run"
    # Started again before its first step, which leaves a config and no more.
    assert said(config) == "beginning the run"
    RunFiles(config.run_directory).append_metrics({"step": 1})
    assert said(config) == "going on with the run"
