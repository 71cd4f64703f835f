"""A report is one self-contained file. Texts of the run are escaped."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from quartet.cli.report import EVALUATION_ROWS, MARK, POINTS, RESPONSES, report
from quartet.cli.report import STEPS as SHOWN_STEPS
from quartet.config.loading import parse_config
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
        "policy_version": step - 1,
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


def recorded(path: Path) -> dict[str, Any]:
    """Return the responses of the gateway in a report."""
    data = re.search(r'<script id="recording" type="application/json">(.*?)</script>', path.read_text(encoding="utf-8"))
    assert data is not None
    responses: dict[str, Any] = json.loads(data[1])["responses"]
    return responses


def written(files: RunFiles) -> dict[str, Any]:
    """Write the report of a run, and return its responses."""
    report(files.root, None)
    return recorded(files.report)


def test_a_report_has_the_state_the_config_and_the_events_of_its_run(files: RunFiles) -> None:
    responses = written(files)
    run = responses["/runs/tiny"]
    assert (run["state"], run["step"], run["total_steps"], run["kl_target"]) == ("idle", 4, 4, 4.25)
    assert responses["/runs"]["items"] == [run]
    assert responses["/session"]["access"] == "viewer"
    assert responses["/runs/tiny/config"]["config"]["actor"]["model"] == HOSTILE
    assert [alert["evidence"] for alert in responses["/runs/tiny/guards"]["alerts"]] == [HOSTILE]
    assert responses["/runs/tiny/settings"]["changes"] == []
    assert responses["/runs/tiny/steps/1"]["spans"][0]["phase"] == "generate"
    files.policy.mkdir()
    files.write_policy_step(4)
    assert written(files)["/runs/tiny"]["state"] == "finished"


def test_a_report_has_the_best_the_median_and_the_worst_response_of_the_first_and_the_last_step(
    files: RunFiles,
) -> None:
    # More than a response of the gateway holds, and fewer.
    for step, count in ((1, 801), (STEPS, 101)):
        files.write_trajectories(step, [trajectory(step, sample) for sample in range(count)])
    responses = written(files)
    items = responses["/runs/tiny/trajectories"]["items"]
    assert [item["step"] for item in items] == [STEPS] * RESPONSES + [1] * RESPONSES
    scores = [item["score"] for item in items]
    assert (scores[0], scores[RESPONSES // 2], scores[RESPONSES - 1]) == (100.0, 50.0, 0.0)
    assert (scores[RESPONSES], scores[RESPONSES + RESPONSES // 2], scores[-1]) == (800.0, 400.0, 0.0)
    best = responses[f"/runs/tiny/trajectories/{STEPS}/0/100"]
    assert best["response"] == f"response 100 of {STEPS} {HOSTILE}"
    assert best["parts"] == {"length": 0.25}


def test_a_run_without_scores_has_its_responses(files: RunFiles) -> None:
    for step in range(1, STEPS + 1):
        files.write_trajectories(step, [{**trajectory(step, sample), "score": None} for sample in range(5)])
    items = written(files)["/runs/tiny/trajectories"]["items"]
    assert [item["score"] for item in items] == [None] * 10


def test_the_first_and_the_last_evaluation_are_in_the_report(files: RunFiles) -> None:
    rows = [{"index": index, "prompt": "p"} for index in range(EVALUATION_ROWS + 9)]
    files.write_evaluation(0, {"eval_reward_greedy": 1.25}, rows)
    files.write_evaluation(2, {"eval_reward_greedy": 2.0}, rows)
    files.write_evaluation(4, {"eval_reward_greedy": 2.75}, rows, {"gsm8k": rows[:2]})
    responses = written(files)
    summaries = responses["/runs/tiny/evaluations"]["items"]
    assert [item["metrics"]["eval_reward_greedy"] for item in summaries][-1] == 2.75
    assert {path for path in responses if "/evaluations/" in path} == {
        "/runs/tiny/evaluations/0",
        "/runs/tiny/evaluations/4",
        "/runs/tiny/evaluations/4/sets/gsm8k",
    }
    assert len(responses["/runs/tiny/evaluations/4"]["items"]) == EVALUATION_ROWS


def test_a_run_without_steps_has_a_report(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "new")
    tree = {"run": {"steps": 9}, "data": {"prompts": "p"}, "actor": {"model": "a"}, "reward": {"model": "r"}}
    files.write_config(parse_config(tree, "here").to_yaml())
    report(files.root, tmp_path / "other.html")
    responses = recorded(tmp_path / "other.html")
    assert (responses["/runs/new"]["step"], responses["/runs/new"]["total_steps"]) == (0, 9)
    assert responses["/runs/new/trajectories"]["items"] == []


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
    report(files.root, None)
    report(files.root, None)
    assert files.report.read_text().startswith(MARK)


def test_a_damaged_file_is_reported(files: RunFiles, capfd: pytest.CaptureFixture[str]) -> None:
    path = files.trajectories / "step-000004.jsonl"
    path.write_text('{"score": 1.0}\n')
    with pytest.raises(ConfigError, match=f"{re.escape(str(path))}:1: not a trajectory in Quartet's format"):
        report(files.root, None)
    assert not files.report.exists()


def test_a_config_of_another_version_is_refused_with_its_keys(files: RunFiles) -> None:
    files.config.write_text(files.config.read_text() + "gone: 1\n")
    with pytest.raises(ConfigError, match="gone: unknown key"):
        report(files.root, None)


def test_long_runs_are_reduced_and_values_that_are_no_numbers_are_gaps(files: RunFiles) -> None:
    curves = written(files)["/runs/tiny/metrics"]["curves"]
    assert curves["entropy"]["mean"] == [3.0, None, 3.0, 3.0]
    for step in range(STEPS + 1, 2 * POINTS + 1):
        files.append_metrics({"step": step, "reward_mean": float(step)})
    responses = written(files)
    reward = responses["/runs/tiny/metrics"]["curves"]["reward_mean"]
    assert len(reward["mean"]) == POINTS
    assert reward["mean"][-1] == 2 * POINTS - 0.5
    assert len(responses["/runs/tiny/steps"]["items"]) == SHOWN_STEPS


def test_the_file_loads_nothing_and_hostile_text_ends_no_script(files: RunFiles) -> None:
    report(files.root, None)
    text = files.report.read_text()
    assert HOSTILE not in text
    assert "<img src=x" not in text
    own = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.findall(r'(?:src|href)="(?!data:|#)', own)
    assert "default-src 'none'; script-src 'sha256-" in text.replace("&#x27;", "'")
