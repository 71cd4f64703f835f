"""ServiceHandshake the services: what each says of itself, whether they fit together, and which run they are to take part in."""

from __future__ import annotations

from collections.abc import Mapping

from quartet.buffer.connection import Redis, wait_for_server
from quartet.config import Config
from quartet.errors import Cancelled, ConfigError
from quartet.run_directory.identity import Identity
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.checkpointing.step_artifacts import memory_notes
from quartet.services.orchestrator.control.progress import ProgressBoard
from quartet.services.orchestrator.control.run_control import Control
from quartet.services.orchestrator.service_clients import ServiceClients, Statuses, check_agreement, check_same
from quartet.types import Role


class ServiceHandshake:
    """Waits for the buffer and the services, at the start of a run and after every failure."""

    def __init__(
        self,
        config: Config,
        url: str,
        redis: Redis,
        service_clients: ServiceClients,
        board: ProgressBoard,
        control: Control,
    ) -> None:
        self._config, self._url, self._redis = config, url, redis
        self._service_clients, self._board, self._control = service_clients, board, control
        self._asked_before = control.stopping

    def first(self) -> Statuses:
        """What every service says of itself, once all are there and fit together. Raises ConfigError where one cannot be used."""
        statuses = self._service_clients.wait_until_ready(self._show_waiting, self._raise_if_stopping)
        self._check_agreement(statuses)
        return statuses

    def again(self, before: Statuses, identity: Identity) -> Statuses:
        """The same of services that may have gone away. Raises MismatchError when one is not what it was ``before``."""
        self._board.update(phase="waiting for redis")
        wait_for_server(self._redis, self._url, self._config.timeouts.load_seconds)
        statuses = self._service_clients.wait_until_back(self._show_waiting)
        check_same(before, statuses)
        anew = {role: status for role, status in statuses.items() if status.free_bytes != before[role].free_bytes}
        self.tell_of_memory(anew, identity)
        self._check_agreement(statuses)
        return statuses

    def tell_of_memory(self, statuses: Statuses, identity: Identity) -> None:
        """Notes what a user should know of the services' memory, with the micro-batches that the run has."""
        for role, status in statuses.items():
            for note in memory_notes(status, identity.micro_batch_tokens_of(role)):
                self._board.note(note)

    def _check_agreement(self, statuses: Statuses) -> None:
        check_agreement(statuses, self._config.run.name, needs_reference=not self._config.has_reference)

    def _show_waiting(self, role: Role) -> None:
        self._board.update(phase=f"waiting for {role}")

    def _raise_if_stopping(self) -> None:
        # A stop that the orchestrator before this one was asked for is for the end of its step: the policy is to be saved.
        if self._control.stopping and not self._asked_before:
            raise Cancelled("stopped while waiting for the services")


def identify(config: Config, files: RunFiles, begun: bool, micro_batch_tokens: Mapping[Role, int]) -> Identity:
    """Who the run is: as it was, where it has ``begun``, with what the services found for what is not known yet.

    Raises ConfigError for a config that another run had.
    """
    found = Identity.read(files.identity)
    if begun:
        if found is None:
            raise ConfigError(f"run {files.identity}: is missing; put the file back, or start a new run")
        found.check(config, files.root)
        identity = found.with_micro_batch_tokens(micro_batch_tokens)
    else:
        identity = Identity.new(config, micro_batch_tokens)
    if identity != found:
        identity.write(files.identity)
    return identity
