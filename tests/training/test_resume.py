"""Crashed runs resume bit-identically, after crashes at any point and with lost or damaged files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from quartet.buffer.connection import Redis
from quartet.config.root import Config
from quartet.contract.control import RunState
from quartet.demo.toy_task import ToyTask
from quartet.services.orchestrator.step import StepTransaction
from quartet.services.orchestrator.training_run import AlertHandler, TrainingLoop
from tests.training.conftest import MakeConfig
from tests.training.runs import (
    ActiveRun,
    Run,
    active_run,
    assert_same,
    orchestrator,
    run_to_completion,
    services,
    step_metrics,
    wait_for,
    weights,
)

STEPS = 6
KINDS: dict[str, dict[str, Any]] = {
    "ppo": {
        "algorithm": {
            "score": {"normalize": "running"},
            "value_pretraining_steps": 1,
            "length_adaptive_alpha": 0.5,
            "entropy_controller": {"kind": "adaptive", "target": 3.0, "step_size": 0.02},
            "kl_log_probs": "trainer",
            "kl_loss": "k3",
            "kl_controller": {"kind": "adaptive", "target": 0.01, "horizon": 100},
        },
        "actor": {"schedule": "cosine", "warmup_steps": 2},
    },
    "lora": {
        "algorithm": {"estimator": "rloo"},
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2},
        "actor": {
            "lora": {"rank": 2, "rslora": True, "dropout": 0.2, "learning_rate_ratio": 4.0},
            "learning_rate": 0.01,
        },
    },
    "muon": {
        "actor": {"optimizer": {"kind": "muon"}, "lora": {"rank": 2, "dora": True, "dropout": 0.2}},
        "critic": {"optimizer": {"kind": "muon"}, "dtype": "bfloat16"},
    },
    "bfloat16": {"actor": {"dtype": "bfloat16"}, "critic": {"dtype": "bfloat16"}},
}


class Crash(Exception):
    """Exception that ends the training like a crash, without any cleanup."""


def changes(kind: str, toy_task: ToyTask) -> dict[str, Any]:
    common = {"run": {"steps": STEPS}, "checkpoint": {"every_steps": 2, "keep_last": 2}}
    evaluation = {"data": {"validation": str(toy_task.prompts)}, "evaluation": {"every_steps": 3, "max_prompts": 3}}
    return {**common, **(evaluation if kind == "ppo" else {}), **KINDS[kind]}


@pytest.fixture(scope="module")
def uninterrupted(make: MakeConfig, toy_task: ToyTask) -> Callable[[str], Run]:
    runs: dict[str, Run] = {}

    def run(kind: str) -> Run:
        if kind not in runs:
            runs[kind] = run_to_completion(make(**changes(kind, toy_task)))
        return runs[kind]

    return run


def crash_run(config: Config, crash_point: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train until a crash in ``step``, at the point ``crash_point``."""
    owner, method = {
        "generate": (StepTransaction, "_prepare"),
        "sealed": (StepTransaction, "_update"),
        "updated": (StepTransaction, "_commit"),
        "committed": (AlertHandler, "apply"),
        "checkpoint": (TrainingLoop, "_checkpoint_if_due"),
    }[crash_point]
    real = getattr(owner, method)

    def crash(self: Any, *arguments: Any, **options: Any) -> Any:
        now = arguments[0] if owner is StepTransaction else self._board.current().step
        if now == step:
            raise Crash(crash_point)
        return real(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, crash)
        with orchestrator(config) if config.services.actor.address else active_run(config) as active:
            result = active.finish()
    assert result.code == 1
    assert not result.files.policy.exists()


def run_with_crashes(
    config: Config,
    crashes: Iterable[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    before_the_last: Callable[[], object] = lambda: None,
) -> Run:
    """Crash at each (point, step) in turn, with services that stay up, then finish the run with new services."""
    with services(config) as addressed:
        for crash_point, step in crashes:
            crash_run(addressed, crash_point, step, monkeypatch)
    before_the_last()
    return run_to_completion(config)


@pytest.mark.parametrize(
    ("kind", "crashes"),
    [
        (
            "ppo",
            [*((point, 4) for point in ("generate", "sealed", "updated", "committed", "checkpoint")), ("sealed", 5)],
        ),
        # tests/services/test_lora.py and tests/unit/models/test_lora_files.py restore adapters.
        pytest.param("lora", [("updated", 4), ("committed", 5)], marks=pytest.mark.slow),
        pytest.param("muon", [("updated", 4), ("committed", 5)], marks=pytest.mark.slow),
        pytest.param("bfloat16", [("updated", 4), ("committed", 5)], marks=pytest.mark.slow),
    ],
    ids=KINDS,
)
def test_a_run_that_crashes_at_every_point_resumes_bit_identically(
    kind: str,
    crashes: list[tuple[str, int]],
    make: MakeConfig,
    toy_task: ToyTask,
    uninterrupted: Callable[[str], Run],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The services stay up until the last crash, and apply only the missing updates. New ones finish the run."""
    run = run_with_crashes(make(**changes(kind, toy_task)), crashes, monkeypatch)
    assert_same(run, uninterrupted(kind))
    assert any(note.startswith("resumed after step ") for note in run.progress.notes)


def delete_run_data(redis: Redis, run: str) -> None:
    # At once: a recovery that starts between two deletions would find what is deleted next.
    if keys := list(redis.scan_iter(match=f"quartet:{run}*")):
        redis.delete(*keys)


def test_a_damaged_checkpoint_is_skipped_and_lost_steps_are_recomputed(
    make: MakeConfig,
    toy_task: ToyTask,
    uninterrupted: Callable[[str], Run],
    monkeypatch: pytest.MonkeyPatch,
    redis_client: Redis,
) -> None:
    config = make(**changes("ppo", toy_task))
    crash_run(config, "updated", 6, monkeypatch)
    delete_run_data(redis_client, config.run.name)
    file = config.run_directory / "checkpoints" / "step-000004" / "actor" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    run = run_to_completion(config)
    assert_same(run, uninterrupted("ppo"))
    assert any("steps 3 to 5 are recomputed from the checkpoint of step 2" in note for note in run.progress.notes)


def test_a_stopped_run_resumes_where_it_stopped(
    make: MakeConfig, toy_task: ToyTask, uninterrupted: Callable[[str], Run]
) -> None:
    config = make(**changes("ppo", toy_task))
    with active_run(config) as active:
        wait_for(active, lambda: active.board.current().step >= 3)
        active.control.stop()
        first = active.finish()
    assert first.progress.state in (RunState.STOPPED, RunState.FINISHED)
    run = run_to_completion(config)
    assert step_metrics(run) == step_metrics(uninterrupted("ppo"))
    assert weights(run) == weights(uninterrupted("ppo"))


def test_a_second_orchestrator_is_refused_while_the_lease_is_held(make: MakeConfig) -> None:
    config = make(run={"steps": 100000})
    with active_run(config) as first:
        wait_for(first, lambda: first.board.current().step >= 1)
        with active_run(config) as second:
            refused = second.finish()
        assert refused.code == 1
        assert "another orchestrator is its leader" in refused.progress.error
        assert_advances(first)


def assert_advances(active: ActiveRun) -> None:
    step = active.board.current().step
    wait_for(active, lambda: active.board.current().step > step)
