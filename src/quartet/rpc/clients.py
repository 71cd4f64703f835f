"""Typed clients of the four model services: types in, types out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np

from quartet import codec
from quartet.config import TimeoutsConfig
from quartet.errors import FailedPrecondition, MismatchError, ServiceFailed
from quartet.rpc.channels import PendingCall, ServiceChannel, ToldAtOnce, replicas_at
from quartet.rpc.security.credentials import LOCAL, Credentials
from quartet.types import (
    FloatArray,
    OptimizationSettings,
    PolicyLossSettings,
    Prompt,
    Role,
    SamplingParameters,
    SavedFile,
    SaveKind,
    Scores,
    ServiceStatus,
    TokenBatch,
    UpdateResult,
    ValueLossSettings,
)
from quartet.v1 import (
    actor_pb2,
    actor_pb2_grpc,
    critic_pb2,
    critic_pb2_grpc,
    reference_pb2,
    reference_pb2_grpc,
    reward_pb2,
    reward_pb2_grpc,
)

T = TypeVar("T")


class PendingResult(Generic[T]):
    """An answer under way, and how to read it."""

    def __init__(self, pending: PendingCall, read: Callable[..., T]) -> None:
        self._pending, self._read = pending, read
        self._found: T | None = None

    def done(self) -> bool:
        """Whether the answer, or the failure, is there."""
        return self._pending.done()

    def when_done(self, heard: Callable[[], None]) -> None:
        """Has ``heard`` called, by another thread, when the answer or the failure is there; at once if it is."""
        self._pending.when_done(heard)

    def wait_until_begun(self) -> None:
        """Returns when the service says that it has begun, or when the call has ended."""
        self._pending.wait_until_begun()

    def result(self) -> T:
        """The answer. Raises the domain exception that the service answered with."""
        if self._found is None:
            self._found = self._read(self._pending.result())
        return self._found

    def cancel(self) -> None:
        """Tells the service that nobody waits any more."""
        self._pending.cancel()


class ServiceClient:
    """What the clients share."""

    role: Role

    def __init__(self, address: str, timeouts: TimeoutsConfig, credentials: Credentials = LOCAL) -> None:
        self.peer = ServiceChannel(self.role, address, credentials)
        self.timeouts = timeouts

    def wait_until_ready(self, alive: Callable[[], None] = lambda: None, known: bool = False) -> ServiceStatus:
        """The status of this client's role at its address. Raises MismatchError when another role answers there.

        ``known``: it has answered before, so whatever accepts connections there without an answer is waited for.
        """
        answer = self.peer.wait_until_ready(self.timeouts.load_seconds, alive, known)
        statuses = [codec.status_from_proto(message) for message in answer.roles]
        for status in statuses:
            if status.role == self.role:
                return status
        found = ", ".join(status.role for status in statuses)
        raise MismatchError(
            f"services.{self.role}.address {self.peer.address}: the {found} service answers there, "
            f"expected the {self.role}; correct the address"
        )

    def replicas(self) -> int:
        """Processes that share this client's calls, as far as its address tells."""
        return replicas_at(self.peer.address)

    def close(self) -> None:
        """Closes the channel."""
        self.peer.close()


