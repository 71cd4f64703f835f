"""The evidence command: its experiments, its results on disk, and its tables."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.evidence import __main__ as evidence
from benchmarks.evidence.experiments import (
    ALGORITHMS,
    Experiment,
    algorithm_runs,
    default_runs,
    trl_runs,
    variation_runs,
)
from benchmarks.evidence.runs import Result, read_result
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
    }
    return Result(experiment.digest, curves, Scores(2000, reward, reward, kl, 1.0, 20.0))


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
    ours, theirs = trl_runs(tmp_path, [name], [11], [0], 60)
    assert (ours.side, theirs.side) == ("quartet", "trl")
    assert ours.load().algorithm == theirs.load().algorithm
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


def test_a_result_with_other_settings_is_not_used(tmp_path: Path) -> None:
    (run,) = algorithm_runs(tmp_path, ["rloo"], [1], [0], 100)
    run.result.parent.mkdir()
    run.result.write_text(json.dumps(asdict(result_of(run, 1.0))))
    assert read_result(run) == result_of(run, 1.0)
    assert read_result(replace(run, settings=("algorithm.clip_ratio=0.3",))) is None
    (run.models / "policy").mkdir(parents=True)
    (run.models / "policy/model.safetensors").write_bytes(b"other weights")
    assert read_result(replace(run)) is None


def test_kl_at_a_reward_is_the_first_window_that_reaches_it() -> None:
    curves = {"reward_mean": [float(step) for step in range(30)], "kl_mean": [2.0 * step for step in range(30)]}
    # The mean of steps 6 to 15 is 10.5, the first that reaches 10.
    assert kl_at(curves, 10.0) == pytest.approx(21.0)
    assert kl_at(curves, 26.0) is None


def test_the_difference_beside_trl_is_that_of_pairs(tmp_path: Path) -> None:
    results = {}
    for run in trl_runs(tmp_path, ["ppo"], [11, 12], [0, 1], 60):
        # Quartet gains 0, 1, 1 and 2 on the pairs: 0.5 and 1.5 on average on the two models.
        gain = run.model_seed - 11 + run.run_seed if run.side == "quartet" else 0
        results[run] = result_of(run, 1.0 + gain)
    row = beside_table(results).splitlines()[-1]
    assert "| 4 | 1.00 ± 0.00 | 2.00 ± 1.30 | **1.00 ± 1.30** | 1.00 ± 6.35 |" in row


def test_tables_have_means_and_intervals(tmp_path: Path) -> None:
    runs = algorithm_runs(tmp_path, ["ppo"], [1, 2], [0, 1], 40)
    row = algorithm_table({run: result_of(run, float(run.model_seed)) for run in runs}).splitlines()[-1]
    # 1, 1, 2, 2: standard deviation 0.577, t(3) 3.182; over the models 1 and 2: 0.707, t(1) 12.71.
    assert "| 4 | 1.50 ± 0.92 | 1.50 ± 6.35 | 2.00 ± 0.00 |" in row
    default = default_runs(tmp_path, [1])
    assert "| 1 |" in default_table({run: result_of(run, 2.0) for run in default}).splitlines()[-1]


def test_variations_are_compared_with_the_shipped_config_on_the_same_models(tmp_path: Path) -> None:
    runs = variation_runs(tmp_path, [1, 2], 40)
    results = {run: result_of(run, run.model_seed + (0.5 if run.settings else 0.0)) for run in runs}
    shipped, other = variation_table(results).splitlines()[2:4]
    assert "| as shipped | 2 | 1.50 ± 6.35 | 0.00 ± 0.00 |" in shipped
    assert "| 2.00 ± 6.35 | 0.50 ± 0.00 |" in other


def test_missing_models_are_an_error_that_names_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evidence.main(["--folder", str(tmp_path), "--parts", "default"]) == 2
    assert "make evidence POSITIVE=positive.txt NEGATIVE=negative.txt" in capsys.readouterr().err
