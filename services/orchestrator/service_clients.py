"""Clients of the run's model services."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

from quartet.config.layout import generates_in_actor, model_roles
from quartet.config.root import Config
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.weights import ReferenceVersion
from quartet.errors import ConfigError, ServiceUnavailable
from quartet.rpc.call_interceptors import CallTracer
from quartet.rpc.clients import (
    ActorClient,
    CriticClient,
    EnvironmentStatusClient,
    GenerationClient,
    ReferenceClient,
    RewardClient,
)
from quartet.rpc.replica_set import FrozenReplicas
from quartet.rpc.security.credentials import LOCAL, Credentials
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
            batches = max_batches_in_flight(len(rewards))
            if config.evaluation.generators:
                # Those of an evaluation are in flight beside those of a step.
                batches *= 2
            source_seconds = batches * config.reward.source_seconds(config.rollout.score_batch_size)
            self.reward = FrozenReplicas(
                Role.REWARD, rewards, lambda address: RewardClient(address, timeouts, credentials, source_seconds), note
            )
        self.critic: CriticClient | None = None
        self.reference: FrozenReplicas[ReferenceClient] | None = None
        """None if the actor answers as the reference, with its adapter off."""
        self.reference_version: ReferenceVersion | None = None
        """Version of the reference that scores, None if the reference is frozen."""
        self._environment: EnvironmentStatusClient | None = None
        if config.has_environment_service:
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
            self._config.rollout.router_replay,
            beside_training=not for_training and self._config.evaluation.generators > 0,
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
        """Wait until the service responds and return its status."""


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