class ActorClient(ServiceClient):
    """The policy."""

    role = Role.ACTOR

    def __init__(self, address: str, timeouts: TimeoutsConfig, credentials: Credentials = LOCAL) -> None:
        super().__init__(address, timeouts, credentials)
        self._stub = actor_pb2_grpc.ActorServiceStub(self.peer.channel)
        self._generate = ToldAtOnce(self.peer.channel, "/quartet.v1.ActorService/Generate", actor_pb2.GenerateResponse)

    def generate(
        self,
        run: str,
        step: int,
        leader_epoch: int,
        prompts: Sequence[Prompt],
        samples_per_prompt: int,
        sampling: SamplingParameters,
        seed: int,
        policy_version: int,
        first_sample: int = 0,
    ) -> PendingResult[int]:
        """Begins a step's generation; the result is the number of trajectories in the rollout stream.

        Of each prompt the samples ``first_sample`` to ``first_sample + samples_per_prompt - 1`` are drawn.
        """
        request = actor_pb2.GenerateRequest(
            run=run,
            step=step,
            leader_epoch=leader_epoch,
            prompt_ids=codec.tensor_to_proto(np.concatenate([prompt.token_ids for prompt in prompts])),
            prompt_lengths=codec.tensor_to_proto(np.array([len(p.token_ids) for p in prompts], np.int32)),
            prompts=[prompt.index for prompt in prompts],
            samples_per_prompt=samples_per_prompt,
            sampling=codec.sampling_to_proto(sampling),
            seed=seed,
            policy_version=policy_version,
            first_sample=first_sample,
        )
        pending = self.peer.start(self._generate, request, self.timeouts.generate_seconds, "Generate")
        return PendingResult(pending, lambda answer: int(answer.trajectories))

    def log_probs(self, batch: TokenBatch, temperature: float) -> FloatArray:
        """Log-probs under the current policy, float32 [response tokens]."""
        return self._begin_log_probs(batch, temperature, False, self.timeouts.score_seconds).result()

    def reference_log_probs(self, batch: TokenBatch, temperature: float) -> PendingResult[FloatArray]:
        """Begins to compute log-probs with the adapter off, float32 [response tokens]; after the generation in hand."""
        return self._begin_log_probs(
            batch, temperature, True, self.timeouts.generate_seconds + self.timeouts.score_seconds
        )

    def _begin_log_probs(
        self, batch: TokenBatch, temperature: float, reference: bool, timeout: float
    ) -> PendingResult[FloatArray]:
        request = actor_pb2.ActorServiceLogProbsRequest(temperature=temperature, reference=reference)
        codec.write_batch(request.batch, batch)
        tokens = int(batch.response_lengths.sum())
        pending = self.peer.start(self._stub.LogProbs, request, timeout, "LogProbs")
        return PendingResult(pending, lambda answer: codec.floats_from_proto(answer.log_probs, "log_probs", tokens))

    def update(
        self, run: str, step: int, leader_epoch: int, settings: OptimizationSettings, loss: PolicyLossSettings
    ) -> PendingResult[UpdateResult]:
        """Begins the step's update."""
        request = actor_pb2.ActorServiceUpdateRequest(
            run=run,
            step=step,
            leader_epoch=leader_epoch,
            optimization=codec.optimization_to_proto(settings),
            loss=codec.policy_loss_to_proto(loss),
        )
        pending = self.peer.start(self._stub.Update, request, self.timeouts.update_seconds, "Update")
        return PendingResult(pending, lambda answer: _update_result(answer, step))

    def save(
        self, run: str, leader_epoch: int, directory: str, kind: SaveKind, step: int | None = None
    ) -> PendingResult[list[SavedFile]]:
        """Begins a save below the run's directory, of the model as it is after ``step`` (None: as it is).

        It may have to wait for the generation in hand.
        """
        request = actor_pb2.ActorServiceSaveRequest(
            run=run, directory=directory, kind=codec.save_kind_to_proto(kind), leader_epoch=leader_epoch, step=step
        )
        timeout = self.timeouts.generate_seconds + self.timeouts.save_seconds
        return PendingResult(self.peer.start(self._stub.Save, request, timeout, "Save"), _saved_files)

    def restore(self, run: str, step: int, leader_epoch: int, directory: str) -> PendingResult[int]:
        """Begins to go back to a checkpoint below the run's directory, or to step 0; the result is the updates taken there."""
        request = actor_pb2.ActorServiceRestoreRequest(
            run=run, step=step, leader_epoch=leader_epoch, directory=directory
        )
        pending = self.peer.start(self._stub.Restore, request, self.timeouts.load_seconds, "Restore")
        return PendingResult(pending, lambda answer: int(answer.policy_version))


