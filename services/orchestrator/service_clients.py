"""Clients of the run's model services, and the handshake that checks whether the services fit together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from quartet.buffer.connection import Redis, wait_for_server
from quartet.config.layout import generates_in_actor, model_roles
from quartet.config.models import MAX_MICRO_BATCH_TOKENS
from quartet.config.root import Config
from quartet.contract.generation import EngineProperties
from quartet.contract.status import TRAINED_ROLES, Role, ServiceStatus
from quartet.contract.trajectory import PromptSetContent
from quartet.contract.weights import ReferenceVersion
from quartet.errors import Cancelled, ConfigError, MismatchError, ServiceUnavailable
from quartet.model_files.tokenizer_check import first_difference
from quartet.rpc.call_interceptors import CallTracer
from quartet.rpc.clients import (
    ActorClient,
    CriticClient,
    EnvironmentStatusClient,
    GenerationClient,
    ReferenceClient,
    RewardClient,
)
from quartet.rpc.replica_set import FrozenReplicas, different_file
from quartet.rpc.security.credentials import LOCAL, Credentials
from quartet.run_directory.identity import Identity
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.control.progress import ProgressBoard
from quartet.services.orchestrator.control.run_control import RunControl
from quartet.services.orchestrator.rollout.generation import ActorGeneration, Generation, RepeatabilityNotes
from quartet.services.orchestrator.rollout.generator_pool import GeneratorPool
from quartet.services.orchestrator.rollout.scoring import ScoringServices
from quartet.services.orchestrator.rollout.scoring_queue import max_batches_in_flight
from quartet.services.orchestrator.telemetry.step_profiler import CallObserver

ServiceStatuses = dict[Role, ServiceStatus]

BUFFER_POLL_SECONDS = 0.1
"""Interval between status requests to a service that cannot reach the buffer."""


class ServiceClients:
    """Clients of the run's model services. ``critic`` is None for an estimator without one, ``reward`` for source none."""

    def __init__(
        self, config: Config, credentials: Credentials = LOCAL, note: Callable[[str], None] = lambda line: None
    ) -> None:
        """Connect to the services. ``quartet.preflight.check_separate_orchestrator`` checks that each has an address.

        ``note`` shows a line to the user.
        """
        self._config = config
        self._roles, self._credentials = model_roles(config), credentials
        timeouts = config.timeouts
        self.actor = ActorClient(self._address(Role.ACTOR), timeouts, credentials)
        self.reward: FrozenReplicas[RewardClient] | None = None
        if Role.REWARD in self._roles:
            # A source that is no model may take its time limit for each response, so a batch waits for the batches before it.
            rewards = config.services.reward.addresses
            source_seconds = max_batches_in_flight(len(rewards)) * config.reward.source_seconds(
                config.rollout.score_batch_size
            )
            self.reward = FrozenReplicas(
                Role.REWARD, rewards, lambda address: RewardClient(address, timeouts, credentials, source_seconds), note
            )
        self.critic: CriticClient | None = None
        self.reference: FrozenReplicas[ReferenceClient] | None = None
        """None if the actor answers as the reference, with its adapter off."""
        self.reference_version: ReferenceVersion | None = None
        """Version of the reference that scores, None if the reference is frozen."""
        self._environment: EnvironmentStatusClient | None = None
        if config.has_environment:
            self._environment = EnvironmentStatusClient(self._address(Role.ENVIRONMENT), timeouts, credentials)
        if Role.CRITIC in self._roles:
            self.critic = CriticClient(self._address(Role.CRITIC), timeouts, credentials)
        if Role.REFERENCE in self._roles:
            self.reference = FrozenReplicas(
                Role.REFERENCE,
                config.services.reference.addresses,
                lambda address: ReferenceClient(address, timeouts, credentials),
                note,
            )

    def observe(self, tracer: CallTracer) -> None:
        """Trace every call of the clients."""
        for client in self._clients():
            client.trace(tracer)

    @property
    def trained(self) -> list[ActorClient | CriticClient]:
        """Clients of the models that take updates and are saved."""
        return [self.actor] if self.critic is None else [self.actor, self.critic]

    def scoring(self, for_training: bool = True) -> ScoringServices:
        """Return the services that score a batch. Training may need values and the actor's log-probs, evaluation does not."""
        critic = self.critic if for_training else None
        temperature, dtype = self._config.rollout.temperature, self._config.actor.dtype
        scores_policy = for_training and self._config.algorithm.kl_log_probs == "trainer"
        return ScoringServices(
            self.reward,
            self.reference,
            critic,
            temperature,
            self.actor,
            dtype,
            scores_policy,
            lambda: self.reference_version,
        )

    def generation(self, note: Callable[[str], None], observe: CallObserver) -> Generation:
        """Return the run's generators: those in separate processes, or the actor. ``note`` shows a line to the user."""
        config = self._config
        if config.has_generators:
            return GeneratorPool(config, self.actor, note, observe, self._credentials)
        client = GenerationClient(self._address(Role.ACTOR), config.timeouts, self._credentials, Role.ACTOR)
        client.channel.tracer = self.actor.channel.tracer
        notes = RepeatabilityNotes(config, note)
        return ActorGeneration(client, self.actor, generates_in_actor(config), observe, notes)

    def wait_until_ready(self, waiting_for: Callable[[Role], None], alive: Callable[[], None]) -> ServiceStatuses:
        """Wait until every service responds, and return the statuses. Raises ConfigError if one cannot be reached.

        ``waiting_for`` receives each role in turn. ``alive`` may raise to end the wait.
        """
        statuses: ServiceStatuses = {}
        for client in self._clients():
            waiting_for(client.role)
            try:
                statuses[client.role] = client.wait_until_ready(alive)
            except ServiceUnavailable as error:
                # No step has been taken yet, so a wrong address is more likely than a failed service.
                raise ConfigError(str(error)) from None
        return statuses

    def wait_until_back(self, waiting_for: Callable[[Role], None]) -> ServiceStatuses:
        """Wait until every service responds again and reaches the buffer if it uses it, and return the statuses.

        Raises ServiceUnavailable if one does not come back.
        """
        statuses: ServiceStatuses = {}
        for client in self._clients():
            waiting_for(client.role)
            statuses[client.role] = self._wait_until_connected(client)
        return statuses

    def close_replicas(self) -> None:
        """Stop watching the replicas of frozen models."""
        for replicas in (self.reward, self.reference):
            if replicas is not None:
                replicas.close()

    def _wait_until_connected(self, client: _Client) -> ServiceStatus:
        timeout = self._config.timeouts.load_seconds
        deadline = time.monotonic() + timeout
        while (status := client.wait_until_ready(known=True)).buffer_unreachable:
            if time.monotonic() > deadline:
                addresses = ", ".join(self._addresses(client.role))
                raise ServiceUnavailable(
                    f"{client.role} at {addresses}: has not reached the rollout buffer within {timeout:g} s; repair the "
                    "network between them, or start the service with a buffer.url that it can reach"
                )
            time.sleep(BUFFER_POLL_SECONDS)
        return status

    def _clients(self) -> list[_Client]:
        # The critic is initialised from the reward model by default. With the reward first, an error names a key of the config.
        clients: list[_Client | None] = [
            self.actor,
            self.reward,
            self.critic,
            self.reference,
            self._environment,
        ]
        return [client for client in clients if client is not None]

    def _addresses(self, role: Role) -> tuple[str, ...]:
        addresses: tuple[str, ...] = getattr(self._config.services, role).addresses
        return addresses

    def _address(self, role: Role) -> str:
        return self._addresses(role)[0]


