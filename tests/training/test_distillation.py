"""Runs in which a student learns from a teacher, without a reward service: services, records, and the same bits after faults."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from quartet.config.root import Config
from quartet.contract.status import Role, ServiceStatus
from quartet.demo.toy_task import ToyTask
from quartet.errors import MismatchError
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.handshake import check_agreement
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, active_run, assert_same, json_lines, run_to_completion
from tests.training.teachers import make_teacher
from tests.training.test_recovery import run_with_lost_services

STEPS = 4
DISTILLATION: dict[str, Any] = {
    "run": {"steps": STEPS},
    "algorithm": {"estimator": "reinforce", "kl_coefficient": 0.0, "distillation": {"coefficient": 1.0}},
    "reward": {"source": "none", "model": None},
    "checkpoint": {"every_steps": 2},
    "telemetry": {"tokens_every_steps": 1},
    "recovery": {"backoff_seconds": 0.01},
}


@pytest.fixture(scope="module")
def teacher(toy_task: ToyTask, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a teacher: the student with other weights."""
    return str(make_teacher(toy_task.policy, tmp_path_factory.mktemp("teacher")))


@pytest.fixture(scope="module")
def distilled(make: MakeConfig, teacher: str) -> Config:
    return make(**DISTILLATION, reference={"model": teacher})


@pytest.fixture(scope="module")
def finished(distilled: Config) -> Run:
    return run_to_completion(distilled)


def test_a_run_without_a_reward_records_no_scores(finished: Run) -> None:
    assert [step["step"] for step in finished.metrics] == list(range(1, STEPS + 1))
    for number, step in enumerate(finished.metrics, 1):
        assert not [name for name in step if "reward" in name or "score_mean" in name or name == "advantage_std"]
        assert step["teacher_kl"] > 0
        rows = finished.trajectories(number)
        assert all(row["score"] is None for row in rows)
        assert step["kl_mean"] == pytest.approx(math.fsum(row["kl"] for row in rows) / len(rows), rel=1e-5)
        tokens = [finished.files.read_tokens(number, index) for index in range(len(rows))]
        for each in tokens:
            assert each is not None
            np.testing.assert_allclose(each.advantages, each.reference_log_probs - each.log_probs, atol=1e-6)
    assert not finished.progress.alerts


def test_a_run_that_loses_services_is_bit_identical(
    make: MakeConfig, teacher: str, finished: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {(2, "generate"): Role.REFERENCE, (3, "update"): Role.ACTOR}
    config = make(**DISTILLATION, reference={"model": teacher})
    assert_same(run_with_lost_services(config, losses, monkeypatch), finished)


def test_an_adapter_is_trained_against_a_separate_teacher(make: MakeConfig, teacher: str, finished: Run) -> None:
    lora = {"lora": {"rank": 2}, "learning_rate": 0.01}
    run = run_to_completion(make(**DISTILLATION, reference={"model": teacher}, actor=lora))
    assert run.metrics[0]["teacher_kl"] == pytest.approx(finished.metrics[0]["teacher_kl"], rel=1e-4)
    assert run.metrics[-1]["teacher_kl"] != finished.metrics[-1]["teacher_kl"]


def test_a_reward_and_a_critic_may_be_added(make: MakeConfig, teacher: str, toy_task: ToyTask) -> None:
    changes = {**DISTILLATION, "run": {"steps": 2}, "reward": {"model": str(toy_task.reward)}}
    changes["algorithm"] = {**DISTILLATION["algorithm"], "estimator": "gae"}
    run = run_to_completion(make(**changes, reference={"model": teacher}))
    assert {"teacher_kl", "reward_mean", "explained_variance"} <= run.metrics[-1].keys()


def test_evaluations_report_the_kl_and_no_scores(make: MakeConfig, teacher: str, toy_task: ToyTask) -> None:
    changes = {**DISTILLATION, "run": {"steps": 1}, "data": {"validation": str(toy_task.prompts)}}
    config = make(**changes, reference={"model": teacher}, evaluation={"every_steps": 1, "max_prompts": 3})
    run = run_to_completion(config)
    files = RunFiles(config.run_directory)
    for summary in json_lines(files.evaluation_summaries):
        metrics = {"eval_kl", "eval_tokens_greedy", "eval_tokens_sampled", "eval_eos_rate"}
        assert summary.keys() == {"step", "policy_version", *metrics}
    assert [row["score_sampled"] for row in json_lines(files.evaluations / "step-000001.jsonl")] == [None] * 3
    assert run.code == 0


def test_the_kl_coefficient_is_no_live_setting(distilled: Config, make: MakeConfig, teacher: str) -> None:
    with active_run(make(**DISTILLATION, reference={"model": teacher})) as running:
        run = running.finish()
        assert run.code == 0
        assert [setting.name for setting in running.live_settings.settings()] == ["actor.learning_rate"]


def status(role: Role, size: int, fingerprint: bytes = b"same") -> ServiceStatus:
    return ServiceStatus(role, parameters=1, vocabulary_size=size, tokenizer_fingerprint=fingerprint)


def test_a_teacher_may_have_a_padded_vocabulary_and_no_other_or_smaller_one() -> None:
    actor = status(Role.ACTOR, 1000)
    check_agreement({Role.ACTOR: actor, Role.REFERENCE: status(Role.REFERENCE, 1024)}, "run", False)
    with pytest.raises(MismatchError, match=r"reference\.model .*embeds 992 token ids.*resize the reference model's"):
        check_agreement({Role.ACTOR: actor, Role.REFERENCE: status(Role.REFERENCE, 992)}, "run", False)
    with pytest.raises(MismatchError, match=r"reference\.model .*its vocabulary .* is not that of actor\.model"):
        check_agreement({Role.ACTOR: actor, Role.REFERENCE: status(Role.REFERENCE, 1000, b"other")}, "run", False)
