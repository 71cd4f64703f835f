"""Typed clients of all services: records of ``quartet.contract`` in and out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any, Literal

from quartet.codec.generation import (
    WeightUpdate,
    generation_batch_to_proto,
    generation_progress_from_proto,
    trajectories_from_proto,
    weight_update_to_proto,
)
from quartet.codec.messages import from_message, to_message
from quartet.codec.scoring import scores_from_proto
from quartet.codec.tensors import floats_from_proto
from quartet.codec.updates import update_request_to_proto, update_result_from_proto
from quartet.codec.weights import WEIGHT_SERVICE, weights_from_bytes
from quartet.config.deployment import TimeoutsConfig
from quartet.contract.arrays import FloatArray
from quartet.contract.control import Progress, Setting, SettingChange
from quartet.contract.generation import GenerationBatch
from quartet.contract.profile import ProfileSummary
from quartet.contract.status import GeneratorInfo, ProcessStatus, Role, ServiceStatus
from quartet.contract.trajectory import Scores, TokenBatch
from quartet.contract.update import (
    OptimizationSettings,
    PolicyLossSettings,
    UpdateRequest,
    UpdateResult,
    ValueLossSettings,
)
from quartet.contract.weights import ReferenceVersion, RestoreRequest, SavedFile, SaveKind, SaveRequest, WeightTransfer
from quartet.errors import FailedPrecondition, MismatchError
from quartet.rpc.call_interceptors import CallTracer
from quartet.rpc.security.credentials import LOCAL, Credentials
from quartet.rpc.service_channel import ServiceChannel
from quartet.v1 import (
    actor_pb2,
    actor_pb2_grpc,
    critic_pb2,
    critic_pb2_grpc,
    generation_pb2_grpc,
    orchestrator_pb2,
    orchestrator_pb2_grpc,
    profile_pb2,
    profile_pb2_grpc,
    reference_pb2,
    reference_pb2_grpc,
    reward_pb2,
    reward_pb2_grpc,
    update_pb2,
    weights_pb2,
)
from quartet.weight_transfer.messages import Message, WeightsRequest


class ServiceClient:
    """Base class of the clients of model services."""

    role: Role

    def __init__(self, address: str, timeouts: TimeoutsConfig, credentials: Credentials = LOCAL) -> None:
        self.channel = ServiceChannel(self.role, address, credentials)
        self.timeouts = timeouts

    def wait_until_ready(self, check_alive: Callable[[], None] = lambda: None, known: bool = False) -> ServiceStatus:
        """Wait until the service responds and return its status. Raises MismatchError if another role responds.

        See ``ServiceChannel.wait_until_ready`` for the arguments and the other errors.
        """
        return self._own_status(self.channel.wait_until_ready(self.timeouts.load_seconds, check_alive, known))

    def _own_status(self, process: ProcessStatus) -> ServiceStatus:
        for status in process.roles:
            if status.role == self.role:
                return status
        others = ", ".join(status.role for status in process.roles)
        raise MismatchError(
            f"services.{self.role}.address {self.channel.address}: expected the {self.role}, got the {others} service; "
            "correct the address"
        )

    def status(self) -> ServiceStatus:
        """Return the status of the service. Raises the error of the call."""
        return self._own_status(self.channel.status())

    def start_status(self) -> Future[tuple[ProcessStatus, ServiceStatus]]:
        """Start to ask for the status of the process and of the service. The result raises as ``status``."""
        return self.channel.start_status(lambda process: (process, self._own_status(process)))

    def trace(self, tracer: CallTracer) -> None:
        """Trace every call of this client."""
        self.channel.tracer = tracer

    def close(self) -> None:
        """Close the channel."""
        self.channel.close()


class TrainableClient(ServiceClient):
    """Client of a service with a trainable model: actor or critic."""

    @property
    @abstractmethod
    def _stub(self) -> Any:
        """The stub, with Update, Save and Restore."""

    def _start_update(
        self,
        run: str,
        step: int,
        leader_epoch: int,
        settings: OptimizationSettings,
        loss: PolicyLossSettings | ValueLossSettings,
    ) -> Future[UpdateResult]:
        request = update_request_to_proto(UpdateRequest(run, step, leader_epoch, settings, loss))
        return self.channel.start(
            self._stub.Update,
            request,
            self.timeouts.update_seconds,
            "Update",
            lambda response: update_result_from_proto(response, step),
        )

    def save(
        self, run: str, leader_epoch: int, directory: str, kind: SaveKind, step: int | None = None
    ) -> Future[list[SavedFile]]:
        """Start a save below the run's directory. ``step`` is the step that the model must have; None accepts any step."""
        request = to_message(update_pb2.SaveRequest, SaveRequest(run, directory, kind, leader_epoch, step))
        return self.channel.start(
            self._stub.Save,
            request,
            self._save_seconds(),
            "Save",
            lambda response: [from_message(SavedFile, file, "files") for file in response.files],
        )

    def restore(self, run: str, step: int, leader_epoch: int, directory: str) -> Future[int]:
        """Start the restore of a checkpoint below the run's directory; step 0 is the initial model.

        The result is the number of updates that the restored model has taken.
        """
        request = to_message(update_pb2.RestoreRequest, RestoreRequest(run, step, directory, leader_epoch))
        return self.channel.start(
            self._stub.Restore,
            request,
            self.timeouts.load_seconds,
            "Restore",
            lambda response: int(response.policy_version),
        )

    def _save_seconds(self) -> float:
        return self.timeouts.save_seconds


