"""Logic of the critic service, without gRPC."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from quartet.buffer.experience_store import ExperienceStore
from quartet.config.deployment import OffloadConfig
from quartet.config.models import CriticConfig
from quartet.contract.arrays import FloatArray
from quartet.contract.status import Role
from quartet.contract.trajectory import TokenBatch
from quartet.contract.update import OptimizationSettings, UpdateResult, ValueLossSettings
from quartet.models.forward.batching import MicroBatch
from quartet.models.forward.scoring import forward_values, response_values
from quartet.models.training.update_memory import UpdateMemory, measure_value
from quartet.models.training.updates import update_value
from quartet.models.weights.loading import check_critic, load_critic
from quartet.models.weights.lora import Adapter
from quartet.models.weights.snapshot import Writer
from quartet.models.workers.workers import SINGLE, Workers
from quartet.services.memory_budget import UpdateLimits
from quartet.services.trainable_model import TrainableModel
from quartet.system.failpoints import failpoint


class Critic(TrainableModel):
    """The value model and its optimizer."""

    role = Role.CRITIC
    saving = "critic.saving"

    def __init__(
        self,
        config: CriticConfig,
        model: str,
        device: str,
        run_directory: Path,
        experience: Callable[[str], ExperienceStore],
        seed: int = 0,
        update_threads: int | None = None,
        limits: UpdateLimits | None = None,
        workers: Workers = SINGLE,
        offload: OffloadConfig | None = None,
    ) -> None:
        """Load ``model``. ``experience`` returns the experience store of a run by its name.

        See TrainableModel for the other arguments. Raises ModelError, ConfigError.
        """
        self._config, self._experience = config, experience
        super().__init__(config, model, device, run_directory, seed, update_threads, limits, workers, offload)

    def _read(self, source: str | Path) -> Any:
        return load_critic(source, self._config.dtype, self._device, self._workers)

    def _check(self, source: str | Path) -> None:
        check_critic(source, self._model)

    def _measure(self, longest: int, limits: UpdateLimits) -> UpdateMemory:
        return measure_value(self._model, longest, self._workers, self._offload.optimizer)

    def _outputs(self, micro_batch: MicroBatch) -> Any:
        return forward_values(self._model, micro_batch)

    def _adapted(self) -> Any:
        # The value head is small and untrained, so all of it is trained, even with an adapter.
        return self._model.backbone

    def _snapshot(self, adapter: Adapter | None, merged: bool) -> Writer:
        all_weights = adapter is None or merged
        writer: Writer = self._model.snapshot(adapter) if all_weights else self._model.snapshot_adapter(adapter)
        return writer

    def _snapshot_rest(self, dtype: Any) -> Writer:
        writer: Writer = self._model.snapshot_head(dtype)
        return writer

    def _whole_parameters(self) -> list[Any]:
        adapted = [] if self._adapter is None else self._adapter.parameters()
        return [*adapted, *self._model.head.parameters()]

    def _read_rest(self, checkpoint: Path) -> None:
        super()._read_rest(checkpoint)
        self._model.read_head(checkpoint)

    def values(self, batch: TokenBatch) -> FloatArray:
        """Return the value of the state in which each response token was drawn, float32 [response tokens].

        Raises FailedPrecondition after a failed update.
        """
        self._updates.check_not_broken()
        failpoint("critic.scoring")
        return response_values(self._model, batch, self._config.max_forward_tokens, self._workers)

    def update(
        self, run: str, step: int, leader_epoch: int, settings: OptimizationSettings, loss: ValueLossSettings
    ) -> UpdateResult:
        """Apply the value update of one step from the experience in the buffer. Idempotent by (run, step)."""

        def apply() -> dict[str, float]:
            experience = self._workers.agreed(lambda: self._experience(run).load(step, for_policy=False))
            tokens, checkpointing = self._budget.resolve(settings.micro_batch_tokens)
            with self._passes_of_update(checkpointing):
                metrics = update_value(self._model, self._optimizer, experience, settings, loss, tokens, self._workers)
            if settings.num_epochs:
                self._tokens["trained"] += experience.policy_tokens
            return metrics

        return self._update_once(run, step, leader_epoch, apply)
