"""Utilisation: the FLOPs that a step needs, over the time and the devices that it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.trajectory import TokenBatch
from quartet.contract.update import Experience
from quartet.models.matmul_peak import matmul_peak
from quartet.services.orchestrator.telemetry.step_profiler import CallSeconds
from quartet.services.orchestrator.telemetry.utilisation import StepTokens, Utilisation

PEAK = 1e9
LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 32,
}
BODY = 2 * (4 * 8 * 8 + 3 * 8 * 16)
"""Weights in the matmuls of its layers."""
HEAD = 8 * 32


class Generators:
    """Generators of which each device has half the peak of the actor."""

    def peak_flops(self) -> float:
        return PEAK / 2


def experience() -> Experience:
    """Two responses of 3 and 5 tokens to one prompt of 4, and one of 2 to a prompt of 6."""
    prompts, responses = np.array([4, 4, 6], np.int32), np.array([3, 5, 2], np.int32)
    empty = np.zeros(10, np.float32)
    batch = TokenBatch(np.zeros(24, np.int32), prompts, responses)
    ids = ("run/1/7/0", "run/1/7/1", "run/1/9/0")
    return Experience("run", 1, 0, ids, batch, np.zeros(3, np.float32), *[empty] * 6)


def config(folder: Path, **sections: Any) -> Config:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(LLAMA))
    tree: dict[str, Any] = {
        "run": {"steps": 9},
        "data": {"prompts": "p"},
        "actor": {"model": str(folder / "model")},
        "reward": {"model": str(folder / "model")},
        "algorithm": {"num_epochs": 2},
    }
    return parse_config({**tree, **sections}, "test")


def metrics(config: Config, busy: dict[tuple[str, str], float], peak: float = PEAK) -> dict[str, float]:
    statuses = {role: ServiceStatus(role, peak_flops=peak) for role in (Role.ACTOR, Role.CRITIC)}
    generators: Any = Generators()
    return Utilisation(config, statuses, generators).metrics(1, experience(), 20, CallSeconds(0.0, busy))


def test_a_prompt_that_responses_share_counts_once() -> None:
    tokens = StepTokens.of(experience(), 20)
    assert (tokens.distinct, tokens.response, tokens.generated) == (4 + 6 + 10, 10, 20)
    assert tokens.context == (7 * 7 + 9 * 9 + 8 * 8) / 24


def test_updates_need_three_forward_passes_and_a_head_for_response_tokens(tmp_path: Path) -> None:
    result = metrics(config(tmp_path), {(Role.ACTOR, "update"): 0.5, (Role.CRITIC, "update"): 0.25})
    context = StepTokens.of(experience(), 20).context
    attention = 2 * 2 * 8 * 20 * context
    forward = 2 * BODY * 20 + attention
    assert result["tokens_per_second_actor"] == pytest.approx(2 * 20 / 0.5)
    assert result["mfu_actor"] == pytest.approx(2 * 3 * (forward + 2 * HEAD * 10) / 0.5 / PEAK)
    assert result["mfu_critic"] == pytest.approx(2 * 3 * forward / 0.25 / PEAK)
    assert "tokens_per_second_generation" not in result


def test_frozen_weights_need_no_gradient(tmp_path: Path) -> None:
    busy = {(Role.ACTOR, "update"): 0.5}
    whole = metrics(config(tmp_path), busy)["mfu_actor"]
    actor = {"model": str(tmp_path / "model"), "lora": {"rank": 1}}
    forward = 2 * BODY * 20 + 2 * 2 * 8 * 20 * StepTokens.of(experience(), 20).context
    assert whole - metrics(config(tmp_path, actor=actor), busy)["mfu_actor"] == pytest.approx(2 * forward / 0.5 / PEAK)


def test_several_devices_share_the_work(tmp_path: Path) -> None:
    busy = {(Role.ACTOR, "update"): 0.5, (Role.ACTOR, "generate"): 0.1}
    one, two = metrics(config(tmp_path), busy), metrics(config(tmp_path, services={"actor": {"processes": 2}}), busy)
    assert two == {name: value / 2 for name, value in one.items()}


def test_generators_count_by_their_own_seconds_and_peak(tmp_path: Path) -> None:
    busy = {("generator a:1", "generate"): 0.1, ("generator b:2", "generate"): 0.3, ("generator a:1", "score"): 9.0}
    result = metrics(config(tmp_path, rollout={"generators": 2}), busy)
    assert result["tokens_per_second_generation"] == pytest.approx(20 / 0.4)
    flops = 2 * BODY * 30 + 2 * 2 * 8 * 30 * StepTokens.of(experience(), 20).context + 2 * HEAD * 20
    assert result["mfu_generation"] == pytest.approx(flops / 0.4 / (PEAK / 2))


def test_without_a_peak_or_a_known_model_only_tokens_are_counted(tmp_path: Path) -> None:
    busy = {(Role.ACTOR, "update"): 0.5, (Role.ACTOR, "generate"): 0.1}
    names = {"tokens_per_second_actor", "tokens_per_second_generation"}
    assert set(metrics(config(tmp_path), busy, peak=0.0)) == names
    unknown = config(tmp_path, actor={"model": str(tmp_path / "absent")})
    assert set(metrics(unknown, busy)) == names


def test_an_actor_that_waits_for_the_value_pretraining_has_no_update(tmp_path: Path) -> None:
    algorithm = {"num_epochs": 2, "value_pretraining_steps": 3}
    assert metrics(config(tmp_path, algorithm=algorithm), {(Role.ACTOR, "update"): 0.5}) == {}


def test_the_peak_of_a_cpu_is_measured_once() -> None:
    peak = matmul_peak("cpu", "float32", 1)
    assert 1e8 < peak < 1e13
    assert matmul_peak("cpu", "float32", 1) == peak
