"""Runs of models that are wide enough for the kernels that users reach: generators, adapters, turns and losses change no bit.

The other tests of this folder have models so small that MKL computes them with other code. A part of this file runs once more
in a process that is limited to AVX2; all of it with the slow tests.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.config.models import LoraConfig
from quartet.demo.toy_task import make_toy_task
from quartet.models.generation.torch_engine import TorchEngine
from quartet.models.torch_settings import torch_threads
from quartet.models.weights.loading import load_causal_lm
from quartet.models.weights.lora import add_adapter
from tests.e2e.commands import Command
from tests.e2e.conftest import WIDE, wide_toy_task
from tests.training.conftest import MakeConfig
from tests.training.generator_runs import run_with_generators
from tests.training.runs import Run, assert_same, run_to_completion
from tests.training.test_episodes import EPISODES, environment, slow

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
PART = "(batch_invariant and (None-1 or 8-2)) or lost_and_replaced"
STEPS = 2
TASK = "QUARTET_TEST_WIDE_TASK"
"""Environment variable with the folder of the toy task, for the process of the test that imitates AVX2."""
SHORT: dict[str, Any] = {
    "run": {"steps": STEPS},
    "checkpoint": {"every_steps": 1},
    "rollout": {"prompts_per_step": 8, "samples_per_prompt": 2, "score_batch_size": 8},
    "recovery": {"backoff_seconds": 0.01},
}
LORA = {"lora": {"rank": 8}, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy as wide as that of the reviews, beside its reward model."""
    return make_toy_task(Path(os.environ.get(TASK) or wide_toy_task(tmp_path_factory)), recipe=WIDE).policy


@pytest.fixture(scope="module")
def wide(policy: Path) -> dict[str, Any]:
    """Settings of a short run with the wide models."""
    folder = policy.parent
    models = {"actor": {"model": str(policy)}, "reward": {"model": str(folder / "reward")}}
    return {**SHORT, **models, "data": {"prompts": str(folder / "prompts.jsonl")}}


@pytest.fixture(scope="module")
def built_in(make: MakeConfig, wide: dict[str, Any]) -> Run:
    return run_to_completion(make(**wide))


@pytest.mark.parametrize(
    ("rank", "threads"),
    [
        (None, 1),
        (8, 2),
        *(pytest.param(*other, marks=pytest.mark.slow) for other in ((None, 2), (2, 1), (2, 2), (8, 1))),
    ],
)
def test_the_engine_is_batch_invariant(policy: Path, rank: int | None, threads: int) -> None:
    model = load_causal_lm(policy)
    if rank is not None:
        add_adapter(model, "base", LoraConfig(rank=rank, alpha=16.0), 0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.02)
    with torch_threads(threads):
        assert TorchEngine(model, frozenset(), 64).batch_invariant


def test_generators_that_are_lost_and_replaced_change_nothing(
    make: MakeConfig, wide: dict[str, Any], built_in: Run
) -> None:
    """They give the same bits as the engine of the actor."""
    config = make(**wide)
    run = run_with_generators(config, 2, lambda running, step: running.replace(running.addresses[step % 2]))
    assert_same(run, built_in)


def test_generators_that_merge_an_adapter_give_the_same_bits(make: MakeConfig, wide: dict[str, Any]) -> None:
    changes = {**wide, "actor": {**wide["actor"], **LORA}, "rollout": {**wide["rollout"], "merge_adapter": True}}
    assert_same(run_with_generators(make(**changes), 2), run_to_completion(make(**changes)))


@pytest.mark.slow
def test_turns_of_any_duration_with_an_adapter_give_the_same_bits_with_generators(
    make: MakeConfig, wide: dict[str, Any]
) -> None:
    actor, rollout = {**wide["actor"], **LORA}, {**wide["rollout"], **EPISODES["rollout"]}
    changes = {**EPISODES, **wide, "actor": actor, "rollout": rollout}
    with environment():
        expected = run_to_completion(make(**changes))
    with environment(wait=slow):
        assert_same(run_with_generators(make(**changes), 2), expected)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "AVX2", reason="all tests of this file compute with AVX2 here"
)
@pytest.mark.parametrize("part", [PART, pytest.param("not avx2", marks=pytest.mark.slow)])
def test_this_holds_with_avx2(part: str, policy: Path) -> None:
    # Not itself again: the name of this test contains that of its part. A fork has computed nothing that is of another processor.
    arguments = ["-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", __file__, "-k", f"({part}) and not avx2"]
    environment = {**AVX2, TASK: str(policy.parent)}
    command = Command(sys.executable, "-m", "pytest", *arguments, cwd=Path.cwd(), environment=environment)
    try:
        result = command.wait(500)
    finally:
        command.clean_up()
    assert result.code == 0, result.out + result.err


def test_a_fork_takes_another_processor_from_its_environment(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text("import torch; print(torch.backends.cpu.get_cpu_capability())")
    command = Command(
        sys.executable, tmp_path / "shown.py", cwd=tmp_path, environment={"ATEN_CPU_CAPABILITY": "default"}
    )
    try:
        assert command.wait().out.split() == ["DEFAULT"]
    finally:
        command.clean_up()
