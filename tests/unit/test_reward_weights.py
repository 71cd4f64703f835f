"""Weights of an ensemble's parts: the config, the sums that the service returns, and the scores of the initial policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quartet.cli.checkpoint.fork import _copy_changes
from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.contract.trajectory import Outcome, Scores
from quartet.data.evaluation import PromptResponses, Response, rescored
from quartet.errors import ConfigError, MismatchError, ScorerFailed
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.algorithm.state import AlgorithmState
from quartet.services.orchestrator.rollout.scoring import check_weighted_sum

NAN = float("nan")


def config(reward: dict[str, Any], **sections: Any) -> Config:
    tree = {"data": {"prompts": "p.jsonl"}, "actor": {"model": "a"}, "reward": reward, **sections}
    return parse_config(tree, "test")


def ensemble(old: float, new: float, name: str = "new") -> dict[str, Any]:
    parts = [{"name": "old", "weight": old, "model": "r"}, {"name": name, "weight": new, "model": "r"}]
    return {"source": "ensemble", "parts": parts}


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (ensemble(0.0, 0.0), "every weight is 0"),
        (ensemble(1.0, NAN), "finite"),
        (ensemble(1.0, 0.0, "environment"), "the name environment is that of the environment's rewards"),
        ({"model": "r", "shadow_timeout_seconds": 5}, "shadow_timeout_seconds: not used with source model"),
    ],
)
def test_a_config_with_wrong_parts_is_refused(reward: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(reward)


def scores(total: list[float], **parts: list[float]) -> Scores:
    outcomes = tuple(Outcome.REFUSED if np.isnan(value) else Outcome.OK for value in total)
    return Scores(np.float32(total), {name: np.float32(values) for name, values in parts.items()}, outcomes)


def test_a_score_is_the_sum_of_its_parts_by_the_weights_of_the_request() -> None:
    weights = {"old": 0.5, "new": 0.0}
    check_weighted_sum(scores([1.0, NAN, 0.0], old=[2.0, NAN, NAN], new=[9.0, 9.0, NAN]), weights)
    check_weighted_sum(scores([7.0]), {})
    for wrong in (scores([10.0], old=[2.0], new=[9.0]), scores([1.0]), scores([0.0], old=[2.0], new=[0.0])):
        with pytest.raises(MismatchError, match="not the sum of its parts"):
            check_weighted_sum(wrong, weights)


def responses(**parts: float) -> dict[int, PromptResponses]:
    response = Response("text", 1.0, 3, True, 0.0, parts)
    return {4: PromptResponses("prompt", response, response)}


def test_the_initial_policys_scores_follow_the_weights() -> None:
    weights = {"old": 0.0, "new": 2.0}
    (each,) = rescored(responses(old=1.0, new=0.25, environment=10.0), weights, ()).values()
    assert (each.greedy.score, each.sampled.score) == (10.5, 10.5)
    (each,) = rescored(responses(new=0.25), weights, ()).values()
    assert each.greedy.score == 0.5
    (each,) = rescored(responses(old=1.0), {"old": 1.0, "new": 2.0}, ("new",)).values()
    assert each.greedy.score == 1.0


def test_a_missing_score_of_the_initial_policy_is_an_error_and_no_number() -> None:
    with pytest.raises(ScorerFailed, match=r"^reward\.parts\.new: has no score .* to prompt 5"):
        rescored(responses(old=1.0), {"old": 0.0, "new": 2.0}, ("old",))


@pytest.mark.parametrize("normalize", ["running", "initial"])
def test_score_statistics_start_anew_at_a_switch_also_after_a_restart(normalize: str) -> None:
    settings = config(ensemble(1.0, 0.0), algorithm={"score": {"normalize": normalize}})
    metrics = {"kl_mean": 0.1, "kl_coefficient": 0.05, "reward_old_weight": 1.0, "reward_new_weight": 0.0}
    state = AlgorithmState(settings)
    state.commit({"step": 1, **metrics}, [1.0, 3.0])
    state.commit({"step": 2, **metrics}, [1.0, 3.0])
    restored = AlgorithmState(settings)
    restored.restore(2, state.state(), [{"step": 1, **metrics}, {"step": 2, **metrics}])
    for each in (state, restored):
        same = each.moments([100.0, 300.0], {"old": 1.0, "new": 0.0})
        switched = each.moments([100.0, 300.0], {"old": 0.0, "new": 1.0})
        assert same is not None
        assert switched is not None
        assert same.mean < 200
        assert switched.mean == pytest.approx(200)


@pytest.mark.parametrize("changes_reward", [False, True])
def test_a_fork_with_another_reward_starts_from_the_weights_of_its_config(changes_reward: bool, tmp_path: Path) -> None:
    old, new = RunFiles(tmp_path / "old"), RunFiles(tmp_path / "new")
    for files in (old, new):
        files.root.mkdir()
    line = {"before": 1.0, "after": 0.0, "step": 3, "user": "me", "at": 1.0}
    names = ["reward.parts.old.weight", "reward.parts.new.weight", "kl_coefficient"]
    old.append_changes([{**line, "setting": name} for name in names])
    before = config(ensemble(1.0, 0.0))
    _copy_changes(before, config(ensemble(1.0, 0.5)) if changes_reward else before, old, new, 3)
    expected = ["kl_coefficient"] if changes_reward else names
    assert [change["setting"] for change in new.read_changes()] == expected
