"""The value model as a plain class: what the critic service does, without gRPC."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from quartet.buffer.experience import ExperienceStore
from quartet.config import CriticConfig
from quartet.files import confined, describe_files
from quartet.models.forward import max_positions
from quartet.models.loading import count_parameters, load_critic, load_tokenizer, tokenizer_fingerprint
from quartet.models.optimizer import create_optimizer, save_optimizer
from quartet.models.scoring import response_values
from quartet.models.training import update_value
from quartet.models.update_log import UpdateLog
from quartet.types import (
    FloatArray,
    OptimizationSettings,
    Role,
    SavedFile,
    SaveKind,
    ServiceStatus,
    TokenBatch,
    UpdateResult,
    ValueLossSettings,
)


class Critic:
    """The value model and its optimizer."""

    def __init__(
        self,
        config: CriticConfig,
        model: str,
        device: str,
        run_directory: Path,
        experience: Callable[[str], ExperienceStore],
    ) -> None:
        """Loads ``model``. ``experience`` gives access to a run's sealed experience, by its name. Raises ModelError."""
        self._config, self._name, self._device, self._experience = config, model, device, experience
        self._root = run_directory
        self._model = load_critic(model, config.dtype, device)
        optimizer = config.optimizer
        self._optimizer = create_optimizer(
            self._model, config.learning_rate, optimizer.betas, optimizer.eps, optimizer.weight_decay
        )
        self._updates = UpdateLog()
        self._vocabulary = int(self._model.get_input_embeddings().weight.shape[0])
        self._parameters = count_parameters(self._model)
        self._tokenizer = load_tokenizer(model)
        self._fingerprint = tokenizer_fingerprint(self._tokenizer)

    def values(self, batch: TokenBatch) -> FloatArray:
        """Value of the state in which each response token was drawn, float32 [response tokens]."""
        return response_values(self._model, batch, self._config.micro_batch_tokens)

    def update(
        self, run: str, step: int, leader_epoch: int, settings: OptimizationSettings, loss: ValueLossSettings
    ) -> UpdateResult:
        """Takes one step's value update from the sealed experience. Idempotent by (run, step)."""

        def apply() -> dict[str, float]:
            experience = self._experience(run).load(step)
            return update_value(
                self._model, self._optimizer, experience, settings, loss, self._config.micro_batch_tokens
            )

        return self._updates.once(run, step, leader_epoch, apply)

    def save(self, run: str, leader_epoch: int, directory: str, kind: SaveKind) -> list[SavedFile]:
        """Writes the value model, and its optimizer in a checkpoint, below the run's directory.

        Raises InvalidRequest for a directory elsewhere, FailedPrecondition when the model has learned in another
        run, when another orchestrator leads, or when an update broke off.
        """
        self._updates.check_save(run, leader_epoch)
        target = confined(self._root, directory)
        self._model.save(target)
        # A critic starts from a directory with a tokenizer; what it writes can be started from too.
        self._tokenizer.save_pretrained(target)
        if kind is SaveKind.CHECKPOINT:
            save_optimizer(self._optimizer, target / "optimizer.safetensors")
        return describe_files(self._root, target)

    def status(self) -> ServiceStatus:
        """What the critic says of itself."""
        return ServiceStatus(
            role=Role.CRITIC,
            model=self._name,
            device=self._device,
            dtype=self._config.dtype,
            parameters=self._parameters,
            policy_version=self._updates.policy_version,
            tokenizer_fingerprint=self._fingerprint,
            vocabulary_size=self._vocabulary,
            max_sequence_tokens=max_positions(self._model) or 0,
            run=self._updates.run,
            step=self._updates.step,
        )

    @property
    def policy_version(self) -> int:
        """Updates taken."""
        return self._updates.policy_version
