"""Options of algorithm and rollout: sent to the services, and effective in whole runs."""

from __future__ import annotations

import inspect
import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quartet.contract.generation import Penalties, SamplingParameters
from quartet.contract.update import OptimizationSettings, PolicyLossSettings, RolloutCorrection, ValueLossSettings
from quartet.services.actor.actor import Actor
from quartet.services.critic.critic import Critic
from quartet.services.generator.generator import Generator
from quartet.services.reference.reference import Reference
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, run_to_completion

Requests = dict[str, list[dict[str, Any]]]

CORES: list[tuple[type, str]] = [
    (Generator, "generate"),
    (Actor, "log_probs"),
    (Actor, "update"),
    (Critic, "update"),
    (Reference, "log_probs"),
]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    """The arguments of all requests that the models receive, by ``Class.method``."""
    result: Requests = defaultdict(list)

    def record_calls(core: type, method: str) -> None:
        real: Callable[..., Any] = getattr(core, method)
        signature = inspect.signature(real)

        def recorded(*arguments: Any, **options: Any) -> Any:
            result[f"{core.__name__}.{method}"].append(dict(signature.bind(*arguments, **options).arguments))
            return real(*arguments, **options)

        monkeypatch.setattr(core, method, recorded)

    for core, method in CORES:
        record_calls(core, method)
    return result


def arguments_of(calls: list[dict[str, Any]], *names: str) -> list[Any]:
    """Return these arguments of every call, in order."""
    return [tuple(call[name] for name in names) if len(names) > 1 else call[names[0]] for call in calls]


OPTIONS: dict[str, dict[str, Any]] = {
    "run": {"steps": 4, "seed": 11},
    "algorithm": {
        "num_epochs": 3,
        "num_mini_batches": 2,
        "clip_ratio": 0.15,
        "clip_ratio_high": 0.3,
        "dual_clip": 4.0,
        "entropy_coefficient": 0.01,
        "kl_loss": "k3",
        "kl_coefficient": 0.2,
        "loss_aggregation": "sequence_mean",
        "rollout_correction": {"upper": 3.0},
        "target_kl": 50.0,
        "value_clip": 0.4,
        "value_pretraining_steps": 1,
        "non_finite": "skip",
    },
    "rollout": {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.05,
        "max_response_tokens": 6,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    },
    "actor": {
        "learning_rate": 2e-3,
        "warmup_steps": 2,
        "schedule": "linear",
        "final_learning_rate": 5e-4,
        "optimizer": {"max_grad_norm": 0.7},
        "micro_batch_tokens": 512,
    },
    "critic": {
        "learning_rate": 4e-3,
        "schedule": "linear",
        "optimizer": {"max_grad_norm": 0.3},
        "micro_batch_tokens": 256,
    },
}


def test_requests_of_a_step_follow_the_config(make: MakeConfig, requests: Requests) -> None:
    run_to_completion(make(**OPTIONS))
    sampling = SamplingParameters(
        max_response_tokens=6, temperature=0.5, top_p=0.9, top_k=7, min_p=0.05, penalties=Penalties(1.2, 0.5, 0.25)
    )
    batches = arguments_of(requests["Generator.generate"], "batch")
    assert [(batch.sampling, batch.seed, batch.policy_version) for batch in batches] == [
        (sampling, 11, version) for version in range(4)
    ]
    assert len(requests["Reference.log_probs"]) >= 4
    assert set(arguments_of(requests["Reference.log_probs"], "temperature")) == {0.5}
    loss = PolicyLossSettings(
        0.5, 0.15, 0.3, 4.0, 0.01, "k3", 0.2, "token", "sequence_mean", 50.0,
        rollout_correction=RolloutCorrection("token", upper=3.0),
    )  # fmt: skip
    # Step 1 trains only the critic, so the actor's warm-up of 2 steps and its schedule begin at step 2.
    actor = [
        OptimizationSettings(epochs, 2, pytest.approx(rate), 0.7, 11, True, 512)  # type: ignore[arg-type]
        for epochs, rate in ((0, 0.0), (3, 1e-3), (3, 2e-3), (3, 2e-3))
    ]
    assert arguments_of(requests["Actor.update"], "step", "settings", "loss") == [
        (step, settings, loss) for step, settings in enumerate(actor, 1)
    ]
    critic = [
        OptimizationSettings(3, 2, pytest.approx(rate), 0.3, 11, True, 256)  # type: ignore[arg-type]
        for rate in (4e-3, 3e-3, 2e-3, 1e-3)
    ]
    assert arguments_of(requests["Critic.update"], "step", "settings", "loss") == [
        (step, settings, ValueLossSettings(0.4)) for step, settings in enumerate(critic, 1)
    ]


def test_an_actor_as_reference_uses_the_rollout_temperature(make: MakeConfig, requests: Requests) -> None:
    run_to_completion(make(rollout={"temperature": 0.5}, actor={"lora": {"rank": 2}}))
    assert not requests["Reference.log_probs"]
    assert set(arguments_of(requests["Actor.log_probs"], "temperature", "reference")) == {(0.5, True)}


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["service", "adapter"])
def test_engine_trainer_and_reference_agree_at_any_temperature(lora: dict[str, Any] | None, make: MakeConfig) -> None:
    """All log-probs of the untrained policy are equal, so every ratio is 1 and every KL 0."""
    config = make(run={"steps": 1}, algorithm={"num_epochs": 1}, rollout={"temperature": 0.25}, actor={"lora": lora})
    (step,) = run_to_completion(config).metrics
    assert step["kl_mean"] == pytest.approx(0, abs=1e-4)
    assert step["rollout_mismatch_kl"] == pytest.approx(0, abs=1e-8)
    assert step["importance_weight"] == pytest.approx(1, abs=1e-5)
    assert (step["approx_kl"], step["clip_fraction"]) == (0, 0)


