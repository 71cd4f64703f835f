"""A valid request for every method. Its mutations pass the first checks of the service."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from quartet.codec.messages import to_message
from quartet.contract.trajectory import TokenBatch
from quartet.v1 import (
    actor_pb2,
    critic_pb2,
    environment_pb2,
    generation_pb2,
    orchestrator_pb2,
    profile_pb2,
    reference_pb2,
    reward_pb2,
    status_pb2,
    tensor_pb2,
    trajectory_pb2,
    update_pb2,
    weights_pb2,
)
from tests.contract.tensors import tensor_message
from tests.unit.models import tiny

RUN = "fuzz"
CHECKPOINT = "checkpoints/first"
"""Directory of a checkpoint of the initial model, as in requests of Restore and Save."""
CHECKPOINT_EVERY = 4
"""Steps between the checkpoints of the run whose orchestrator is fuzzed."""


@dataclass(frozen=True)
class PublishedPolicies:
    """Address of a weight source, and the digests of the policy versions that it has, from version 0."""

    address: str = "127.0.0.1:1"
    digests: tuple[bytes, ...] = ()


NO_POLICIES = PublishedPolicies()
"""An address at which no process listens."""


@dataclass(frozen=True)
class ServiceState:
    """State of a process that valid requests must match.

    ``weights_digest``: digest of the weights that a generator holds. ``policies``: those that it may load.
    """

    run: str = ""
    step: int = 0
    policy_version: int = 0
    leader_epoch: int = 1
    broken: bool = False
    weights_digest: bytes = b""
    policies: PublishedPolicies = NO_POLICIES


def ints(values: list[int]) -> tensor_pb2.Tensor:
    return tensor_message(np.array(values, np.int32))


def _batch(random: Random) -> trajectory_pb2.TokenBatch:
    sequences = random.randint(1, 4)
    prompts, responses = ([random.randint(1, 8) for _ in range(sequences)] for _ in range(2))
    tokens = [random.randrange(tiny.VOCABULARY) for _ in range(sum(prompts) + sum(responses))]
    batch = TokenBatch(np.array(tokens, np.int32), np.array(prompts, np.int32), np.array(responses, np.int32))
    return to_message(trajectory_pb2.TokenBatch, batch)


def _generate(random: Random, state: ServiceState) -> Message:
    lengths = [random.randint(1, 6) for _ in range(random.randint(1, 3))]
    samples = random.randint(1, 2)
    return generation_pb2.GenerateRequest(
        run=RUN,
        step=state.step + 1,
        leader_epoch=state.leader_epoch,
        prompt_ids=ints([random.randrange(tiny.VOCABULARY) for _ in range(sum(lengths))]),
        prompt_lengths=ints(lengths),
        prompts=random.sample(range(1000), len(lengths)),
        trajectory_prompts=[index for index in range(len(lengths)) for _ in range(samples)],
        trajectory_samples=[*range(samples)] * len(lengths),
        sampling=trajectory_pb2.SamplingParameters(
            max_response_tokens=random.randint(1, 6),
            temperature=1.0,
            top_p=0.9,
            top_k=random.choice([0, 5]),
            min_p=0.1,
            stop_strings=["a", "bc"],
            penalties=random.choice([None, trajectory_pb2.Penalties(repetition=1.1, presence=0.5, frequency=-0.5)]),
        ),
        seed=1,
        policy_version=state.policy_version,
        weights_digest=state.weights_digest,
    )


def _update_weights(random: Random, state: ServiceState) -> Message:
    version = random.randrange(len(state.policies.digests) or 1)
    return generation_pb2.UpdateWeightsRequest(
        run=RUN,
        leader_epoch=state.leader_epoch,
        policy_version=version,
        weights_digest=state.policies.digests[version] if state.policies.digests else random.randbytes(16),
        sources=[generation_pb2.WeightPeer(address=state.policies.address, generator=random.random() < 0.5)],
    )


def _optimization(random: Random) -> update_pb2.OptimizationSettings:
    return update_pb2.OptimizationSettings(
        num_epochs=random.randint(0, 2),
        num_mini_batches=random.randint(1, 2),
        learning_rate=1e-4,
        max_grad_norm=1.0,
        seed=1,
        skip_non_finite=random.random() < 0.5,
    )


def _rollout_correction(random: Random) -> update_pb2.RolloutCorrection:
    rule = update_pb2.RejectionRule(statistic=random.randrange(1, 12), upper=1.5)  # type: ignore[arg-type]
    return update_pb2.RolloutCorrection(
        level=random.randrange(1, 5),  # type: ignore[arg-type]
        treatment=random.choice([update_pb2.CORRECTION_TREATMENT_TRUNCATE, update_pb2.CORRECTION_TREATMENT_MASK]),
        lower=0.5,
        upper=2.0,
        normalize=random.random() < 0.5,
        rejection=[rule],
        off_policy_mask=random.choice([0.0, 0.1]),
    )


def _actor_update(random: Random, state: ServiceState) -> Message:
    loss = update_pb2.PolicyLossSettings(
        temperature=1.0,
        clip_low=0.2,
        clip_high=0.2,
        kl_loss=random.choice([update_pb2.KL_LOSS_NONE, update_pb2.KL_LOSS_K2, update_pb2.KL_LOSS_K3]),
        kl_loss_coefficient=0.1,
        ratio_level=random.choice([update_pb2.RATIO_LEVEL_TOKEN, update_pb2.RATIO_LEVEL_SEQUENCE]),
        aggregation=random.randint(update_pb2.LOSS_AGGREGATION_TOKEN_MEAN, update_pb2.LOSS_AGGREGATION_TOKEN_SUM),
        policy_loss="clipped",
        rollout_correction=_rollout_correction(random),
        old_log_probs=update_pb2.OLD_LOG_PROBS_TRAINER,
    )
    return update_pb2.UpdateRequest(
        run=RUN,
        step=state.step + 1,
        leader_epoch=state.leader_epoch,
        optimization=_optimization(random),
        policy_loss=loss,
    )


def _critic_update(random: Random, state: ServiceState) -> Message:
    return update_pb2.UpdateRequest(
        run=RUN,
        step=state.step + 1,
        leader_epoch=state.leader_epoch,
        optimization=_optimization(random),
        value_loss=update_pb2.ValueLossSettings(value_clip=0.2),
    )


def _save(random: Random, state: ServiceState) -> Message:
    return update_pb2.SaveRequest(
        run=RUN,
        leader_epoch=state.leader_epoch,
        directory=f"saved/{random.randrange(3)}",
        kind=random.choice([update_pb2.SAVE_KIND_CHECKPOINT, update_pb2.SAVE_KIND_MODEL, update_pb2.SAVE_KIND_ADAPTER]),
        **({"step": state.step} if random.random() < 0.5 else {}),
    )


def _restore(random: Random, state: ServiceState) -> Message:
    checkpoint = {} if random.random() < 0.5 else {"step": 1, "directory": CHECKPOINT}
    return update_pb2.RestoreRequest(run=RUN, leader_epoch=state.leader_epoch, **checkpoint)


def _log_probs(kind: Callable[..., Message]) -> Callable[[Random, ServiceState], Message]:
    return lambda random, state: kind(batch=_batch(random), temperature=random.choice([1.0, 0.7]))


def _score(random: Random, state: ServiceState) -> Message:
    batch = _batch(random)
    sequences = len(batch.prompt_lengths.data) // 4
    fields = ['{"answer": "7"}', "{}", '{"nested": {"list": [1, null]}}']
    return reward_pb2.ScoreRequest(batch=batch, fields=[random.choice(fields) for _ in range(sequences)])


def _session(random: Random) -> str:
    """Return one of few sessions, so that steps follow resets."""
    return f"{RUN}/1/{random.randrange(2)}/0/1.0"


def _reset(random: Random, state: ServiceState) -> Message:
    return environment_pb2.ResetRequest(
        session=_session(random), seed=random.randrange(2**32), fields="{}", token_ids=ints([5, 7, 9])
    )


def _step(random: Random, state: ServiceState) -> Message:
    return environment_pb2.StepRequest(session=_session(random), turn=random.choice([1, 1, 2]), token_ids=ints([6, 8]))


def _restore_session(random: Random, state: ServiceState) -> Message:
    return environment_pb2.RestoreSessionRequest(
        session=_session(random),
        seed=random.randrange(2**32),
        fields="{}",
        token_ids=ints([5, 7, 9]),
        turn=random.choice([0, 1, 2]),
        state=random.choice(['{"environment": 1}', "1", "{"]),
    )


def _close_session(random: Random, state: ServiceState) -> Message:
    return environment_pb2.CloseSessionRequest(session=_session(random))


def _run_agent(random: Random, state: ServiceState) -> Message:
    return environment_pb2.RunAgentRequest(
        session=_session(random), fields="{}", base_url="http://127.0.0.1:9/v1", api_key="k" * 16, model="policy"
    )


def _weights(random: Random, state: ServiceState) -> Message:
    have = {} if random.random() < 0.5 else {"have_version": 0, "have_digest": bytes(16)}
    return weights_pb2.GetWeightsRequest(run=RUN, version=random.choice([0, state.policy_version]), **have)


def _change_settings(random: Random, state: ServiceState) -> Message:
    values = {"kl_coefficient": random.random(), "actor.learning_rate": random.random() * 1e-3}
    return orchestrator_pb2.ChangeSettingsRequest(values=values, user="fuzz")


def _roll_back(random: Random, state: ServiceState) -> Message:
    return orchestrator_pb2.RollBackRequest(step=state.step // CHECKPOINT_EVERY * CHECKPOINT_EVERY)


def _constant(message: Message) -> Callable[[Random, ServiceState], Message]:
    return lambda random, state: type(message).FromString(message.SerializeToString())


_SERVICES = ("", "quartet.v1.ActorService", "quartet.v1.OrchestratorService", "quartet.v1.RewardService")


def _health(random: Random, state: ServiceState) -> Message:
    return health_pb2.HealthCheckRequest(service=random.choice(_SERVICES))


SEEDS: dict[str, Callable[[Random, ServiceState], Message]] = {
    "/quartet.v1.GenerationService/Generate": _generate,
    "/quartet.v1.GenerationService/UpdateWeights": _update_weights,
    "/quartet.v1.ActorService/LogProbs": _log_probs(actor_pb2.ActorServiceLogProbsRequest),
    "/quartet.v1.ActorService/Update": _actor_update,
    "/quartet.v1.ActorService/Save": _save,
    "/quartet.v1.ActorService/Restore": _restore,
    "/quartet.v1.CriticService/Values": lambda random, state: critic_pb2.ValuesRequest(batch=_batch(random)),
    "/quartet.v1.CriticService/Update": _critic_update,
    "/quartet.v1.CriticService/Save": _save,
    "/quartet.v1.CriticService/Restore": _restore,
    "/quartet.v1.RewardService/Score": _score,
    "/quartet.v1.ReferenceService/LogProbs": _log_probs(reference_pb2.ReferenceServiceLogProbsRequest),
    "/quartet.v1.EnvironmentService/Reset": _reset,
    "/quartet.v1.EnvironmentService/Step": _step,
    "/quartet.v1.EnvironmentService/RestoreSession": _restore_session,
    "/quartet.v1.EnvironmentService/CloseSession": _close_session,
    "/quartet.v1.EnvironmentService/RunAgent": _run_agent,
    "/quartet.v1.OrchestratorService/GetProgress": _constant(orchestrator_pb2.GetProgressRequest()),
    "/quartet.v1.OrchestratorService/GetGenerators": _constant(orchestrator_pb2.GetGeneratorsRequest()),
    "/quartet.v1.OrchestratorService/WatchProgress": lambda random, state: orchestrator_pb2.WatchProgressRequest(
        after_step=max(0, state.step - random.randrange(3))
    ),
    "/quartet.v1.OrchestratorService/Stop": _constant(orchestrator_pb2.StopRequest()),
    "/quartet.v1.OrchestratorService/Pause": _constant(orchestrator_pb2.PauseRequest()),
    "/quartet.v1.OrchestratorService/Resume": _constant(orchestrator_pb2.ResumeRequest()),
    "/quartet.v1.OrchestratorService/Checkpoint": _constant(orchestrator_pb2.CheckpointRequest()),
    "/quartet.v1.OrchestratorService/RollBack": _roll_back,
    "/quartet.v1.OrchestratorService/Profile": lambda random, state: orchestrator_pb2.ProfileRequest(
        steps=random.randint(1, 10)
    ),
    "/quartet.v1.OrchestratorService/GetSettings": _constant(orchestrator_pb2.GetSettingsRequest()),
    "/quartet.v1.OrchestratorService/ChangeSettings": _change_settings,
    "/quartet.v1.ProfileService/StartProfile": _constant(profile_pb2.StartProfileRequest(profile="fuzz")),
    "/quartet.v1.ProfileService/TakeProfile": _constant(profile_pb2.TakeProfileRequest(profile="fuzz")),
    "/quartet.v1.WeightService/GetWeights": _weights,
    "/quartet.v1.StatusService/GetStatus": _constant(status_pb2.GetStatusRequest()),
    "/grpc.health.v1.Health/Check": _health,
    "/grpc.health.v1.Health/Watch": _health,
}
"""Valid requests by method path. Every method needs one: fuzzing mutates valid requests."""