class ActorClient(TrainableClient):
    """Client of the policy."""

    role = Role.ACTOR

    def __init__(self, address: str, timeouts: TimeoutsConfig, credentials: Credentials = LOCAL) -> None:
        super().__init__(address, timeouts, credentials)
        self._actor = actor_pb2_grpc.ActorServiceStub(self.channel.grpc_channel)

    @property
    def _stub(self) -> actor_pb2_grpc.ActorServiceStub:
        return self._actor

    def log_probs(self, batch: TokenBatch, temperature: float) -> FloatArray:
        """Return log-probs under the current policy, float32 [response tokens]."""
        return self._start_log_probs(batch, temperature, False, self.timeouts.score_seconds).result()

    def versioned_log_probs(self, batch: TokenBatch, temperature: float) -> Future[tuple[FloatArray, int]]:
        """Start log-probs under the current policy, float32 [response tokens]. The result has the policy's version, too."""
        request = _log_probs_request(batch, temperature, False)
        tokens = int(batch.response_lengths.sum())
        return self.channel.start(
            self._actor.LogProbs,
            request,
            self.timeouts.score_seconds,
            "LogProbs",
            lambda response: (floats_from_proto(response.log_probs, "log_probs", tokens), int(response.policy_version)),
        )

    def log_probs_of_version(self, batch: TokenBatch, temperature: float, policy_version: int) -> Future[FloatArray]:
        """Start log-probs under the policy, float32 [response tokens]. They wait for a running generation.

        The result raises FailedPrecondition unless the policy is of ``policy_version``, as ``CriticClient.values``.
        """
        request = _log_probs_request(batch, temperature, False)
        tokens = int(batch.response_lengths.sum())
        seconds = self.timeouts.generate_seconds + self.timeouts.score_seconds

        def convert(response: Any) -> FloatArray:
            if response.policy_version != policy_version:
                raise FailedPrecondition(
                    f"actor at {self.channel.address}: LogProbs: the policy is version {response.policy_version}, "
                    f"expected {policy_version}"
                )
            return floats_from_proto(response.log_probs, "log_probs", tokens)

        return self.channel.start(self._actor.LogProbs, request, seconds, "LogProbs", convert)

    def reference_log_probs(self, batch: TokenBatch, temperature: float) -> Future[FloatArray]:
        """Start log-probs with the adapter disabled, float32 [response tokens]. They wait for a running generation."""
        seconds = self.timeouts.generate_seconds + self.timeouts.score_seconds
        return self._start_log_probs(batch, temperature, True, seconds)

    def _start_log_probs(
        self, batch: TokenBatch, temperature: float, reference: bool, timeout: float
    ) -> Future[FloatArray]:
        request = _log_probs_request(batch, temperature, reference)
        tokens = int(batch.response_lengths.sum())
        return self.channel.start(
            self._actor.LogProbs,
            request,
            timeout,
            "LogProbs",
            lambda response: floats_from_proto(response.log_probs, "log_probs", tokens),
        )

    def update(
        self, run: str, step: int, leader_epoch: int, settings: OptimizationSettings, loss: PolicyLossSettings
    ) -> Future[UpdateResult]:
        """Start the policy update of a step."""
        return self._start_update(run, step, leader_epoch, settings, loss)

    def _save_seconds(self) -> float:
        # A save may wait for a running generation.
        return self.timeouts.generate_seconds + self.timeouts.save_seconds