class CriticClient(ServiceClient):
    """The value model."""

    role = Role.CRITIC

    def __init__(self, address: str, timeouts: TimeoutsConfig, credentials: Credentials = LOCAL) -> None:
        super().__init__(address, timeouts, credentials)
        self._stub = critic_pb2_grpc.CriticServiceStub(self.peer.channel)

    def values(self, batch: TokenBatch, policy_version: int | None = None) -> PendingResult[FloatArray]:
        """Begins to compute values, float32 [response tokens].

        The result raises FailedPrecondition unless the value model has taken ``policy_version`` updates: a critic that was
        restarted in the middle of a step would answer as it was at its start.
        """
        request = critic_pb2.ValuesRequest()
        codec.write_batch(request.batch, batch)
        tokens = int(batch.response_lengths.sum())
        pending = self.peer.start(self._stub.Values, request, self.timeouts.score_seconds, "Values")

        def read(answer: critic_pb2.ValuesResponse) -> FloatArray:
            if policy_version not in (None, answer.policy_version):
                raise FailedPrecondition(
                    f"critic at {self.peer.address}: Values: the value model is version {answer.policy_version}, "
                    f"expected {policy_version}"
                )
            return codec.floats_from_proto(answer.values, "values", tokens)

        return PendingResult(pending, read)

    def update(
        self, run: str, step: int, leader_epoch: int, settings: OptimizationSettings, loss: ValueLossSettings
    ) -> PendingResult[UpdateResult]:
        """Begins the step's update."""
        request = critic_pb2.CriticServiceUpdateRequest(
            run=run,
            step=step,
            leader_epoch=leader_epoch,
            optimization=codec.optimization_to_proto(settings),
            loss=codec.value_loss_to_proto(loss),
        )
        pending = self.peer.start(self._stub.Update, request, self.timeouts.update_seconds, "Update")
        return PendingResult(pending, lambda answer: _update_result(answer, step))

    def save(
        self, run: str, leader_epoch: int, directory: str, kind: SaveKind, step: int | None = None
    ) -> PendingResult[list[SavedFile]]:
        """Begins a save below the run's directory, of the model as it is after ``step`` (None: as it is)."""
        request = critic_pb2.CriticServiceSaveRequest(
            run=run, directory=directory, kind=codec.save_kind_to_proto(kind), leader_epoch=leader_epoch, step=step
        )
        return PendingResult(
            self.peer.start(self._stub.Save, request, self.timeouts.save_seconds, "Save"), _saved_files
        )

    def restore(self, run: str, step: int, leader_epoch: int, directory: str) -> PendingResult[int]:
        """Begins to go back to a checkpoint below the run's directory, or to step 0; the result is the updates taken there."""
        request = critic_pb2.CriticServiceRestoreRequest(
            run=run, step=step, leader_epoch=leader_epoch, directory=directory
        )
        pending = self.peer.start(self._stub.Restore, request, self.timeouts.load_seconds, "Restore")
        return PendingResult(pending, lambda answer: int(answer.policy_version))


class RewardClient(ServiceClient):
    """The scorer."""

    role = Role.REWARD

    def __init__(
        self, address: str, timeouts: TimeoutsConfig, credentials: Credentials = LOCAL, patience: float = 0.0
    ) -> None:
        """``patience``: seconds beyond ``timeouts.score_seconds`` that a batch may take, for functions with time-outs of their own."""
        super().__init__(address, timeouts, credentials)
        self._deadline = timeouts.score_seconds + patience
        self._stub = reward_pb2_grpc.RewardServiceStub(self.peer.channel)

    def score(self, batch: TokenBatch, fields: Sequence[str] = ()) -> PendingResult[Scores]:
        """Begins to score. ``fields``: of each sequence the prompt's own fields as a JSON object, or nothing."""
        request = reward_pb2.ScoreRequest(fields=fields)
        codec.write_batch(request.batch, batch)
        pending = self.peer.start(self._stub.Score, request, self._deadline, "Score")
        return PendingResult(pending, lambda answer: codec.scores_from_proto(answer, len(batch)))


class ReferenceClient(ServiceClient):
    """The frozen initial policy."""

    role = Role.REFERENCE

    def __init__(self, address: str, timeouts: TimeoutsConfig, credentials: Credentials = LOCAL) -> None:
        super().__init__(address, timeouts, credentials)
        self._stub = reference_pb2_grpc.ReferenceServiceStub(self.peer.channel)

    def log_probs(self, batch: TokenBatch, temperature: float) -> PendingResult[FloatArray]:
        """Begins to compute log-probs, float32 [response tokens]."""
        request = reference_pb2.ReferenceServiceLogProbsRequest(temperature=temperature)
        codec.write_batch(request.batch, batch)
        tokens = int(batch.response_lengths.sum())
        pending = self.peer.start(self._stub.LogProbs, request, self.timeouts.score_seconds, "LogProbs")
        return PendingResult(pending, lambda answer: codec.floats_from_proto(answer.log_probs, "log_probs", tokens))


_REQUIRED_METRICS = ("optimizer_steps", "skipped_steps")


def _update_result(
    answer: actor_pb2.ActorServiceUpdateResponse | critic_pb2.CriticServiceUpdateResponse,
    step: int,
) -> UpdateResult:
    metrics = dict(answer.metrics)
    if answer.step != step:
        raise ServiceFailed(f"Update of step {step}: the answer is of step {answer.step}")
    for name in (*_REQUIRED_METRICS, *metrics):
        if not math.isfinite(metrics.get(name, math.nan)):
            raise ServiceFailed(
                f"Update of step {step}: metric {name} is {metrics.get(name)}, expected a finite number"
            )
    return UpdateResult(answer.step, answer.policy_version, metrics)


def _saved_files(
    answer: actor_pb2.ActorServiceSaveResponse | critic_pb2.CriticServiceSaveResponse,
) -> list[SavedFile]:
    return [codec.saved_file_from_proto(file) for file in answer.files]
