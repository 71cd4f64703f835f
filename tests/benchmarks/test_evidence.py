"""The evidence command: its experiments, its results on disk, and its tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from benchmarks import page
from benchmarks.evidence import __main__ as evidence
from benchmarks.evidence.experiments import (
    ALGORITHMS,
    Experiment,
    algorithm_runs,
    default_runs,
    initial_policies,
    trl_runs,
    variation_runs,
)
from benchmarks.evidence.runs import Result, ResultsFile, take
from benchmarks.evidence.scoring import Scores
from benchmarks.evidence.tables import algorithm_table, beside_table, default_table, kl_at, variation_table
from benchmarks.trl_settings import ppo_settings, rloo_settings


def result_of(experiment: Experiment, reward: float, kl: float = 2.0) -> Result:
    steps = experiment.steps
    curves = {
        "reward_mean": [reward * step / steps for step in range(1, steps + 1)],
        "score_mean": [reward] * steps,
        "kl_mean": [kl * step / steps for step in range(1, steps + 1)],
        "kl_coefficient": [0.05] * steps,
        "eos_rate": [1.0] * steps,
    }
    return Result(curves, Scores(2000, reward, reward, kl, 1.0, 20.0))


def test_every_algorithm_is_run_on_every_pair_of_seeds(tmp_path: Path) -> None:
    runs = algorithm_runs(tmp_path, ALGORITHMS, (1, 2, 3), (0, 1, 2), 100)
    assert len(runs) == 63
    assert len({each.name for each in runs}) == 63
    assert all(each.load().run.steps == 100 for each in runs)


def test_the_default_run_has_the_settings_of_the_config_as_it_is_shipped(tmp_path: Path) -> None:
    (run,) = default_runs(tmp_path, [1])
    shipped = Experiment("default", run.config, 1, 0, run.steps, (), tmp_path).load()
    assert run.load().algorithm == shipped.algorithm
    assert run.settings == ()


@pytest.mark.parametrize("name", ["ppo", "rloo"])
def test_both_sides_have_the_same_optimizer_schedule_and_clipping(name: str, tmp_path: Path) -> None:
    ours, *theirs = trl_runs(tmp_path, [name], [11], [0], 60)
    assert ours.side == "quartet"
    assert [each.side for each in theirs] == (["trl", "trl_eos"] if name == "ppo" else ["trl"])
    assert all(each.load().algorithm == ours.load().algorithm for each in theirs)
    config = ours.load()
    settings = (ppo_settings if name == "ppo" else rloo_settings)(config, "folder")
    assert (settings["adam_beta1"], settings["adam_beta2"]) == config.actor.optimizer.betas == (0.9, 0.999)
    assert settings["lr_scheduler_type"] == config.actor.schedule == "constant"
    assert settings["max_grad_norm"] == config.actor.optimizer.max_grad_norm
    if name == "ppo":
        # TRL's PPO has one learning rate, and clips no gradients.
        assert config.critic.learning_rate == config.actor.learning_rate
        assert config.critic.optimizer == config.actor.optimizer
        assert config.actor.optimizer.max_grad_norm == 0


def test_pairs_have_the_same_models_and_seed_and_no_two_pairs_do(tmp_path: Path) -> None:
    runs = trl_runs(tmp_path, ["ppo"], range(11, 15), [0, 1], 60)
    pairs = [(ours.model_seed, ours.run_seed) for ours in runs if ours.side == "quartet"]
    assert pairs == [(theirs.model_seed, theirs.run_seed) for theirs in runs if theirs.side == "trl"]
    assert len(set(pairs)) == 8


def test_a_finished_run_is_not_repeated_unless_its_settings_change(tmp_path: Path) -> None:
    (run,) = algorithm_runs(tmp_path, ["rloo"], [1], [0], 60)
    ResultsFile(tmp_path / "results.jsonl").add(run, result_of(run, 0.123456))
    kept = ResultsFile(tmp_path / "results.jsonl")
    (elsewhere,) = algorithm_runs(tmp_path / "another folder", ["rloo"], [1], [0], 60)
    taken = take(elsewhere, Path("no interpreter"), kept)
    assert taken.final == result_of(run, 0.123456).final
    assert taken.curves["score_mean"] == [0.12346] * 60
    assert kept.get(replace(run, settings=("algorithm.clip_ratio=0.3",))) is None
    assert kept.get(replace(run, model_seed=2)) is None


def test_a_result_that_a_kill_cut_off_is_dropped_and_the_others_are_kept(tmp_path: Path) -> None:
    first, second = algorithm_runs(tmp_path, ["rloo", "ppo"], [1], [0], 60)
    path = tmp_path / "results.jsonl"
    for run in (first, second):
        ResultsFile(path).add(run, result_of(run, 0.5))
    path.write_text(path.read_text()[:-20])
    kept = ResultsFile(path)
    assert kept.get(first) is not None
    assert kept.get(second) is None
    kept.add(second, result_of(second, 0.25))
    repeated = ResultsFile(path)
    assert repeated.get(first) == kept.get(first)
    assert take(second, Path("no interpreter"), repeated).final == result_of(second, 0.25).final


def test_kl_at_a_reward_is_interpolated_where_the_curve_passes_it() -> None:
    curves = {"reward_mean": [float(step) for step in range(30)], "kl_mean": [2.0 * step for step in range(30)]}
    # Means of ten steps: the reward of a window is its middle, and the KL twice that.
    assert kl_at(curves, 10.25) == pytest.approx(20.5)
    assert kl_at(curves, 26.0) is None


def test_kl_at_a_reward_does_not_depend_on_the_noise_of_the_reward() -> None:
    noise = np.random.default_rng(0)
    kl = [step / 10 for step in range(100)]
    curves = [{"reward_mean": [value + noise.normal(0, 1.5) for value in kl], "kl_mean": kl} for _ in range(200)]
    assert fmean(found for curve in curves if (found := kl_at(curve, 5.0)) is not None) == pytest.approx(5.0, abs=0.1)


def test_the_difference_beside_trl_is_that_of_pairs(tmp_path: Path) -> None:
    results = {}
    for run in trl_runs(tmp_path, ["ppo"], [11, 12], [0, 1], 60):
        # Quartet gains 0, 1, 1 and 2 on the pairs: 0.5 and 1.5 on average on the two models. TRL with the score at EOS gains 2.
        gain = {"quartet": run.model_seed - 11 + run.run_seed, "trl": 0, "trl_eos": 2}[run.side]
        results[run] = result_of(run, 1.0 + gain)
    row, at_eos = beside_table(results).splitlines()[-2:]
    assert row.startswith("| `ppo.yaml` | 4 | 1.00 ± 0.00 | 2.00 ± 1.30 | **1.00 ± 1.30** | 1.00 ± 6.35 |")
    assert at_eos.startswith(
        "| `ppo.yaml`, score at EOS | 4 | 3.00 ± 0.00 | 2.00 ± 1.30 | **-1.00 ± 1.30** | -1.00 ± 6.35 |"
    )


def test_tables_have_means_and_intervals(tmp_path: Path) -> None:
    runs = algorithm_runs(tmp_path, ["ppo", "rloo"], [1, 2], [0, 1], 40)
    initial = {run: result_of(run, 0.5) for run in initial_policies(tmp_path, [1, 2])}
    results = {run: result_of(run, run.model_seed + (0.25 if run.config.stem == "rloo" else 0.0)) for run in runs}
    rloo, ppo = algorithm_table(results, initial).splitlines()[2:]
    # 0.5, 0.5, 1.5, 1.5: standard deviation 0.577, t(3) 3.182; over the models 0.5 and 1.5: 0.707, t(1) 12.71.
    assert ppo.startswith("| `ppo.yaml` | 4 | 1.00 ± 0.92 | 1.00 ± 6.35 | – | 2.00 ± 0.00 |")
    assert rloo.startswith("| `rloo.yaml` | 4 | 1.25 ± 0.92 | 1.25 ± 6.35 | 0.25 ± 0.00 | 2.00 ± 0.00 |")
    # Model 1 does not pass a gain of 1, and neither passes 1.5: no mean over other models than in the next row.
    assert rloo.endswith("| 2 of 4 runs | 0 of 4 runs |")
    default = default_runs(tmp_path, [1])
    assert "| 1 |" in default_table({run: result_of(run, 2.0) for run in default}).splitlines()[-1]


def test_variations_are_compared_with_the_unchanged_config_on_the_same_models(tmp_path: Path) -> None:
    runs = variation_runs(tmp_path, [1, 2], 40)
    initial = {run: result_of(run, 0.0) for run in initial_policies(tmp_path, [1, 2])}
    results = {run: result_of(run, run.model_seed + (0.5 if run.settings else 0.0)) for run in runs}
    shipped, other = variation_table(results, initial).splitlines()[2:4]
    assert "| no change | 2 | 1.50 ± 6.35 | 0.00 ± 0.00 |" in shipped
    assert "| 2.00 ± 6.35 | 0.50 ± 0.00 |" in other


def test_the_page_is_written_with_the_files_of_sentences_and_not_with_other_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path | None] = []
    monkeypatch.setattr(evidence, "_prepare", lambda *_: None)
    monkeypatch.setattr(
        evidence, "_take_all", lambda experiments, *_: {run: result_of(run, run.model_seed / 10) for run in experiments}
    )
    monkeypatch.setattr(page, "write", lambda path, name, text: written.append(path))
    monkeypatch.setattr(evidence, "PAGE", tmp_path / "docs" / "learning.md")
    (tmp_path / "docs").mkdir()
    sentences = [
        "--folder",
        str(tmp_path),
        "--positive",
        "positive.txt",
        "--negative",
        "negative.txt",
        "--results",
        str(tmp_path / "none"),
    ]
    assert evidence.main(sentences) == 0
    assert evidence.main([*sentences, "--run-seeds", "5"]) == 0
    assert written == [tmp_path / "docs" / "learning.md", None]
    plots = {"learning-default.svg", "learning-algorithms.svg", "learning-trl.svg"}
    assert {path.name for path in (tmp_path / "docs").glob("*.svg")} == plots
    assert {path.name for path in tmp_path.glob("*.svg")} == plots


def test_missing_models_are_an_error_that_names_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evidence.main(["--folder", str(tmp_path), "--results", str(tmp_path / "none"), "--parts", "default"]) == 2
    assert "--positive positive.txt --negative negative.txt" in capsys.readouterr().err
