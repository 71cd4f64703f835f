"""The updates of a step: what actor and critic are asked, with the learning rates that users have changed."""

from __future__ import annotations

from quartet.config import Config, TrainedModelConfig
from quartet.rpc.clients import PendingResult
from quartet.run_directory.identity import Identity
from quartet.services.orchestrator.algorithm.update_request import begin_update, learning_rate_at
from quartet.services.orchestrator.control.live_settings import Changes
from quartet.services.orchestrator.control.progress import ProgressBoard
from quartet.services.orchestrator.service_clients import ServiceClients
from quartet.services.orchestrator.telemetry.timeline import Timeline
from quartet.types import Role, UpdateResult


class Updates:
    """Asks the trained models to learn from what is sealed."""

    def __init__(
        self,
        config: Config,
        identity: Identity,
        service_clients: ServiceClients,
        changes: Changes,
        board: ProgressBoard,
        timeline: Timeline,
    ) -> None:
        """``identity`` says how the run's mini-batches are split."""
        self._config, self._identity, self._service_clients, self._changes = config, identity, service_clients, changes
        self._board, self._timeline = board, timeline

    def begin(self, step: int, leader_epoch: int) -> dict[Role, PendingResult[UpdateResult]]:
        """Begins the updates of ``step``, all at once."""
        self._board.update(phase="update")
        rates = self.learning_rates(step)
        calls = {
            client.role: begin_update(
                client,
                self._config,
                step,
                leader_epoch,
                rates[client.role],
                self._identity.micro_batch_tokens_of(client.role),
            )
            for client in self._service_clients.trained
        }
        for role, call in calls.items():
            self._timeline.watch(role, "update", call)
        return calls

    def learning_rates(self, step: int) -> dict[Role, float]:
        """Of each trained model in ``step``: by its schedule, and as users have changed it."""
        return {client.role: self._learning_rate(client.role, step) for client in self._service_clients.trained}

    def _learning_rate(self, role: Role, step: int) -> float:
        trained: TrainedModelConfig = getattr(self._config, role)
        return learning_rate_at(self._config, trained, step) * self._changes.learning_rate_factor(role, step)