class _Client(Protocol):
    """The client of a role, or of its replicas."""

    role: Role

    def trace(self, tracer: CallTracer) -> None:
        """Trace every call."""

    def wait_until_ready(self, check_alive: Callable[[], None] = lambda: None, known: bool = False) -> ServiceStatus:
        """See ``ServiceClient.wait_until_ready``."""


class ServiceHandshake:
    """Handshake with the buffer and the services, at the start of a run and after every failure."""

    def __init__(
        self,
        config: Config,
        url: str,
        redis: Redis,
        service_clients: ServiceClients,
        generation: Generation,
        board: ProgressBoard,
        control: RunControl,
    ) -> None:
        self._config, self._url, self._redis, self._generation = config, url, redis, generation
        self._service_clients, self._board, self._control = service_clients, board, control
        self._stopped_before = control.stopping

    def start(self) -> ServiceStatuses:
        """Wait until all services are ready, and return their statuses. Raises ConfigError if they do not fit together."""
        statuses = self._service_clients.wait_until_ready(self._show_waiting, self._raise_if_stopping)
        try:
            self._wait_for_generators(self._raise_if_stopping)
        except ServiceUnavailable as error:
            # No step has been taken yet, so a wrong address is more likely than a failed generator.
            raise ConfigError(str(error)) from None
        self._check_agreement(statuses)
        return statuses

    def reconnect(self, before: ServiceStatuses, identity: Identity) -> ServiceStatuses:
        """Wait until all services are ready again, and return their statuses. Raises MismatchError if one has changed."""
        self._board.update(phase="waiting for redis")
        wait_for_server(self._redis, self._url, self._config.timeouts.load_seconds)
        statuses = self._service_clients.wait_until_back(self._show_waiting)
        self._wait_for_generators(lambda: None)
        check_unchanged(before, statuses)
        restarted = {role: status for role, status in statuses.items() if status.free_bytes != before[role].free_bytes}
        self.note_memory(restarted, identity)
        self._check_agreement(statuses)
        return statuses

    def note_memory(self, statuses: ServiceStatuses, identity: Identity) -> None:
        """Add notes on the services' memory, for the micro-batches of the run."""
        for role, status in statuses.items():
            for note in memory_notes(status, identity.micro_batch_tokens_of(role)):
                self._board.note(note)

    def _check_agreement(self, statuses: ServiceStatuses) -> None:
        check_agreement(statuses, self._config.run.name, needs_reference=not self._config.has_reference)

    def _wait_for_generators(self, alive: Callable[[], None]) -> None:
        if self._config.has_generators:
            self._show_waiting(Role.GENERATOR)
        self._generation.wait_until_ready(self._config.timeouts.load_seconds, alive)

    def _show_waiting(self, role: Role) -> None:
        self._board.update(phase=f"waiting for {role}")

    def _raise_if_stopping(self) -> None:
        # A stop requested from the previous orchestrator still ends with a saved policy, which needs the services.
        if self._control.stopping and not self._stopped_before:
            raise Cancelled("stopped while waiting for the services")


