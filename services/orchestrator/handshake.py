"""Handshake with the buffer and the services: whether they are ready, fit together, and are those of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from quartet.buffer.connection import wait_for_server
from quartet.config.models import MAX_MICRO_BATCH_TOKENS
from quartet.config.root import Config
from quartet.contract.generation import EngineProperties
from quartet.contract.status import TRAINED_ROLES, Role, ServiceStatus
from quartet.contract.trajectory import PromptSetContent
from quartet.errors import Cancelled, ConfigError, MismatchError, ServiceUnavailable
from quartet.model_files.tokenizer_check import first_difference
from quartet.rpc.replica_set import different_file
from quartet.run_directory.identity import Identity
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.context import RunContext
from quartet.services.orchestrator.service_clients import ServiceStatuses

NOTE_AFTER_SECONDS = 5.0
"""Seconds after which a note names a service that does not answer."""


class ServiceHandshake:
    """Handshake with the buffer and the services, at the start of a run and after every failure."""

    def __init__(self, run: RunContext) -> None:
        self._run, self._config, self._board = run, run.config, run.board
        self._stopped_before = run.control.stopping
        self._waiting: tuple[Role, float] | None = None
        """The service that is waited for, and since when, until a note says so."""

    def start(self) -> ServiceStatuses:
        """Wait until all services are ready, and return their statuses. Raises ConfigError if they do not fit together."""
        statuses = self._run.clients.wait_until_ready(self._show_waiting, self._while_waiting)
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
        wait_for_server(self._run.redis, self._run.url, self._config.timeouts.load_seconds)
        statuses = self._run.clients.wait_until_back(self._show_waiting)
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
        if self._config.has_agents:
            # No token ids reach the agents.
            statuses = {role: status for role, status in statuses.items() if role is not Role.ENVIRONMENT}
        check_agreement(statuses, self._config.run.name, needs_reference=not self._config.has_reference)

    def _wait_for_generators(self, alive: Callable[[], None]) -> None:
        if self._config.has_generators:
            self._show_waiting(Role.GENERATOR)
        self._run.generation.wait_until_ready(self._config.timeouts.load_seconds, alive)

    def _show_waiting(self, role: Role) -> None:
        self._board.update(phase=f"waiting for {role}")
        self._waiting = role, time.monotonic()

    def _while_waiting(self) -> None:
        self._raise_if_stopping()
        if self._waiting is not None and time.monotonic() - self._waiting[1] > NOTE_AFTER_SECONDS:
            role, self._waiting = self._waiting[0], None
            addresses = ", ".join(getattr(self._config.services, role).addresses)
            limit = self._config.timeouts.load_seconds
            self._board.note(
                f"waiting up to {limit:g} s for services.{role}.address {addresses}, which does not answer yet; start it, or "
                "correct the address"
            )

    def _raise_if_stopping(self) -> None:
        # A stop requested from the previous orchestrator still ends with a saved policy, which needs the services.
        if self._run.control.stopping and not self._stopped_before:
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
        if stored is not None and config.has_traffic:
            # The same run, which has not committed a step: its users do not repeat their sessions.
            identity = replace(identity, id=stored.id)
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
