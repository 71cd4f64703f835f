"""Updates happen once, in order, for one run, under the newest leader."""

from __future__ import annotations

import pytest

from quartet.contract.update import UpdateResult
from quartet.errors import ComputationFailed, FailedPrecondition
from quartet.services.update_log import UpdateLog


def applied(log: UpdateLog, step: int, run: str = "run", epoch: int = 1) -> UpdateResult:
    assert log.admit(run, step, epoch) is None
    return log.record(run, step, {"policy_loss": float(step)})


def test_each_step_increases_the_policy_version_by_one() -> None:
    log = UpdateLog()
    assert log.policy_version == 0
    for step in (1, 2, 3):
        assert applied(log, step) == UpdateResult(step, step, {"policy_loss": float(step)})
        assert log.policy_version == step


def test_a_repeated_step_returns_its_recorded_result() -> None:
    log = UpdateLog()
    applied(log, 1)
    second = applied(log, 2)
    assert log.admit("run", 2, 1) == second
    assert log.admit("run", 2, 7) == second
    assert log.policy_version == 2


@pytest.mark.parametrize("step", [0, 1, 4])
def test_any_other_step_is_refused(step: int) -> None:
    log = UpdateLog()
    applied(log, 1)
    applied(log, 2)
    with pytest.raises(FailedPrecondition, match=f"update of step {step}: this model is at step 2, the next is 3"):
        log.admit("run", step, 1)


def test_a_first_step_other_than_1_is_refused() -> None:
    with pytest.raises(FailedPrecondition, match="at step 0, the next is 1"):
        UpdateLog().admit("run", 2, 1)


@pytest.mark.parametrize("step", [1, 2])
def test_another_run_is_refused(step: int) -> None:
    log = UpdateLog()
    applied(log, 1)
    with pytest.raises(FailedPrecondition, match="run other: this model is at step 1 of run run"):
        log.admit("other", step, 1)


def test_a_failed_update_can_be_retried() -> None:
    log = UpdateLog()
    assert log.admit("run", 1, 1) is None
    assert log.admit("run", 1, 1) is None


def test_a_lower_leader_epoch_is_refused_from_then_on() -> None:
    log = UpdateLog()
    applied(log, 1, epoch=3)
    for step in (1, 2):
        with pytest.raises(FailedPrecondition, match="leader_epoch 2: an orchestrator of epoch 3 has taken over"):
            log.admit("run", step, 2)
    log.fence.check(4)
    with pytest.raises(FailedPrecondition, match="epoch 4 has taken over"):
        log.fence.check(3)
    applied(log, 2, epoch=4)


def test_after_an_interrupted_update_all_updates_are_refused() -> None:
    log = UpdateLog()
    applied(log, 1)

    def diverge() -> dict[str, float]:
        raise ComputationFailed("the policy loss is nan")

    with pytest.raises(ComputationFailed):
        log.once("run", 2, 1, diverge)
    with pytest.raises(FailedPrecondition, match="step 2 was interrupted"):
        log.once("run", 2, 1, dict)


def test_once_applies_an_update_once() -> None:
    log = UpdateLog()
    calls = []

    def apply() -> dict[str, float]:
        calls.append(1)
        return {"policy_loss": 1.0}

    assert log.once("run", 1, 1, apply) == log.once("run", 1, 1, apply)
    assert calls == [1]


def test_after_an_unforeseen_error_the_model_is_broken() -> None:
    log = UpdateLog()

    def out_of_memory() -> dict[str, float]:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        log.once("run", 1, 1, out_of_memory)
    with pytest.raises(FailedPrecondition, match="restart the service"):
        log.check_not_broken()


def test_an_update_that_failed_before_any_change_can_be_retried() -> None:
    log = UpdateLog()

    def absent() -> dict[str, float]:
        raise FailedPrecondition("experience of step 1: not in the buffer")

    with pytest.raises(FailedPrecondition):
        log.once("run", 1, 1, absent)
    assert log.once("run", 1, 1, dict).policy_version == 1