def model_files_of(statuses: ServiceStatuses) -> dict[str, str]:
    """Return the digests of the models' files, each from the service of its role. See ``ServiceStatus.model_files``."""
    return {
        name: digest
        for role, status in statuses.items()
        for name, digest in status.model_files.items()
        if name.partition(".")[0] == role
    }


def load_identity(
    config: Config,
    files: RunFiles,
    started: bool,
    micro_batch_tokens: Mapping[Role, int],
    prompt_sets: Mapping[str, PromptSetContent],
    model_files: Mapping[str, str],
    engines: Sequence[EngineProperties] = (),
) -> Identity:
    """Return the identity of a run that has ``started``, or create one.

    ``micro_batch_tokens`` and ``model_files`` are those of the services.

    A role that the identity does not know yet, such as the critic of a fork, is added. ``engines`` are recorded: what those of
    the run declare now. Raises ConfigError if the identity is missing, or the config does not match it.
    """
    stored = Identity.read(files.identity)
    if not started:
        identity = Identity.new(config, micro_batch_tokens, prompt_sets)
    elif stored is None:
        raise ConfigError(f"run {files.identity}: is missing; put the file back, or start a new run")
    else:
        stored.check(config, files.root, prompt_sets)
        stored.check_models(model_files, files.root)
        identity = stored.with_micro_batch_tokens(micro_batch_tokens)
    identity = identity.with_model_files(model_files)
    identity = replace(identity, engines=tuple(engines))
    if identity != stored:
        identity.write(files.identity)
    return identity


