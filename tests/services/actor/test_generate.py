"""Generate writes every requested trajectory under its derived id, independently of the order of the prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quartet.buffer.connection import Redis
from quartet.buffer.rollout_stream import RolloutStream
from quartet.codec.trajectories import trajectory_to_bytes
from quartet.config.root import Config
from quartet.contract.generation import SamplingParameters
from quartet.contract.status import Role
from quartet.contract.trajectory import FinishReason, Prompt, TokenBatch, Trajectory, TrajectoryId
from quartet.errors import FailedPrecondition
from tests.services.model_services import Services, start_generation
from tests.unit.models import tiny

PROMPTS = [Prompt(index, np.arange(2, 3 + index % 4, dtype=np.int32)) for index in (12, 3, 40, 7, 8)]
SAMPLING = SamplingParameters(max_response_tokens=9)


@pytest.fixture
def stream(redis_client: Redis, redis_url: str, request: pytest.FixtureRequest) -> RolloutStream:
    result = RolloutStream(redis_client, redis_url, request.node.name)
    result.reset()
    return result


def generate(actor: Any, stream: RolloutStream, prompts: list[Prompt], **changes: Any) -> list[Trajectory]:
    """Call Generate once; return its trajectories in the order of the stream."""
    run = stream.key.split(":")[1]
    count = start_generation(actor, run, prompts, **{"samples": 2, "sampling": SAMPLING, "seed": 5, **changes}).result()
    results = [delivery.trajectory for delivery in stream.read(1000, 0.01)]
    assert len(results) == count
    return results


def by_id(trajectories: list[Trajectory]) -> list[bytes]:
    return [trajectory_to_bytes(t) for t in sorted(trajectories, key=lambda trajectory: trajectory.id)]


def test_every_trajectory_is_written_under_its_derived_id(
    clients: dict[Role, Any], stream: RolloutStream, request: pytest.FixtureRequest
) -> None:
    result = generate(clients[Role.ACTOR], stream, PROMPTS, step=6)
    expected = {TrajectoryId(request.node.name, 6, prompt.index, sample) for prompt in PROMPTS for sample in range(2)}
    assert {trajectory.id for trajectory in result} == expected
    assert len(result) == 10
    prompts = {prompt.index: prompt.token_ids.tolist() for prompt in PROMPTS}
    for trajectory in result:
        assert trajectory.policy_version == 0
        assert trajectory.prompt_ids.tolist() == prompts[trajectory.id.prompt]
        response = trajectory.response_ids.tolist()
        assert tiny.EOS not in response[:-1]
        if trajectory.finish_reason is FinishReason.EOS:
            assert response[-1] == tiny.EOS
        else:
            assert len(response) == 9
            assert response[-1] != tiny.EOS
    assert {trajectory.finish_reason for trajectory in result} == {FinishReason.EOS, FinishReason.LENGTH}


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_of_generate_match_the_log_probs_rpc(
    temperature: float, clients: dict[Role, Any], stream: RolloutStream
) -> None:
    sampling = SamplingParameters(9, temperature=temperature)
    result = generate(clients[Role.ACTOR], stream, PROMPTS, sampling=sampling)
    expected = clients[Role.ACTOR].log_probs(TokenBatch.of(result), temperature)
    np.testing.assert_allclose(np.concatenate([t.log_probs for t in result]), expected, atol=1e-5, rtol=0)


def test_the_same_request_gives_the_same_trajectories_in_any_order_of_prompts(
    clients: dict[Role, Any], stream: RolloutStream
) -> None:
    first = generate(clients[Role.ACTOR], stream, PROMPTS)
    assert by_id(generate(clients[Role.ACTOR], stream, PROMPTS)) == by_id(first)
    assert by_id(generate(clients[Role.ACTOR], stream, PROMPTS[::-1])) == by_id(first)


def test_fewer_prompts_and_samples_give_the_same_tokens(clients: dict[Role, Any], stream: RolloutStream) -> None:
    expected = {t.id: t for t in generate(clients[Role.ACTOR], stream, PROMPTS)}
    for trajectory in generate(clients[Role.ACTOR], stream, PROMPTS[1:3], samples=1):
        assert trajectory.response_ids.tolist() == expected[trajectory.id].response_ids.tolist()


def test_samples_from_a_first_index_match_those_of_a_larger_request(
    clients: dict[Role, Any], stream: RolloutStream
) -> None:
    expected = {t.id: t for t in generate(clients[Role.ACTOR], stream, PROMPTS[:3], samples=5)}
    result = generate(clients[Role.ACTOR], stream, PROMPTS[:2], samples=2, first_sample=3)
    run = stream.key.split(":")[1]
    assert {t.id for t in result} == {TrajectoryId(run, 1, p.index, sample) for p in PROMPTS[:2] for sample in (3, 4)}
    for trajectory in result:
        assert trajectory.response_ids.tolist() == expected[trajectory.id].response_ids.tolist()


@pytest.mark.parametrize("change", [{"seed": 6}, {"step": 2}])
def test_another_seed_or_step_gives_other_trajectories(
    change: dict[str, int], clients: dict[Role, Any], stream: RolloutStream
) -> None:
    def responses(**changes: int) -> list[list[int]]:
        result = sorted(generate(clients[Role.ACTOR], stream, PROMPTS, **changes), key=lambda t: t.id)
        return [trajectory.response_ids.tolist() for trajectory in result]

    assert responses() != responses(**change)


def test_samples_of_a_prompt_differ_unless_greedy(clients: dict[Role, Any], stream: RolloutStream) -> None:
    def samples(temperature: float) -> set[tuple[int, ...]]:
        sampling = SamplingParameters(9, temperature=temperature)
        result = generate(clients[Role.ACTOR], stream, PROMPTS[:1], samples=6, sampling=sampling)
        return {tuple(trajectory.response_ids.tolist()) for trajectory in result}

    assert len(samples(1.0)) > 1
    assert len(samples(0.0)) == 1


def test_another_policy_version_and_a_lower_leader_epoch_are_refused(
    services: Services, make_config: Callable[..., Config], stream: RolloutStream
) -> None:
    actor = services.start(Role.ACTOR, make_config())
    generate(actor, stream, PROMPTS, leader_epoch=3)
    run = stream.key.split(":")[1]
    with pytest.raises(FailedPrecondition, match="leader_epoch 2: an orchestrator of epoch 3 has taken over"):
        start_generation(actor, run, PROMPTS, SAMPLING, leader_epoch=2).result()
    with pytest.raises(FailedPrecondition, match="policy version 4: this policy is version 0"):
        start_generation(actor, run, PROMPTS, SAMPLING, leader_epoch=3, policy_version=4).result()
    with pytest.raises(FailedPrecondition, match="policy version 0"):
        start_generation(actor, run, PROMPTS, SAMPLING, leader_epoch=3, weights_digest=bytes(16)).result()
    assert stream.read(10, 0.01) == []
    generate(actor, stream, PROMPTS, leader_epoch=4)
