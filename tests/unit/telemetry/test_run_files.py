"""A run's directory: one run at a time, and nothing of anyone else's removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from quartet.errors import ConfigError
from quartet.telemetry.run_files import RunFiles, read_metrics


def test_a_directory_has_one_run_at_a_time(tmp_path: Path) -> None:
    first = RunFiles(tmp_path / "run")
    first.claim()
    with pytest.raises(ConfigError, match="a run is going on there"):
        RunFiles(tmp_path / "run").claim()
    del first
    RunFiles(tmp_path / "run").claim()


def test_a_file_in_the_place_of_the_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        RunFiles(tmp_path / "run").claim()


def test_dropping_a_run_leaves_what_is_not_a_runs(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.write_config("run: {}\n")
    files.append_metrics({"step": 1})
    files.write_trajectories(1, [{"id": "a"}])
    (tmp_path / "thesis.tex").write_text("mine")
    files.drop()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_used_directory_is_refused(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.check_unused()
    files.append_metrics({"step": 1, "reward_mean": 0.5})
    with pytest.raises(ConfigError, match="--overwrite"):
        files.check_unused()
    assert read_metrics(files.metrics) == [{"step": 1, "reward_mean": 0.5}]


def test_a_damaged_metrics_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2: not JSON"):
        read_metrics(tmp_path / "metrics.jsonl")