def check_agreement(statuses: ServiceStatuses, run: str, needs_reference: bool) -> None:
    """Check that the services share a vocabulary, that no trained model is another run's, and that a reference exists.

    Raises MismatchError.
    """
    actor = statuses[Role.ACTOR]
    for role, other in statuses.items():
        if role is Role.ENVIRONMENT and other.tokenizer_fingerprint != actor.tokenizer_fingerprint:
            raise MismatchError(
                f"services.environment.address: the environment {other.model} there has another vocabulary "
                f"({other.vocabulary_size} ids) than actor.model {actor.model} ({actor.vocabulary_size} ids); start it with this "
                "run's actor.model, because its observations are token ids"
            )
        if other.tokenizer_fingerprint != actor.tokenizer_fingerprint:
            # Known if this machine has the files of both models.
            difference = first_difference(Path(actor.model), Path(other.model))
            raise MismatchError(
                f"{role}.model {other.model}: its vocabulary ({other.vocabulary_size} ids) is not that of actor.model "
                f"{actor.model} ({actor.vocabulary_size} ids){difference and f': {difference}'}; expected the same tokenizer, "
                f"because a token id must mean the same to both; give a {role} model trained with the actor's tokenizer"
            )
        # A reward function has no embedding: an id that its tokenizer does not know simply has no text.
        if other.parameters and other.vocabulary_size < actor.vocabulary_size:
            raise MismatchError(
                f"{role}.model {other.model}: embeds {other.vocabulary_size} token ids, actor.model {actor.model} can generate "
                f"{actor.vocabulary_size}; resize the {role} model's embeddings to at least as many"
            )
        if role in TRAINED_ROLES and other.policy_version and other.run != run:
            raise MismatchError(
                f"services.{role}.address: the {role} there has taken {other.policy_version} updates of run "
                f"{other.run}, which this run would overwrite; restart that service, or give another address"
            )
    if needs_reference and Role.REFERENCE not in statuses and not actor.answers_as_reference:
        raise MismatchError(
            "services.actor.address: the actor there has no adapter, so it cannot serve as the reference; "
            "start it with this config's actor.lora, or set reference.model"
        )


def check_unchanged(before: ServiceStatuses, now: ServiceStatuses) -> None:
    """Check that every service still has the same model as ``before``. Raises MismatchError."""
    for role, status in now.items():
        for name in (
            "model",
            "dtype",
            "parameters",
            "tokenizer_fingerprint",
            "vocabulary_size",
            "answers_as_reference",
        ):
            value, expected = getattr(status, name), getattr(before[role], name)
            if value != expected:
                raise MismatchError(
                    f"services.{role}: came back with {name} {value!r}, expected {expected!r}; start it with this run's config"
                )
        if different := different_file(status, before[role]):
            raise MismatchError(
                f"services.{role}: came back with another {different}; restore the file, and restart it"
            )


def check_lengths(statuses: ServiceStatuses, longest_prompt: int, max_response_tokens: int) -> None:
    """Check that the longest sequence fits every model. Raises ConfigError."""
    longest = longest_prompt + max_response_tokens
    for role, status in statuses.items():
        if 0 < status.max_sequence_tokens < longest:
            raise ConfigError(
                f"rollout.max_response_tokens {max_response_tokens}: with the longest prompt, of "
                f"{longest_prompt} tokens, exceeds the {status.max_sequence_tokens} positions of {role}.model "
                f"{status.model}; lower it, or data.max_prompt_tokens"
            )


def memory_notes(status: ServiceStatus, tokens: int) -> list[str]:
    """Return notes on the memory of a service whose updates use micro-batches of ``tokens``; none if memory is ample."""
    if not status.free_bytes:
        return []
    memory = f"{status.token_bytes / 2**20:.2g} MiB per token, {status.free_bytes / 2**30:.2g} GiB free at its start"
    if tokens > status.micro_batch_tokens_held:
        return [
            f"{status.role}: the run's updates use micro-batches of {tokens} tokens, but its memory holds "
            f"{status.micro_batch_tokens_held} ({memory}); free memory for it, or it may run out"
        ]
    checkpointing = ", with gradient checkpointing" if status.gradient_checkpointing else ""
    if checkpointing or tokens < MAX_MICRO_BATCH_TOKENS:
        return [f"{status.role}: updates use micro-batches of {tokens} tokens{checkpointing} ({memory})"]
    return []


def wait_for_all(calls: Sequence[Future[Any]], on_end: Callable[[], None] = lambda: None) -> None:
    """Wait until every call has ended. Raises the first failure as soon as it arrives, even if other calls are in flight.

    ``on_end`` is called on this thread each time that calls have ended, and once at the start.
    """
    waiting = list(calls)
    while True:
        ended = [call for call in waiting if call.done()]
        for call in ended:
            call.result()
        on_end()
        waiting = [call for call in waiting if call not in ended]
        if not waiting:
            return
        wait(waiting, return_when=FIRST_COMPLETED)
