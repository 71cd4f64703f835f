"""The Prometheus metrics of a run: the help of each step metric is its meaning in the table."""

from __future__ import annotations

from quartet.config.loading import parse_config
from quartet.services.orchestrator.control.progress import ProgressBoard
from quartet.services.orchestrator.telemetry.run_metrics import RunMetrics


def test_the_help_of_a_step_metric_is_its_meaning_and_unit() -> None:
    tree = {"data": {"prompts": "p"}, "actor": {"model": "a"}, "reward": {"model": "r"}}
    board = ProgressBoard("run", 9)
    metrics = RunMetrics(parse_config(tree, "test"), board, lambda: 0)
    board.commit(
        1, {"step": 1, "kl_mean": 0.5, "reward_help_mean": 1.0, "logged_x_seconds": 2.0, "of_an_estimator": 3.0}
    )
    families = {family.name: family.documentation for family in metrics.collect()}
    assert families["quartet_kl_mean"] == "KL to the reference. Unit: nats per response. Of the last committed step."
    assert families["quartet_reward_help_mean"].startswith(
        "Mean unweighted score of the ensemble part help. Unit: reward."
    )
    assert "logged as x_seconds" in families["quartet_logged_x_seconds"]
    assert families["quartet_of_an_estimator"] == "of_an_estimator of the last committed step."