@pytest.mark.parametrize("option", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_samples_are_identical_if_only_the_likeliest_token_is_kept(option: dict[str, float], make: MakeConfig) -> None:
    rollout = {"prompts_per_step": 2, "samples_per_prompt": 4, **option}
    run = run_to_completion(make(run={"steps": 1}, rollout=rollout))
    responses: dict[str, set[str]] = defaultdict(set)
    for item in run.trajectories(1):
        responses[item["id"].rsplit("/", 2)[1]].add(item["response"])
    assert [len(result) for result in responses.values()] == [1, 1]


def test_log_probs_of_engine_and_trainer_agree_with_penalties(make: MakeConfig) -> None:
    """Both are those of the policy before penalties, which change only the tokens that are drawn."""
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 2.0, "frequency_penalty": 2.0}
    (plain,) = run_to_completion(make(run={"steps": 1})).metrics
    (step,) = run_to_completion(make(run={"steps": 1}, rollout=penalties)).metrics
    assert step["rollout_mismatch_kl"] == pytest.approx(0, abs=1e-8)
    assert step["importance_weight"] == pytest.approx(1, abs=1e-5)
    assert step["reward_mean"] != plain["reward_mean"]


def manifest(run: Run, step: int) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run.files.checkpoints / f"step-{step:06d}" / "manifest.json").read_text())
    return result


def adaptive(coefficient: float, kl: float, target: float, responses: int, horizon: float) -> float:
    """Return the next coefficient by Ziegler et al. 2019, section 2.2."""
    return coefficient * (1 + min(max(kl / target - 1, -0.2), 0.2) * responses / horizon)


def simple(coefficient: float, kl: float, target: float, responses: int, horizon: float) -> float:
    """Return the next coefficient without the clip. The horizon counts steps, and a negative KL counts as 0."""
    return coefficient * (1 + (max(kl, 0.0) / target - 1) / horizon)


@pytest.mark.parametrize(("rule", "kl_loss"), [(adaptive, "k3"), (simple, None)])
def test_the_kl_coefficient_depends_on_the_kl_of_the_step_before(
    rule: Callable[..., float], kl_loss: str | None, make: MakeConfig, requests: Requests
) -> None:
    controller = {"kind": rule.__name__, "target": 0.05, "horizon": 5.0}
    run = run_to_completion(
        make(
            run={"steps": 5},
            algorithm={"kl_coefficient": 0.3, "kl_controller": controller, "kl_loss": kl_loss},
            actor={"learning_rate": 0.02},
            checkpoint={"every_steps": 1, "keep_last": 5},
        )
    )
    expected = 0.3
    for step in run.metrics:
        assert step["kl_coefficient"] == pytest.approx(expected, rel=1e-9)
        expected = rule(expected, step["kl_mean"], 0.05, 4, 5.0)
        state = manifest(run, int(step["step"]))["state"]["kl_controller"]
        assert state == {"value": pytest.approx(expected, rel=1e-9)}
    in_loss = [step["kl_coefficient"] if kl_loss else 0.0 for step in run.metrics]
    assert [loss.kl_loss_coefficient for loss in arguments_of(requests["Actor.update"], "loss")] == in_loss
    assert any(step["kl_mean"] > 0.05 for step in run.metrics), "the KL never rose above the target"
    assert any(step["kl_mean"] < 0.05 for step in run.metrics)


def test_a_checkpoint_contains_the_score_moments(make: MakeConfig) -> None:
    run = run_to_completion(make(algorithm={"score": {"normalize": "running"}}, checkpoint={"every_steps": 2}))
    moments = manifest(run, 2)["state"]["score_moments"]
    scores = [item["score"] for step in (1, 2) for item in run.trajectories(step)]
    scores_tensor = torch.tensor(scores, dtype=torch.float64)
    assert moments["count"] == len(scores_tensor) == 8
    assert moments["mean"] == pytest.approx(float(scores_tensor.mean()), abs=1e-6)
    assert moments["squares"] == pytest.approx(float((scores_tensor - scores_tensor.mean()).square().sum()), rel=1e-5)


def test_the_overlong_penalty_rises_up_to_the_response_limit(make: MakeConfig) -> None:
    """The penalty is 0 up to two tokens and 3 at the limit of eight (Yu et al. 2025, DAPO, equation 13)."""
    run = run_to_completion(
        make(
            run={"steps": 1},
            algorithm={
                "overlong_penalty": {"buffer_tokens": 6, "penalty": 3.0},
                "truncation": {"treatment": "keep"},
            },
            rollout={"prompts_per_step": 8, "max_response_tokens": 8},
        )
    )
    result = run.trajectories(1)
    assert 8 in {item["response_tokens"] for item in result}
    costs = [3.0 * max(0, item["response_tokens"] - (8 - 6)) / 6 for item in result]
    expected = sum(item["score"] - cost for item, cost in zip(result, costs, strict=True)) / len(result)
    assert run.metrics[0]["score_mean"] == pytest.approx(expected, abs=1e-5)
