"""Metrics over the API: of one run and several runs, all and selected metrics, and many steps."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from quartet.run_directory.run_files import RunFiles
from quartet.telemetry.step_metrics import METRICS
from tests.gateway.conftest import STEPS, write_metrics
from tests.gateway.serving import Gateway, commit, create_run, serving
from tests.training.runs import Run

NUM_STEPS = 100_000
MAX_SECONDS = 0.4
"""Maximum response time. It is generous, because other tests run at the same time; see ``benchmarks.gateway_metrics``."""


def test_all_metrics_match_the_file(run_gateway: Gateway, finished_run: Run) -> None:
    result = run_gateway.client.get("/runs/finished/metrics").json()
    assert (result["run"], result["first"], result["last"], result["bucket"]) == ("finished", 1, STEPS, 1)
    assert set(result["curves"]) == {name for row in finished_run.metrics for name in row} - {"step"}
    for name, curve in result["curves"].items():
        assert curve["steps"] == [1, 2, 3]
        assert curve["mean"] == curve["low"] == curve["high"] == [row.get(name) for row in finished_run.metrics]


def test_the_dashboard_gets_the_definitions_with_those_of_charts_first(run_gateway: Gateway, finished_run: Run) -> None:
    rows = run_gateway.client.get("/metric-definitions").json()
    assert rows[0] == asdict(METRICS["reward_mean"])
    assert [bool(row["chart"]) for row in rows] == sorted((bool(row["chart"]) for row in rows), reverse=True)
    assert {row["name"] for row in rows} == METRICS.keys()


def test_names_and_steps_are_selected_and_new_steps_are_visible_at_once(tmp_path: Path) -> None:
    files = create_run(tmp_path, steps=10)
    with serving(tmp_path) as gateway:
        for query in ("names=kl_mean,reward_mean", "names=kl_mean&names=reward_mean"):
            result = gateway.client.get(f"/runs/some/metrics?{query}&first=3&last=6&points=2").json()
            assert list(result["curves"]) == ["kl_mean", "reward_mean"]
            assert (result["first"], result["last"], result["bucket"]) == (3, 6, 2)
            assert result["curves"]["reward_mean"] == {
                "steps": [4, 6],
                "mean": [1.75, 2.75],
                "low": [1.5, 2.5],
                "high": [2.0, 3.0],
            }
        commit(files, 11)
        assert gateway.client.get("/runs/some/metrics?first=11").json()["curves"]["reward_mean"]["mean"] == [5.5]


def test_nan_and_infinity_are_null(tmp_path: Path) -> None:
    files = create_run(tmp_path, steps=1)
    commit(files, 2, kl_mean=float("nan"), value_loss=float("inf"))
    with serving(tmp_path) as gateway:
        curves = gateway.client.get("/runs/some/metrics").json()["curves"]
        assert curves["kl_mean"]["mean"] == [1.0, None]
        assert "value_loss" not in curves
        assert gateway.client.get("/runs/some/metrics?names=value_loss").status_code == 422
        assert gateway.client.get("/runs/some/steps/2").json()["metrics"]["kl_mean"] is None


def test_several_runs_are_returned_in_the_requested_order(tmp_path: Path) -> None:
    commit(create_run(tmp_path, "one", steps=2), 3, entropy=1.5)
    create_run(tmp_path, "two", steps=5)
    create_run(tmp_path, "new")
    with serving(tmp_path) as gateway:
        result = gateway.client.get("/metrics?runs=two,one,new&names=reward_mean,entropy").json()
        assert [item["run"] for item in result] == ["two", "one", "new"]
        assert [item["last"] for item in result] == [5, 3, 0]
        assert result[0]["curves"]["entropy"]["mean"] == [None] * 5
        assert result[1]["curves"]["entropy"]["mean"] == [None, None, 1.5]
        assert result[2]["curves"]["reward_mean"]["steps"] == []
        too_much = gateway.client.get(
            "/metrics", params={"runs": "one", "names": ",".join(f"m{n}" for n in range(100)), "points": 5000}
        )
        assert too_much.status_code == 422
        assert too_much.json()["fields"][0]["field"] == "query.points"


@pytest.fixture
def long_run(tmp_path: Path) -> RunFiles:
    files = create_run(tmp_path)
    write_metrics(files, NUM_STEPS, names=10)
    return files


@pytest.mark.slow
def test_a_run_with_many_steps_is_read_quickly(tmp_path: Path, long_run: RunFiles) -> None:
    with serving(tmp_path) as gateway:
        seconds = []
        for _ in range(5):
            started = time.perf_counter()
            response = gateway.client.get("/runs/some/metrics?points=1000")
            seconds.append(time.perf_counter() - started)
            assert [len(curve["steps"]) for curve in response.json()["curves"].values()] == [1000] * 10
        assert statistics.median(seconds[1:]) < MAX_SECONDS
        # Only appended lines are read.
        with long_run.metrics.open("a") as file:
            file.write(f'{{"step": {NUM_STEPS + 1}, "metric_0": 0.5}}\n')
        started = time.perf_counter()
        result = gateway.client.get(f"/runs/some/metrics?first={NUM_STEPS + 1}&names=metric_0,metric_1").json()
        assert time.perf_counter() - started < MAX_SECONDS
        assert result["curves"]["metric_0"]["mean"] == [0.5]
        assert result["curves"]["metric_1"]["mean"] == [None]
