"""Runs with each estimator and each kind of reference, with exactly the required services."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import PreTrainedTokenizerFast

from quartet.config.layout import model_roles
from quartet.contract.status import Role
from quartet.demo import pretraining
from quartet.demo.toy_task import ToyTask
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, run_to_completion

KEEP = {"treatment": "keep"}
GROUPS = {"prompts_per_step": 2, "samples_per_prompt": 3}
ESTIMATORS: dict[str, dict[str, Any]] = {
    "gae": {"algorithm": {"estimator": "gae"}},
    "reinforce": {
        "algorithm": {"estimator": "reinforce", "ratio_level": "sequence", "loss_aggregation": "sequence_mean"}
    },
    "rloo": {"algorithm": {"estimator": "rloo"}, "rollout": GROUPS},
    "grpo": {
        "algorithm": {"estimator": "grpo", "kl_coefficient": 0.04},
        "rollout": GROUPS,
    },
    "dr_grpo": {
        "algorithm": {"estimator": "grpo", "estimator_parameters": {"normalize_std": False}},
        "rollout": GROUPS,
    },
    "opo": {"algorithm": {"estimator": "opo"}, "rollout": GROUPS},
    "reinforce_plus_plus_baseline": {"algorithm": {"estimator": "reinforce_plus_plus_baseline"}, "rollout": GROUPS},
    "reinforce_plus_plus": {"algorithm": {"estimator": "reinforce_plus_plus", "gamma": 0.99}},
}


def policy_changed(run: Run, toy_task: ToyTask) -> bool:
    trained = safetensors.torch.load_file(run.files.policy / "model.safetensors")
    initial = safetensors.torch.load_file(toy_task.policy / "model.safetensors")
    return any(not torch.equal(trained[name], initial[name]) for name in trained)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_each_estimator_trains_the_policy_and_only_gae_a_critic(name: str, make: MakeConfig, toy_task: ToyTask) -> None:
    run = run_to_completion(make(**ESTIMATORS[name]))
    assert [step["step"] for step in run.metrics] == [1, 2]
    assert policy_changed(run, toy_task)
    critic_metrics = {"value_loss", "explained_variance", "grad_norm_critic", "learning_rate_critic"}
    for step in run.metrics:
        assert critic_metrics & set(step) == (critic_metrics if name == "gae" else set())
        assert {"entropy", "kl_mean", "entropy_slope", "distinct_2", "rollout_mismatch_kl"} <= set(step)
    assert not run.progress.alerts


def test_a_hybrid_policy_is_trained_with_a_critic_of_its_type(
    make: MakeConfig, toy_task: ToyTask, tmp_path: Path
) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(toy_task.policy)
    hybrid = {"model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    shape = pretraining.Shape(hidden=32, heads=2, positions=64, config=hybrid)
    model = pretraining.train_causal_lm([[3, 4, 5]], tokenizer, shape, pretraining.Schedule(steps=1))
    pretraining.save_checkpoint(model, tokenizer, tmp_path / "hybrid")
    run = run_to_completion(make(actor={"model": str(tmp_path / "hybrid")}, critic={"model": str(tmp_path / "hybrid")}))
    trained = safetensors.torch.load_file(run.files.policy / "model.safetensors")
    before = model.state_dict()
    convolutions = [name for name in trained if "conv" in name]
    assert convolutions
    assert all(not torch.equal(trained[name], before[name]) for name in convolutions)
    for step in run.metrics:
        assert abs(step["rollout_mismatch_kl"]) < 1e-9, "generation and updates must compute the same log-probs"
        assert step["grad_norm_critic"] > 0


def test_samples_of_one_prompt_are_adjacent(make: MakeConfig) -> None:
    run = run_to_completion(make(**ESTIMATORS["rloo"]))
    result = [item["id"].rsplit("/", 2)[1:] for item in run.trajectories(1)]
    prompts = {prompt for prompt, _ in result}
    assert len(prompts) == 2
    assert sorted(result) == sorted([prompt, str(sample)] for prompt in prompts for sample in range(3))
    assert len({item["response"] for item in run.trajectories(1)}) > 2, "samples must have separate random streams"


def test_values_are_pretrained_before_the_policy_moves(make: MakeConfig, toy_task: ToyTask) -> None:
    run = run_to_completion(
        make(run={"steps": 3}, algorithm={"value_pretraining_steps": 2}, checkpoint={"every_steps": 2})
    )
    after_warmup = safetensors.torch.load_file(run.files.checkpoints / "step-000002" / "actor" / "model.safetensors")
    initial = safetensors.torch.load_file(toy_task.policy / "model.safetensors")
    assert all(torch.equal(after_warmup[name], initial[name]) for name in after_warmup)
    assert policy_changed(run, toy_task)
    assert run.metrics[2]["optimizer_steps_actor"] == 2
    for step in run.metrics[:2]:
        assert (step["optimizer_steps_actor"], step["optimizer_steps_critic"]) == (0, 2)
        assert step["entropy"] > 0
        assert "policy_loss" not in step, "a value that was not computed must not be a metric"


def test_learning_rates_follow_their_schedules_and_are_reported(make: MakeConfig) -> None:
    actor = {"warmup_steps": 2, "schedule": "linear", "final_learning_rate": 1e-4}
    run = run_to_completion(make(run={"steps": 4}, actor=actor, critic={"schedule": "cosine"}))
    rates = [step["learning_rate_actor"] for step in run.metrics]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 5.5e-4])
    # Half a cosine over four steps: (1 + cos x) / 2 at 0°, 45°, 90° and 135°.
    assert run.metrics[-1]["learning_rate_critic"] == pytest.approx(1e-3 * (1 - 0.5**0.5) / 2)


def test_scores_are_normalised_by_running_moments(make: MakeConfig) -> None:
    run = run_to_completion(make(run={"steps": 3}, algorithm={"score": {"normalize": "running"}, "truncation": KEEP}))
    all_scores: list[float] = []
    for number, step in enumerate(run.metrics, 1):
        scores = [item["score"] for item in run.trajectories(number)]
        all_scores += scores
        all_scores_tensor = torch.tensor(all_scores, dtype=torch.float64)
        expected = (
            torch.tensor(scores, dtype=torch.float64).mean() - all_scores_tensor.mean()
        ) / all_scores_tensor.std(correction=0)
        assert step["score_mean"] == pytest.approx(float(expected), abs=1e-4)


def test_initial_score_moments_are_kept(make: MakeConfig) -> None:
    run = run_to_completion(make(run={"steps": 3}, algorithm={"score": {"normalize": "initial"}, "truncation": KEEP}))
    first = torch.tensor([item["score"] for item in run.trajectories(1)], dtype=torch.float64)
    for step in run.metrics:
        expected = (step["reward_mean"] - float(first.mean())) / float(first.std(correction=0))
        assert step["score_mean"] == pytest.approx(expected, abs=1e-4)


def test_an_actor_with_an_adapter_serves_as_its_reference(make: MakeConfig) -> None:
    config = make(run={"steps": 3}, actor={"lora": {"rank": 2}, "learning_rate": 0.05})
    assert Role.REFERENCE not in model_roles(config)
    run = run_to_completion(config)
    assert run.metrics[0]["kl_mean"] == pytest.approx(0, abs=1e-4), (
        "the policy differs from the reference before the first update"
    )
    assert abs(run.metrics[2]["kl_mean"]) > 0.01, "the policy does not differ from the reference after the update"
    assert (run.files.adapter / "adapter_model.safetensors").is_file()
    assert (run.files.policy / "model.safetensors").is_file()


def test_an_adapter_run_with_a_reference_service_has_the_same_metrics(make: MakeConfig, toy_task: ToyTask) -> None:
    lora = {"lora": {"rank": 2}, "learning_rate": 0.05}
    own = run_to_completion(make(actor=lora))
    other = run_to_completion(make(actor=lora, reference={"model": str(toy_task.policy)}))
    for left, right in zip(own.metrics, other.metrics, strict=True):
        assert left["kl_mean"] == pytest.approx(right["kl_mean"], abs=1e-4)
        assert left["reward_mean"] == pytest.approx(right["reward_mean"], abs=1e-6)


def test_the_critic_explains_more_of_the_returns_after_pretraining(make: MakeConfig) -> None:
    algorithm = {"value_pretraining_steps": 7, "num_epochs": 4, "value_clip": 0.0}
    run = run_to_completion(
        make(run={"steps": 8}, algorithm=algorithm, rollout={"prompts_per_step": 16}, critic={"learning_rate": 3e-3})
    )
    explained = [step["explained_variance"] for step in run.metrics]
    assert max(explained[-2:]) > explained[0] + 0.1
    assert [step["optimizer_steps_actor"] for step in run.metrics] == [0] * 7 + [4]


def test_a_run_with_the_log_probs_of_the_trainer_sees_no_kl_before_its_first_update(make: MakeConfig) -> None:
    settings = {"actor": {"dtype": "bfloat16"}, "algorithm": {"kl_log_probs": "trainer"}}
    run = run_to_completion(make(**settings))
    assert run.metrics[0]["kl_mean"] == 0.0, "policy and reference are equal, and both compute alike"
    assert run.metrics[1]["kl_mean"] != 0.0


@pytest.mark.parametrize("same_limit", [True, False])
def test_equal_models_have_no_kl_if_both_split_a_batch_at_the_same_limit(same_limit: bool, make: MakeConfig) -> None:
    """The batch of 16 responses has several micro-batches of 64 tokens. In others, bfloat16 rounds in another way."""
    limits = {"actor": {"dtype": "bfloat16", "micro_batch_tokens": 64}}
    rollout = {"prompts_per_step": 16, "score_batch_size": 16}
    if same_limit:
        limits["reference"] = {"micro_batch_tokens": 64}
    config = make(run={"steps": 1}, algorithm={"kl_log_probs": "trainer"}, rollout=rollout, **limits)
    (step,) = run_to_completion(config).metrics
    assert (step["kl_mean"] == 0.0) == same_limit


def test_the_entropy_coefficient_adapts_and_is_recorded(make: MakeConfig) -> None:
    controller = {"kind": "adaptive", "target": 100.0, "step_size": 0.01, "max_coefficient": 0.02}
    run = run_to_completion(make(run={"steps": 4}, algorithm={"entropy_controller": controller}))
    assert [step["entropy_coefficient"] for step in run.metrics] == pytest.approx([0.0, 0.01, 0.02, 0.02])
    plain = run_to_completion(make(run={"steps": 4}))
    assert "entropy_coefficient" not in plain.metrics[0]
    assert plain.metrics[1]["policy_loss"] != run.metrics[1]["policy_loss"]
