"""Runs of a mixture of experts with the engine's experts in the actor's passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from quartet.demo.toy_task import ToyTask
from quartet.models.forward.router_replay import _TopK
from quartet.models.generation.decode_slots import DecodeSlots
from quartet.models.weights.tokenizer import load_tokenizer
from quartet.services.orchestrator.rollout.collector import CollectedStep
from tests.training.conftest import MakeConfig
from tests.training.generator_runs import run_with_generators
from tests.training.runs import Run, active_run, assert_same, run_to_completion
from tests.training.test_resume import crash_run
from tests.unit.models import tiny

EXPERTS, TOP_K, LAYERS = 8, 2, 2
STEPS = 3


@pytest.fixture(scope="module")
def mixture(toy_task: ToyTask, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE with the tokenizer of the toy task."""
    tokenizer = load_tokenizer(str(toy_task.policy))
    config = tiny.config(
        "qwen3_moe", vocab_size=len(tokenizer), num_experts=EXPERTS, eos_token_id=tokenizer.eos_token_id
    )
    torch.manual_seed(0)
    folder = tiny.saved(transformers.AutoModelForCausalLM.from_config(config), tmp_path_factory.mktemp("mixture"))
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def settings(mixture: Path) -> dict[str, Any]:
    return {
        "run": {"steps": STEPS},
        "actor": {"model": str(mixture), "learning_rate": 1e-3},
        "algorithm": {"kl_log_probs": "trainer"},
        "checkpoint": {"every_steps": 1},
        "rollout": {"router_replay": True},
        "recovery": {"backoff_seconds": 0.01},
    }


@pytest.fixture(scope="module")
def uninterrupted(make: MakeConfig, settings: dict[str, Any]) -> Run:
    return run_to_completion(make(**settings))


def test_every_trajectory_has_the_experts_of_its_tokens(
    make: MakeConfig, settings: dict[str, Any], collected: list[CollectedStep], uninterrupted: Run
) -> None:
    run = run_to_completion(make(**settings))
    assert_same(run, uninterrupted)
    for step in collected:
        for item in step.scored:
            experts, trajectory = item.trajectory.routed_experts, item.trajectory
            assert experts is not None
            assert experts.shape == (len(trajectory.prompt_ids) + len(trajectory.response_ids) - 1, LAYERS, TOP_K)
            assert len(np.unique(experts)) > TOP_K
    assert all(metrics["rollout_mismatch_kl"] < 1e-6 for metrics in run.metrics)


@pytest.fixture
def other_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine use the experts after those that its routers prefer: a strong form of other rounding."""
    recording, choose = DecodeSlots._recording, _TopK.__torch_function__

    def choose_others(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = choose(self, func, types, args, kwargs)
        if func is not torch.topk or self._experts is not None:
            return result
        indices = self.indices[-1] = (result[1] + 1) % EXPERTS
        return torch.return_types.topk((args[0].gather(-1, indices), indices))

    @contextmanager
    def with_others(self: DecodeSlots) -> Iterator[Any]:
        with recording(self) as last, monkeypatch.context() as patch:
            if last is not None:
                patch.setattr(_TopK, "__torch_function__", choose_others)
            yield last

    monkeypatch.setattr(DecodeSlots, "_recording", with_others)


@pytest.mark.usefixtures("other_experts")
def test_the_actor_scores_and_trains_with_the_experts_of_the_engine(
    make: MakeConfig, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_to_completion(make(**settings))
    assert run.code == 0, run.progress.error
    assert all(metrics["rollout_mismatch_kl"] < 1e-6 for metrics in run.metrics)

    @contextmanager
    def nothing(*_: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr("quartet.models.training.updates.replayed_routing", nothing)
    without = run_to_completion(make(**settings))
    assert all(metrics["rollout_mismatch_kl"] > 1e-3 for metrics in without.metrics)


def test_a_run_of_a_killed_process_continues_with_the_same_bits(
    make: MakeConfig, settings: dict[str, Any], uninterrupted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(**settings)
    crash_run(config, "sealed", 3, monkeypatch)
    assert_same(run_to_completion(config), uninterrupted)


@pytest.mark.usefixtures("other_experts")
def test_generators_are_verified_with_the_experts_that_they_report(make: MakeConfig, settings: dict[str, Any]) -> None:
    """The check of the first trajectory of a generator would otherwise take other experts for other weights."""
    run = run_with_generators(make(**settings), 1)
    assert run.code == 0, run.progress.error
    assert all(metrics["rollout_mismatch_kl"] < 1e-6 for metrics in run.metrics)


def test_an_engine_that_reports_no_experts_ends_the_run(
    make: MakeConfig, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = DecodeSlots._record
    monkeypatch.setattr(
        DecodeSlots,
        "_record",
        lambda *arguments: [replace(response, routed_experts=None) for response in record(*arguments)],
    )
    with active_run(make(**settings)) as active:
        run = active.finish()
    assert run.code == 2
    assert "rollout.router_replay: the engine reports no experts of" in str(run.progress.error)
