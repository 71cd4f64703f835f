"""Actions of the guards, and the treatment of NaN losses."""

from __future__ import annotations

import json
from typing import Any

import pytest
import safetensors.torch

from quartet.contract.control import RunState
from quartet.demo.toy_task import ToyTask
from quartet.ppo import policy_losses
from tests.training.conftest import MakeConfig
from tests.training.runs import active_run, json_lines, run_to_completion, wait_for

# With this learning rate, one step raises the KL far above the bound.
HIGH_KL = {"actor": {"learning_rate": 10.0}, "guards": {"window_steps": 2, "kl_runaway": {"above": 1.0}}}


def high_kl(action: str, **changes: Any) -> dict[str, Any]:
    return {**HIGH_KL, "guards": {"window_steps": 2, "kl_runaway": {"above": 1.0, "action": action}}, **changes}


def test_a_guard_warning_is_recorded_and_the_run_continues(make: MakeConfig) -> None:
    run = run_to_completion(make(**high_kl("warn", run={"steps": 4})))
    assert run.progress.state is RunState.FINISHED
    alerts = {alert.guard: alert for alert in run.progress.alerts}
    assert alerts["kl_runaway"].action == "warn"
    recorded = json_lines(run.files.alerts)
    assert [alert["guard"] for alert in recorded] == [alert.guard for alert in run.progress.alerts]
    assert "nats per response" in alerts["kl_runaway"].evidence
    assert "kl_coefficient" in alerts["kl_runaway"].remedy


def test_a_guard_stop_saves_the_policy_and_gives_its_reason(make: MakeConfig) -> None:
    with active_run(make(**high_kl("stop", run={"steps": 50}))) as running:
        run = running.finish()
    assert run.code == 1
    assert run.progress.error.startswith("stopped by guard kl_runaway after step ")
    assert run.progress.error.endswith(f"the policy is saved in {run.files.policy}")
    assert len(run.metrics) < 50
    assert safetensors.torch.load_file(run.files.policy / "model.safetensors")


def test_a_guard_pause_stops_the_run_until_it_is_resumed(make: MakeConfig) -> None:
    with active_run(make(**high_kl("pause", run={"steps": 4}))) as running:
        wait_for(running, lambda: running.board.current().state is RunState.PAUSED)
        paused_at = running.board.current().step
        assert [alert.action for alert in running.board.current().alerts if alert.guard == "kl_runaway"] == ["pause"]
        running.thread.join(0.3)
        assert running.board.current().step == paused_at < 4, "the paused run continued"
        while running.thread.is_alive():
            running.control.resume()
            running.thread.join(0.05)
        run = running.finish()
    assert run.code == 0
    assert [step["step"] for step in run.metrics] == [1, 2, 3, 4]


def test_a_paused_run_can_be_stopped_and_saves_its_policy(make: MakeConfig) -> None:
    with active_run(make(run={"steps": 100000})) as running:
        wait_for(running, lambda: running.board.current().step >= 1)
        running.control.pause()
        wait_for(running, lambda: running.board.current().state is RunState.PAUSED)
        running.control.stop()
        run = running.finish()
    assert (run.code, run.progress.state) == (0, RunState.STOPPED)
    assert (run.files.policy / "model.safetensors").is_file()


EXPLODING = {
    "actor": {"learning_rate": 1e30, "optimizer": {"max_grad_norm": 0.0}},
    "run": {"steps": 3},
}
"""The first update overflows float32, so that a later loss is not finite."""


def test_a_nan_stops_the_run_with_its_cause(make: MakeConfig) -> None:
    with active_run(make(**EXPLODING)) as running:
        run = running.finish()
    assert run.code == 1
    assert "not finite" in run.progress.error or "expected finite numbers" in run.progress.error


@pytest.fixture
def nan_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every second policy loss NaN, like an overflow in half precision."""
    real, calls = policy_losses.clipped, [0]

    def loss(*arguments: Any, **options: Any) -> Any:
        result = real(*arguments, **options)
        calls[0] += 1
        return type(result)(result.loss * float("nan"), *tuple_of(result)[1:]) if calls[0] % 2 == 0 else result

    monkeypatch.setattr(policy_losses, "clipped", loss)


def tuple_of(result: Any) -> tuple[Any, ...]:
    return tuple(getattr(result, name) for name in type(result).__dataclass_fields__)


@pytest.mark.usefixtures("nan_losses")
def test_a_nan_loss_is_skipped_and_counted_if_configured(make: MakeConfig, toy_task: ToyTask) -> None:
    run = run_to_completion(make(algorithm={"non_finite": "skip", "num_epochs": 4}))
    for step in run.metrics:
        assert (step["optimizer_steps_actor"], step["skipped_steps_actor"]) == (2, 2)
        assert json.dumps(step, allow_nan=False)
    weights = safetensors.torch.load_file(run.files.policy / "model.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())
    assert [alert.guard for alert in run.progress.alerts] == ["not_finite"]


@pytest.mark.usefixtures("nan_losses")
def test_a_nan_loss_stops_the_run_by_default(make: MakeConfig) -> None:
    with active_run(make()) as running:
        run = running.finish()
    assert run.code == 1
    assert "expected finite numbers" in run.progress.error
    assert not run.files.policy.exists(), "the weights of a partial step were saved"