def _log_probs_request(batch: TokenBatch, temperature: float, reference: bool) -> Any:
    return to_message(actor_pb2.ActorServiceLogProbsRequest, batch=batch, temperature=temperature, reference=reference)


class GenerationClient(ServiceClient):
    """Client of a generation engine: a generator, or the actor that hosts one."""

    def __init__(
        self, address: str, timeouts: TimeoutsConfig, credentials: Credentials = LOCAL, role: Role = Role.GENERATOR
    ) -> None:
        """``role`` is that of the process at ``address``: the generator's or the actor's."""
        self.role = role
        super().__init__(address, timeouts, credentials)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self.channel.grpc_channel)

    def generate(
        self,
        batch: GenerationBatch,
        waits_for: int = 0,
        on_progress: Callable[[int, int], None] = lambda trajectories, response_tokens: None,
    ) -> Future[int]:
        """Start a generation. Its trajectories go to the rollout stream, and the result is their number.

        ``waits_for``: earlier calls that must end first.
        ``on_progress`` receives the numbers of trajectories and of their response tokens so far, on another thread.
        """

        def on_message(message: Any) -> None:
            if (progress := generation_progress_from_proto(message)) is not None:
                on_progress(*progress)

        request = generation_batch_to_proto(batch)
        timeout = self.timeouts.generate_seconds * (1 + waits_for)
        attributes = {
            "quartet.policy_version": batch.policy_version,
            "quartet.step": batch.step,
            "quartet.trajectories": len(batch.requests),
        }
        return self.channel.start_stream(
            self._stub.Generate, request, timeout, "Generate", trajectories_from_proto, attributes, on_message
        )

    def update_weights(self, update: WeightUpdate) -> Future[WeightTransfer]:
        """Start to load a policy version into the generator."""
        request = weight_update_to_proto(update)
        return self.channel.start(
            self._stub.UpdateWeights,
            request,
            self.timeouts.load_seconds,
            "UpdateWeights",
            lambda response: from_message(WeightTransfer, response.transfer, "transfer"),
            {"quartet.policy_version": update.policy_version},
            lambda response: {"quartet.weight_bytes": int(response.transfer.bytes)},
        )


class CriticClient(TrainableClient):
    """Client of the value model."""

    role = Role.CRITIC

    def __init__(self, address: str, timeouts: TimeoutsConfig, credentials: Credentials = LOCAL) -> None:
        super().__init__(address, timeouts, credentials)
        self._critic = critic_pb2_grpc.CriticServiceStub(self.channel.grpc_channel)

    @property
    def _stub(self) -> critic_pb2_grpc.CriticServiceStub:
        return self._critic

    def values(self, batch: TokenBatch, policy_version: int | None = None) -> Future[FloatArray]:
        """Start to compute values, float32 [response tokens].

        The result raises FailedPrecondition unless the value model has taken ``policy_version`` updates. A critic that restarted
        in the middle of a step would otherwise respond with its initial weights.
        """
        request = to_message(critic_pb2.ValuesRequest, batch=batch)
        tokens = int(batch.response_lengths.sum())

        def convert(response: Any) -> FloatArray:
            if policy_version not in (None, response.policy_version):
                raise FailedPrecondition(
                    f"critic at {self.channel.address}: Values: the value model is version {response.policy_version}, "
                    f"expected {policy_version}"
                )
            return floats_from_proto(response.values, "values", tokens)

        return self.channel.start(self._critic.Values, request, self.timeouts.score_seconds, "Values", convert)

    def update(
        self, run: str, step: int, leader_epoch: int, settings: OptimizationSettings, loss: ValueLossSettings
    ) -> Future[UpdateResult]:
        """Start the value update of a step."""
        return self._start_update(run, step, leader_epoch, settings, loss)


