"""The value model as a plain class: what the critic service does, without gRPC."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from quartet.buffer.experience import ExperienceStore
from quartet.config import CriticConfig
from quartet.errors import FailedPrecondition
from quartet.failpoints import failpoint
from quartet.files import checkpoint_of, confined, describe_files
from quartet.models.forward import max_positions
from quartet.models.freezing import freeze_parameters
from quartet.models.loading import count_parameters, load_critic, load_tokenizer, tokenizer_fingerprint
from quartet.models.lora import add_adapter
from quartet.models.optimizer import OPTIMIZER_FILE, create_optimizer, load_optimizer, snapshot_optimizer
from quartet.models.scoring import response_values
from quartet.models.snapshot import Writer, write_model
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
        seed: int = 0,
    ) -> None:
        """Loads ``model``. ``experience`` gives access to a run's sealed experience, by its name; ``seed`` is where an adapter
        starts. Raises ModelError.
        """
        self._config, self._name, self._device, self._experience = config, model, device, experience
        self._root, self._seed = run_directory, seed
        self._tokenizer = load_tokenizer(model)
        self._fingerprint = tokenizer_fingerprint(self._tokenizer)
        self._updates = UpdateLog()
        self._load(None)
        self._vocabulary = int(self._model.get_input_embeddings().weight.shape[0])
        self._parameters = count_parameters(self._model)
        self._positions = max_positions(self._model) or 0

    def _load(self, checkpoint: Path | None) -> None:
        """The value model with its adapter and optimizer, initial or as a checkpoint holds them. Raises ModelError.

        What was there before goes first, as there may be no room for two: after an error there is none.
        """
        for part in ("_model", "_adapter", "_optimizer"):
            vars(self).pop(part, None)
        config, lora, optimizer = self._config, self._config.lora, self._config.optimizer
        base = self._name if checkpoint is None or lora else checkpoint
        self._model = load_critic(base, config.dtype, self._device)
        # The head is small and begins at nothing learned: it is trained in full beside an adapter.
        self._adapter = (
            add_adapter(self._model.backbone, self._name, lora.rank, lora.alpha, lora.target_modules, self._seed)
            if lora
            else None
        )
        freeze_parameters(self._model, config.freeze)
        self._optimizer = create_optimizer(
            self._model, config.learning_rate, optimizer.betas, optimizer.eps, optimizer.weight_decay
        )
        if checkpoint is not None:
            if self._adapter is not None:
                self._adapter.read(checkpoint)
                self._model.read_head(checkpoint)
            load_optimizer(self._optimizer, checkpoint / OPTIMIZER_FILE)

    def values(self, batch: TokenBatch) -> FloatArray:
        """Value of the state in which each response token was drawn, float32 [response tokens].

        Raises FailedPrecondition when an update broke off.
        """
        self._updates.check_whole()
        failpoint("critic.scoring")
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

    def snapshot(
        self, run: str, leader_epoch: int, directory: str, kind: SaveKind, step: int | None = None
    ) -> Callable[[], list[SavedFile]]:
        """Copies the value model, and its optimizer for a checkpoint; what it gives writes them below the run's directory, once.

        The copy is in host memory, and may be written on any thread while the value model goes on. With an adapter a checkpoint
        holds the adapter and the value head, and a model is the merged one. Raises InvalidRequest for a directory elsewhere,
        FailedPrecondition when the model is not at ``step``, when it has learned in another run, when another orchestrator leads,
        when an update broke off, or when there is no adapter to save. The writing raises StorageFailed.
        """
        self._updates.check_save(run, leader_epoch, step)
        target = confined(self._root, directory)
        # A critic starts from a directory with a tokenizer; what it writes can be started from too.
        writers: list[Writer] = [self._tokenizer.save_pretrained]
        if self._adapter is not None and kind is not SaveKind.MODEL:
            writers.append(self._model.snapshot_adapter(self._adapter))
        elif kind is SaveKind.ADAPTER:
            raise FailedPrecondition("save of the adapter: this critic has none; set critic.lora, or save the model")
        else:
            writers.append(self._model.snapshot(self._adapter))
        if kind is SaveKind.CHECKPOINT:
            writers += [lambda _: failpoint("critic.saving"), snapshot_optimizer(self._optimizer)]

        def write() -> list[SavedFile]:
            write_model(target, *writers)
            return describe_files(self._root, target)

        return write

    def restore(self, run: str, step: int, leader_epoch: int, directory: str) -> None:
        """Goes back to a checkpoint below the run's directory, or to the initial value model for step 0.

        Raises InvalidRequest, FailedPrecondition for a lower leader epoch, ModelError for a checkpoint that is broken.
        """
        checkpoint = checkpoint_of(self._root, step, directory)
        self._updates.restore(run, step, leader_epoch, lambda: self._load(checkpoint))

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
            max_sequence_tokens=self._positions,
            run=self._updates.run,
            step=self._updates.step,
            leader_epoch=self._updates.leader_epoch,
            broken=self._updates.broken,
        )

    @property
    def policy_version(self) -> int:
        """Updates taken."""
        return self._updates.policy_version
