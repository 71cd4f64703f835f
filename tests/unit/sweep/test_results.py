"""The table of a sweep, from files of runs."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import pytest

from quartet.cli.sweep.command import best_note, make_table
from quartet.errors import ConfigError
from quartet.launcher.sweep.grid import PlannedRun, parse_grid, plan_runs
from quartet.launcher.sweep.results import STOPPED, Direction, as_csv, as_json, is_finished, run_result, setting_results
from tests.unit.sweep.conftest import write_run


@pytest.fixture
def runs(config: Path, tmp_path: Path) -> list[PlannedRun]:
    """Two settings with two seeds each."""
    grid = parse_grid(["actor.learning_rate=1e-5,3e-5"], "2")
    return plan_runs(config, grid, tmp_path / "runs" / "my-sweep")


def test_a_setting_has_the_mean_of_the_last_tenth_of_steps_with_its_interval(runs: list[PlannedRun]) -> None:
    write_run(runs[0], [0.0] * 18 + [1.0, 3.0])
    write_run(runs[1], [9.0] * 18 + [3.0, 5.0])
    first, second = setting_results([run_result(run, None) for run in runs])
    reward = first.metrics["reward_mean"]
    assert reward.values == (2.0, 4.0)
    # Standard deviation sqrt(2), standard error 1, quantile of one degree of freedom 12.706205.
    assert reward.mean == 3.0
    assert reward.half_width == pytest.approx(12.706204736)
    assert first.metrics["kl_mean"].mean == pytest.approx(1.95)
    assert first.metrics["kl_mean"].half_width == pytest.approx(0.0)
    assert (first.best, second.best, second.metrics) == (True, False, {})
    assert (first.is_complete, second.is_complete) == (True, False)
    assert [each.state for each in second.runs] == ["waiting", "waiting"]


def test_only_finished_runs_count_and_the_others_have_their_state(runs: list[PlannedRun]) -> None:
    write_run(runs[0], [1.0] * 20)
    write_run(runs[1], [5.0] * 19)
    write_run(runs[2], [5.0] * 3)
    write_run(runs[3], [5.0] * 4)
    outcomes = [None, "actor: killed by SIGKILL", STOPPED, None]
    results = [run_result(run, outcome) for run, outcome in zip(runs, outcomes, strict=True)]
    assert [(each.state, each.step) for each in results] == [
        ("finished", 20),
        ("failed", 19),
        ("stopped", 3),
        ("unfinished", 4),
    ]
    first, second = setting_results(results)
    assert (first.metrics["reward_mean"].mean, first.metrics["reward_mean"].half_width) == (1.0, None)
    assert (first.count("finished"), first.count("failed"), second.metrics) == (1, 1, {})


def test_a_run_without_its_policy_has_not_finished(runs: list[PlannedRun]) -> None:
    files = write_run(runs[0], [1.0] * 20)
    assert is_finished(runs[0])
    files.remove_policy_step()
    assert not is_finished(runs[0])


def test_a_sweep_is_refused_if_a_run_has_already_taken_more_steps(runs: list[PlannedRun]) -> None:
    write_run(runs[0], [1.0] * 21)
    with pytest.raises(
        ConfigError, match=r"run\.steps is 20, but .* has already trained for 21 steps; set run.steps to at least 21"
    ):
        run_result(runs[0], None)


def test_the_best_setting_follows_the_metric_and_its_direction(runs: list[PlannedRun]) -> None:
    for run, reward, win_rate in zip(runs, (1.0, 1.0, 2.0, 2.0), (0.9, 0.7, 0.4, 0.6), strict=True):
        write_run(run, [reward] * 20, {"eval_judge_win_rate": win_rate})
    results = [run_result(run, None) for run in runs]

    def best(metric: str = "reward_mean", direction: Direction = "max") -> list[bool]:
        return [each.best for each in setting_results(results, metric, direction)]

    assert best() == [False, True]
    assert best("eval_judge_win_rate") == [True, False]
    assert best("reward_mean", "min") == [True, False]
    with pytest.raises(ConfigError, match=r"--metric entropy: .* they have eval_judge_win_rate, kl_mean, reward_mean"):
        best("entropy")


@pytest.mark.parametrize("outcome", ["actor: out of memory", STOPPED, None])
def test_a_setting_with_runs_that_have_not_finished_is_never_the_best(
    outcome: str | None, runs: list[PlannedRun]
) -> None:
    for run, reward, steps in zip(runs, (1.0, 1.0, 9.0, 9.0), (20, 20, 20, 5), strict=True):
        write_run(run, [reward] * steps)
    results = [*(run_result(run, None) for run in runs[:3]), run_result(runs[3], outcome)]
    settings = setting_results(results)
    assert [each.metrics["reward_mean"].mean for each in settings] == [1.0, 9.0]
    assert [each.best for each in settings] == [True, False]
    assert best_note(settings, "reward_mean") == (
        "1 of 2 settings cannot be the best yet: not all of their runs have finished"
    )
    assert not any(each.best for each in setting_results(results[2:]))


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_a_setting_without_the_metric_of_every_seed_is_never_the_best(
    value: float | None, runs: list[PlannedRun]
) -> None:
    rates = ({"eval_judge_win_rate": rate} for rate in (0.1, 0.2, 0.9))
    last = {} if value is None else {"eval_judge_win_rate": value}
    for run, evaluation in zip(runs, (*rates, last), strict=True):
        write_run(run, [1.0] * 20, evaluation)
    settings = setting_results([run_result(run, None) for run in runs], "eval_judge_win_rate")
    assert [each.best for each in settings] == [True, False]


@pytest.mark.parametrize("direction", ["max", "min"])
def test_of_settings_with_the_same_mean_the_first_of_the_grid_is_the_best(
    direction: Direction, runs: list[PlannedRun]
) -> None:
    for run in runs:
        write_run(run, [1.0] * 20)
    settings = setting_results([run_result(run, None) for run in runs], direction=direction)
    assert [each.best for each in settings] == [True, False]


@pytest.mark.parametrize(
    ("rewards", "note"),
    [
        ((1.0, 1.1, 9.0, 9.1), None),
        ((1.0, 3.0, 2.0, 4.0), "settings whose interval overlaps with that of the best: 1"),
    ],
)
def test_the_note_says_whether_intervals_overlap(
    rewards: tuple[float, ...], note: str | None, runs: list[PlannedRun]
) -> None:
    for run, reward in zip(runs, rewards, strict=True):
        write_run(run, [reward] * 20)
    assert best_note(setting_results([run_result(run, None) for run in runs]), "reward_mean") == note


def test_the_note_says_that_one_run_has_no_interval(runs: list[PlannedRun]) -> None:
    for run in runs[::2]:
        write_run(run, [1.0] * 20)
    note = best_note(setting_results([run_result(run, None) for run in runs[::2]]), "reward_mean")
    assert note is not None
    assert note.startswith("one run per setting gives no interval")


def test_the_table_says_how_many_runs_of_a_setting_failed(runs: list[PlannedRun]) -> None:
    write_run(runs[0], [1.0] * 20)
    results = setting_results(
        [run_result(run, outcome) for run, outcome in zip(runs, (None, "x", "y", "z"), strict=True)]
    )
    table = make_table(results, "reward_mean")
    cells = {str(column.header): list(column.cells) for column in table.columns}
    assert (cells["finished"], cells["failed"], cells[""]) == (["1 of 2", "0 of 2"], ["1", "2"], ["", ""])


def test_csv_and_json_have_the_numbers_of_the_table(runs: list[PlannedRun]) -> None:
    for run in runs[:2]:
        write_run(run, [1.0] * 20, {"eval_reward_greedy": float(run.seed)})
    results = setting_results([run_result(run, None) for run in runs])
    rows = list(csv.DictReader(io.StringIO(as_csv(results, "reward_mean"))))
    assert [row["actor.learning_rate"] for row in rows] == ["1e-5", "3e-5"]
    assert (rows[0]["reward_mean"], rows[0]["reward_mean_half_width"], rows[0]["best"]) == ("1.0", "0.0", "1")
    assert (rows[1]["reward_mean"], rows[1]["runs"], rows[1]["finished"]) == ("", "2", "0")
    content = json.loads(as_json(results, "reward_mean", "max"))
    assert content["settings"][0]["metrics"]["eval_reward_greedy"]["values"] == [0.0, 1.0]
    assert content["settings"][1]["runs"][0] == {
        "name": "learning_rate-3e-5--seed-0",
        "seed": 0,
        "state": "waiting",
        "step": 0,
        "error": "",
    }