class RewardClient(ServiceClient):
    """Client of the reward source."""

    role = Role.REWARD

    def __init__(
        self, address: str, timeouts: TimeoutsConfig, credentials: Credentials = LOCAL, source_seconds: float = 0.0
    ) -> None:
        """``source_seconds``: time that functions and scorers may need for a batch, in addition to ``timeouts.score_seconds``."""
        super().__init__(address, timeouts, credentials)
        self._seconds = timeouts.score_seconds + source_seconds
        self._stub = reward_pb2_grpc.RewardServiceStub(self.channel.grpc_channel)

    def score(
        self, batch: TokenBatch, fields: Sequence[str] = (), weights: Mapping[str, float] | None = None
    ) -> Future[Scores]:
        """Start to score. ``fields``: the fields of each sequence's prompt as a JSON object, or empty.

        ``weights`` of an ensemble's parts by name; None for those of the service's config.
        """
        request = to_message(
            reward_pb2.ScoreRequest, batch=batch, fields=fields, weights=weights or {}, updates=batch.updates
        )
        return self.channel.start(
            self._stub.Score, request, self._seconds, "Score", lambda response: scores_from_proto(response, len(batch))
        )


class ReferenceClient(ServiceClient):
    """Client of the reference."""

    role = Role.REFERENCE

    def __init__(self, address: str, timeouts: TimeoutsConfig, credentials: Credentials = LOCAL) -> None:
        super().__init__(address, timeouts, credentials)
        self._stub = reference_pb2_grpc.ReferenceServiceStub(self.channel.grpc_channel)

    def log_probs(
        self, batch: TokenBatch, temperature: float, version: ReferenceVersion | None = None
    ) -> Future[FloatArray]:
        """Start to compute log-probs, float32 [response tokens], under a ``version``, None for the initial model.

        The result raises MismatchError if another version has computed them.
        """
        request = to_message(
            reference_pb2.ReferenceServiceLogProbsRequest, batch=batch, temperature=temperature, version=version
        )
        step = version.step if version else 0
        tokens = int(batch.response_lengths.sum())

        def log_probs_of(response: Any) -> FloatArray:
            if response.version_step != step:
                raise MismatchError(
                    f"{self.role} at {self.channel.address}: LogProbs of version {response.version_step}, expected {step}; use a "
                    "reference service that supports reference.sync_steps"
                )
            return floats_from_proto(response.log_probs, "log_probs", tokens)

        return self.channel.start(self._stub.LogProbs, request, self.timeouts.score_seconds, "LogProbs", log_probs_of)


class EnvironmentStatusClient(ServiceClient):
    """Client of the status of the environment service. ``EnvironmentClient`` makes its other calls."""

    role = Role.ENVIRONMENT


