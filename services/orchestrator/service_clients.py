"""The model services that a run works with, and whether they fit together."""

from __future__ import annotations

import time
from collections.abc import Callable

from quartet.config import Config
from quartet.errors import ConfigError, MismatchError, ServiceUnavailable
from quartet.rpc.call_observers import CallTracer
from quartet.rpc.clients import ActorClient, CriticClient, ReferenceClient, RewardClient, ServiceClient
from quartet.rpc.security.credentials import LOCAL, Credentials
from quartet.services.orchestrator.rollout.scoring import AdapterOff, ReferencePolicy, ScoringServices, at_once
from quartet.topology import roles_of
from quartet.types import TRAINED_ROLES, Role, ServiceStatus

Statuses = dict[Role, ServiceStatus]

POLL = 0.1
"""Seconds between looks at a service that is cut off from the buffer."""


class ServiceClients:
    """Clients of the run's model services. ``critic`` is None for an estimator without one."""

    def __init__(self, config: Config, credentials: Credentials = LOCAL) -> None:
        """Every role has an address: see ``quartet.preflight.check_apart``."""
        self._config = config
        self._roles = roles_of(config)
        self.actor = ActorClient(self._address(Role.ACTOR), config.timeouts, credentials)
        # Batches wait for one another at a function that is called once for each response.
        patience = at_once(1) * config.reward.function_timeout_seconds(config.rollout.score_batch_size)
        self.reward = RewardClient(self._address(Role.REWARD), config.timeouts, credentials, patience)
        self.critic: CriticClient | None = None
        self._reference: ReferenceClient | None = None
        if Role.CRITIC in self._roles:
            self.critic = CriticClient(self._address(Role.CRITIC), config.timeouts, credentials)
        if Role.REFERENCE in self._roles:
            self._reference = ReferenceClient(self._address(Role.REFERENCE), config.timeouts, credentials)

    def observe(self, tracer: CallTracer) -> None:
        """Lets ``tracer`` take notice of every call of theirs."""
        for client in self._clients():
            client.peer.tracer = tracer

    @property
    def reference(self) -> ReferencePolicy:
        """A service of its own, or the actor with its adapter off."""
        return self._reference or AdapterOff(self.actor)

    @property
    def trained(self) -> list[ActorClient | CriticClient]:
        """Those that take updates and are saved."""
        return [self.actor] if self.critic is None else [self.actor, self.critic]

    def scoring(self, with_critic: bool = True) -> ScoringServices:
        """Those that score: for training with the critic, where there is one."""
        critic = self.critic if with_critic else None
        return ScoringServices(self.reward, self.reference, critic, self._config.rollout.temperature)

    def wait_until_ready(self, waiting_for: Callable[[Role], None], alive: Callable[[], None]) -> Statuses:
        """What every service says of itself, once it answers. Raises ConfigError when one cannot be reached."""
        statuses: Statuses = {}
        for client in self._clients():
            waiting_for(client.role)
            try:
                statuses[client.role] = client.wait_until_ready(alive)
            except ServiceUnavailable as error:
                # Nothing has begun yet, so this is something to mend rather than a failure of the run.
                raise ConfigError(str(error)) from None
        return statuses

    def wait_until_back(self, waiting_for: Callable[[Role], None]) -> Statuses:
        """What every service says of itself, once it answers again and reaches the buffer, where it uses it.

        Raises ServiceUnavailable when one does not come back.
        """
        statuses: Statuses = {}
        for client in self._clients():
            waiting_for(client.role)
            statuses[client.role] = self._wait_until_connected(client)
        return statuses

    def _wait_until_connected(self, client: ServiceClient) -> ServiceStatus:
        timeout = self._config.timeouts.load_seconds
        deadline = time.monotonic() + timeout
        while (status := client.wait_until_ready(known=True)).buffer_unreachable:
            if time.monotonic() > deadline:
                raise ServiceUnavailable(
                    f"{client.role} at {client.peer.address}: has not reached the rollout buffer within {timeout:g} s; "
                    "mend the network between them, or start the service with the buffer.url that it can reach"
                )
            time.sleep(POLL)
        return status

    def _clients(self) -> list[ServiceClient]:
        # The reward before the critic, which starts from it unless told otherwise: an error is to name a key of the file.
        clients: list[ServiceClient | None] = [self.actor, self.reward, self.critic, self._reference]
        return [client for client in clients if client is not None]

    def _address(self, role: Role) -> str:
        address: str = getattr(self._config.services, role).address
        return address


def check_agreement(statuses: Statuses, run: str, needs_reference: bool) -> None:
    """Raises MismatchError unless token ids mean the same to all, no trained model is another run's, and there is a reference."""
    actor = statuses[Role.ACTOR]
    for role, other in statuses.items():
        if other.tokenizer_fingerprint != actor.tokenizer_fingerprint:
            raise MismatchError(
                f"{role}.model {other.model}: its vocabulary ({other.vocabulary_size} ids) is not that of actor.model "
                f"{actor.model} ({actor.vocabulary_size} ids), expected the same tokenizer: a token id would mean "
                f"two things; give a {role} model trained with the actor's tokenizer"
            )
        # A function has no embedding: an id that its tokenizer does not know has no text, and that is all.
        if other.parameters and other.vocabulary_size < actor.vocabulary_size:
            raise MismatchError(
                f"{role}.model {other.model}: embeds {other.vocabulary_size} token ids, actor.model {actor.model} can draw "
                f"{actor.vocabulary_size}; resize the {role} model's embeddings to at least as many"
            )
        if role in TRAINED_ROLES and other.policy_version and other.run != run:
            raise MismatchError(
                f"services.{role}.address: the {role} there has taken {other.policy_version} updates of run "
                f"{other.run}; another run would lose them, so restart that service, or give an address of its own"
            )
    if needs_reference and Role.REFERENCE not in statuses and not actor.answers_as_reference:
        raise MismatchError(
            "services.actor.address: the actor there has no adapter to take off, so it cannot be the reference; "
            "start it with this config's actor.lora, or set reference.model"
        )


def check_same(before: Statuses, now: Statuses) -> None:
    """Raises MismatchError unless every service that came back is what it was, so that the run may trust it."""
    for role, status in now.items():
        for name in (
            "model",
            "dtype",
            "parameters",
            "tokenizer_fingerprint",
            "vocabulary_size",
            "answers_as_reference",
        ):
            found, expected = getattr(status, name), getattr(before[role], name)
            if found != expected:
                raise MismatchError(
                    f"services.{role}: came back with {name} {found!r}, had {expected!r}; start it with this run's config"
                )


def check_lengths(statuses: Statuses, longest_prompt: int, max_response_tokens: int) -> None:
    """Raises ConfigError when the longest sequence does not fit one of the models."""
    longest = longest_prompt + max_response_tokens
    for role, status in statuses.items():
        if 0 < status.max_sequence_tokens < longest:
            raise ConfigError(
                f"rollout.max_response_tokens {max_response_tokens}: with the longest prompt, of "
                f"{longest_prompt} tokens, more than the {status.max_sequence_tokens} positions of {role}.model "
                f"{status.model}; lower it, or data.max_prompt_tokens"
            )
