"""A report is one self-contained file. Texts of the run are escaped."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from quartet.cli.report.command import report
from quartet.cli.report.curves import MAX_POINTS, main_charts
from quartet.config.loading import FIRST_CONFIG_LINE, parse_config
from quartet.contract.control import Alert
from quartet.errors import ConfigError
from quartet.run_directory.run_files import RunFiles

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>"
STEPS = 4


def metrics(step: int) -> dict[str, float]:
    return {
        "step": step,
        "reward_mean": 0.5 * step,
        "reward_std": 1.0,
        "kl_mean": 0.1 * step,
        "entropy": math.nan if step == 2 else 3.0,
        "response_tokens": 100,
        "seconds": 2.0,
        "generate_seconds": 0.5,
        "update_seconds": 1.0,
        "odd_one": 7.0,
    }


def trajectory(step: int, sample: int) -> dict[str, Any]:
    return {
        "id": f"tiny/{step}/0/{sample}",
        "prompt": f"prompt {sample}",
        "response": f"response {sample} of {step} {HOSTILE}",
        "score": float(sample),
        "parts": {"length": 0.25},
        "kl": 0.5,
        "response_tokens": 9,
        "finished": sample != 0,
    }


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    tree = {
        "run": {"name": "tiny", "steps": STEPS},
        "data": {"prompts": "p"},
        "actor": {"model": HOSTILE},
        "reward": {"model": "r"},
        "algorithm": {"kl_controller": {"kind": "adaptive", "target": 4.25}},
    }
    files = RunFiles(tmp_path / "tiny")
    files.write_config(parse_config(tree, "here").to_yaml())
    for step in range(1, STEPS + 1):
        files.append_metrics(metrics(step))
        files.write_trajectories(step, [trajectory(step, sample) for sample in range(5)])
    files.append_alert(Alert(3, "kl_runaway", "warn", HOSTILE, "lower it"))
    files.write_evaluation(0, {"eval_reward_greedy": 1.25, "eval_win_rate_greedy": 0.5}, [])
    files.write_evaluation(4, {"eval_reward_greedy": 2.75, "eval_win_rate_greedy": 0.75}, [])
    files.timeline.write_text(
        json.dumps({"step": 1, "started": 0.0, "seconds": 2.0, "spans": [span("actor", "generate", 0.0, 0.5)]}) + "\n"
    )
    return files


def span(service: str, phase: str, start: float, end: float) -> dict[str, Any]:
    return {"service": service, "phase": phase, "start": start, "end": end, "count": 1}


def test_a_report_shows_the_progress_of_the_run(files: RunFiles) -> None:
    report(files.root, None)
    assert "At step 4 of 4" in files.report.read_text()
    files.services.write_text("{}")
    report(files.root, None)
    assert "Active: step 4 of 4" in files.report.read_text()
    files.services.unlink()
    files.policy.mkdir()
    files.write_policy_step(4)
    report(files.root, None)
    assert "Finished after 4 steps" in files.report.read_text()


def test_a_run_without_scores_shows_its_first_responses(files: RunFiles) -> None:
    for step in range(1, STEPS + 1):
        files.write_trajectories(step, [{**trajectory(step, sample), "score": None} for sample in range(5)])
    report(files.root, None)
    text = files.report.read_text()
    assert "response 0 of 4" in text
    assert "response 1 of 4" not in text
    assert "score None" not in text


def test_an_ensemble_is_summarized_by_its_parts(tmp_path: Path) -> None:
    parts = [
        {"name": "quality", "weight": 0.7, "source": "model", "model": "m/quality"},
        {"name": "short", "weight": 0.3, "source": "function", "function": "mine:short"},
    ]
    tree = {
        "run": {"name": "tiny", "steps": STEPS},
        "data": {"prompts": "p"},
        "actor": {"model": "a"},
        "reward": {"source": "ensemble", "parts": parts},
    }
    files = RunFiles(tmp_path / "tiny")
    files.write_config(parse_config(tree, "here").to_yaml())
    for step in range(1, STEPS + 1):
        files.append_metrics({**metrics(step), "reward_quality_mean": 10.0 * step, "reward_short_mean": -1.0})
    report(files.root, None)
    text = files.report.read_text()
    assert "0.7 × quality (m/quality) + 0.3 × short (mine:short)" in text
    assert "reward part quality, unweighted: first and last 2 steps" in text
    assert "15 → 35" in text
    assert "reward part short, unweighted" in text


def test_runs_of_an_earlier_version_and_without_steps_have_a_report(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        FIRST_CONFIG_LINE + yaml.safe_dump({"run": {"name": "old", "steps": 9}, "gone": 1})
    )
    report(tmp_path, tmp_path / "other.html")
    text = (tmp_path / "other.html").read_text()
    assert "Run old" in text
    assert "At step 0 of 9" in text
    assert "No step has been committed yet." in text


def test_a_report_replaces_only_another_report(files: RunFiles, tmp_path: Path) -> None:
    other = tmp_path / "notes.html"
    other.write_text("<p>mine</p>")
    with pytest.raises(ConfigError, match=re.escape(f"{other}: exists and is not a report")):
        report(files.root, other)
    with pytest.raises(ConfigError, match="no directory"):
        report(files.root, tmp_path / "absent" / "report.html")
    with pytest.raises(ConfigError, match="is not the directory of a run"):
        report(tmp_path, None)
    assert other.read_text() == "<p>mine</p>"


def test_a_damaged_file_is_reported(files: RunFiles) -> None:
    path = files.trajectories / "step-000004.jsonl"
    path.write_text('{"score": 1.0}\n')
    with pytest.raises(ConfigError, match=f"trajectories {re.escape(str(path))}: cannot be read"):
        report(files.root, None)
    assert not files.report.exists()


def test_curves_of_long_runs_are_reduced_and_keep_their_mean() -> None:
    steps = [{"step": step, "reward_mean": float(step), "reward_std": 2.0} for step in range(1, 10 * MAX_POINTS + 1)]
    line = main_charts(steps, None)[0]["lines"][0]
    assert len(line["x"]) == len(line["y"]) == MAX_POINTS
    assert (line["x"][0], line["y"][0], line["low"][0], line["high"][0]) == (10, 5.5, 3.5, 7.5)
    assert line["x"][-1] == 10 * MAX_POINTS


def test_missing_and_non_finite_values_are_gaps_in_curves() -> None:
    results = {item["title"]: item["lines"][0]["y"] for item in main_charts([metrics(1), metrics(2)], None)}
    assert results["Entropy"] == [3.0, None]
    assert results["Throughput"] == [50.0, 50.0]