class OrchestratorClient:
    """Client of a run's orchestrator. All calls respond at once, also during a step."""

    def __init__(self, address: str, timeout: float, credentials: Credentials = LOCAL) -> None:
        """``timeout``: seconds for each call, except ``watch``."""
        self.address = address
        self._channel = ServiceChannel(Role.ORCHESTRATOR, address, credentials)
        self._stub = orchestrator_pb2_grpc.OrchestratorServiceStub(self._channel.grpc_channel)
        self._timeout = timeout

    def progress(self) -> Progress:
        """Return the progress of the run."""
        response = self._call(self._stub.GetProgress, orchestrator_pb2.GetProgressRequest(), "GetProgress")
        return from_message(Progress, response.progress, "progress")

    def watch(self, after_step: int) -> Iterator[Progress]:
        """Yield each committed step after ``after_step`` and each change of phase, until the run ends."""
        request = orchestrator_pb2.WatchProgressRequest(after_step=after_step)
        for response in self._channel.stream(self._stub.WatchProgress, request, "WatchProgress"):
            yield from_message(Progress, response.progress, "progress")

    def command(self, command: Literal["Stop", "Pause", "Resume", "Checkpoint"]) -> None:
        """Send a command without arguments. The run obeys it after the current step."""
        self._call(getattr(self._stub, command), getattr(orchestrator_pb2, f"{command}Request")(), command)

    def roll_back(self, step: int) -> None:
        """Request a rollback to the checkpoint of ``step`` after the current step."""
        self._call(self._stub.RollBack, orchestrator_pb2.RollBackRequest(step=step), "RollBack")

    def profile(self, steps: int) -> None:
        """Request a profile of the next ``steps`` steps."""
        self._call(self._stub.Profile, orchestrator_pb2.ProfileRequest(steps=steps), "Profile")

    def settings(self) -> list[Setting]:
        """Return the settings that can change during the run."""
        response = self._call(self._stub.GetSettings, orchestrator_pb2.GetSettingsRequest(), "GetSettings")
        return [from_message(Setting, each, "settings") for each in response.settings]

    def change_settings(self, values: Mapping[str, float], user: str) -> list[SettingChange]:
        """Change settings from the next step on: all of them, or none if one is refused. ``user`` is the requester's name."""
        request = orchestrator_pb2.ChangeSettingsRequest(values=values, user=user)
        response = self._call(self._stub.ChangeSettings, request, "ChangeSettings")
        return [from_message(SettingChange, each, "changes") for each in response.changes]

    def generators(self) -> list[GeneratorInfo]:
        """Return the generators in separate processes that the run has found; none if the actor generates."""
        response = self._call(self._stub.GetGenerators, orchestrator_pb2.GetGeneratorsRequest(), "GetGenerators")
        return [from_message(GeneratorInfo, each, "generators") for each in response.generators]

    def close(self) -> None:
        """Close the channel. A call in progress ends with NoResponse, a later one with Cancelled."""
        self._channel.close()

    def _call(self, method: Any, request: Any, title: str) -> Any:
        return self._channel.call(method, request, self._timeout, title)


class ProfileClient:
    """Client of the profiles of one process."""

    def __init__(self, role: Role, address: str, timeout: float, credentials: Credentials = LOCAL) -> None:
        """``timeout``: seconds for each call, which waits for the work in progress."""
        self._channel, self._timeout = ServiceChannel(role, address, credentials), timeout
        self._stub = profile_pb2_grpc.ProfileServiceStub(self._channel.grpc_channel)

    def start(self, profile: str) -> Future[None]:
        """Start to start a profile. The result raises the error of the call."""
        request = profile_pb2.StartProfileRequest(profile=profile)
        return self._channel.start(self._stub.StartProfile, request, self._timeout, "StartProfile", lambda _: None)

    def take(self, profile: str) -> Iterator[ProfileSummary | bytes | None]:
        """End a profile. Yield None once it has ended, then its summary and the chunks of its trace."""
        request = profile_pb2.TakeProfileRequest(profile=profile)
        with closing(self._channel.stream(self._stub.TakeProfile, request, "TakeProfile", self._timeout)) as responses:
            for response in responses:
                part = response.WhichOneof("part")
                if part == "summary":
                    yield from_message(ProfileSummary, response.summary, "summary")
                else:
                    yield response.chunk if part else None

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


class WeightClient:
    """Client of a process that serves weights: the actor or a generator. See ``WeightPeer``."""

    def __init__(self, role: Role, address: str, credentials: Credentials = LOCAL) -> None:
        """``role`` is the role expected at ``address``."""
        self._channel = ServiceChannel(role, address, credentials)
        # The responses are read by the codec, which does not copy chunks.
        self._get_weights = self._channel.grpc_channel.unary_stream(
            f"/{WEIGHT_SERVICE}/GetWeights", weights_pb2.GetWeightsRequest.SerializeToString, None
        )

    @property
    def address(self) -> str:
        """Role and address of the process, for messages."""
        return f"{self._channel.name} at {self._channel.address}"

    @property
    def host(self) -> str:
        """Host of the process."""
        return self._channel.address.rpartition(":")[0].strip("[]")

    def get_weights(self, request: WeightsRequest, timeout: float) -> Iterator[Message]:
        """Yield the manifest, then the chunks of a version. ``timeout``: seconds for the whole stream.

        Raises FailedPrecondition if the process does not have the version, InvalidRequest for a malformed message. Closing the
        iterator cancels the call.
        """
        message = to_message(weights_pb2.GetWeightsRequest, request)
        with closing(self._channel.stream(self._get_weights, message, "GetWeights", timeout)) as responses:
            for response in responses:
                yield weights_from_bytes(response)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()
