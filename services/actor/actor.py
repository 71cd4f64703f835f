"""The policy as a plain class: what the actor service does, without gRPC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quartet.buffer.experience import ExperienceStore
from quartet.buffer.rollouts import RolloutStream
from quartet.config import ActorConfig
from quartet.errors import FailedPrecondition, InvalidRequest
from quartet.failpoints import failpoint
from quartet.files import checkpoint_of, confined, describe_files
from quartet.models.engine import TorchEngine
from quartet.models.forward import max_positions
from quartet.models.freezing import freeze_parameters
from quartet.models.loading import (
    count_parameters,
    load_causal_lm,
    load_tokenizer,
    snapshot_model,
    stop_token_ids,
    tokenizer_fingerprint,
)
from quartet.models.lora import add_adapter
from quartet.models.optimizer import OPTIMIZER_FILE, create_optimizer, load_optimizer, snapshot_optimizer
from quartet.models.scoring import response_log_probs
from quartet.models.snapshot import Writer, write_model
from quartet.models.training import update_policy
from quartet.models.update_log import UpdateLog
from quartet.types import (
    FloatArray,
    GenerationRequest,
    OptimizationSettings,
    PolicyLossSettings,
    Role,
    SamplingParameters,
    SavedFile,
    SaveKind,
    ServiceStatus,
    TokenBatch,
    UpdateResult,
)

FLUSH = 8
"""Finished trajectories that may wait for one another before they go to the stream; scoring starts that much later."""


@dataclass(frozen=True, slots=True)
class BufferAccess:
    """Where a run's trajectories go and its experience comes from."""

    rollouts: RolloutStream
    experience: ExperienceStore


class Actor:
    """The policy, its optimizer and its generation engine."""

    def __init__(
        self,
        config: ActorConfig,
        device: str,
        max_concurrent: int,
        run_directory: Path,
        buffer: Callable[[str], BufferAccess],
        seed: int = 0,
    ) -> None:
        """Loads the model. ``buffer`` gives access to the buffer of a run, by its name; ``seed`` is where an adapter starts.

        Raises ModelError.
        """
        self._config, self._device, self._buffer = config, device, buffer
        self._root, self._max_concurrent, self._seed = run_directory, max_concurrent, seed
        self._tokenizer = load_tokenizer(config.model)
        self._fingerprint = tokenizer_fingerprint(self._tokenizer)
        self._updates = UpdateLog()
        self._load(None)
        self._vocabulary = int(self._model.get_input_embeddings().weight.shape[0])
        self._parameters = count_parameters(self._model)
        self._positions = max_positions(self._model) or 0

    def _load(self, checkpoint: Path | None) -> None:
        """The policy with its adapter, optimizer and engine, initial or as a checkpoint holds them. Raises ModelError.

        What was there before goes first, as there may be no room for two: after an error there is none.
        """
        for part in ("_model", "_adapter", "_optimizer", "_engine"):
            vars(self).pop(part, None)
        config, lora, optimizer = self._config, self._config.lora, self._config.optimizer
        base = config.model if checkpoint is None or lora else checkpoint
        self._model = load_causal_lm(base, config.dtype, self._device)
        self._adapter = (
            add_adapter(self._model, config.model, lora.rank, lora.alpha, lora.target_modules, self._seed)
            if lora
            else None
        )
        freeze_parameters(self._model, config.freeze)
        self._optimizer = create_optimizer(
            self._model, config.learning_rate, optimizer.betas, optimizer.eps, optimizer.weight_decay
        )
        self._engine = TorchEngine(self._model, stop_token_ids(self._model, self._tokenizer), self._max_concurrent)
        if checkpoint is not None:
            if self._adapter is not None:
                self._adapter.read(checkpoint)
            load_optimizer(self._optimizer, checkpoint / OPTIMIZER_FILE)

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingParameters,
        seed: int,
        leader_epoch: int,
        policy_version: int,
        cancelled: Callable[[], bool],
    ) -> tuple[int, int]:
        """Generates one step's trajectories into the rollout stream, each as it finishes.

        Returns (trajectories, response tokens). Raises FailedPrecondition when the policy is not of ``policy_version``.
        """
        self._updates.fence(leader_epoch)
        self._updates.check_whole()
        if policy_version != self._updates.policy_version:
            raise FailedPrecondition(
                f"generate with policy version {policy_version}: this policy is version {self._updates.policy_version}; "
                "restart the actor for a new run"
            )
        for request in requests:
            if request.prompt_ids.min() < 0 or request.prompt_ids.max() >= self._vocabulary:
                raise InvalidRequest(f"prompt {request.id}: token ids must lie in 0..{self._vocabulary - 1}")
        stream = self._buffer(requests[0].id.run).rollouts
        tokens = 0
        finished = []
        for trajectory in self._engine.generate(requests, sampling, seed, policy_version, cancelled):
            if tokens == 0:
                failpoint("actor.generating")
            tokens += len(trajectory.response_ids)
            finished.append(trajectory)
            if len(finished) == FLUSH:
                stream.append(finished, leader_epoch)
                finished = []
        if finished:
            stream.append(finished, leader_epoch)
        return len(requests), tokens

    def log_probs(self, batch: TokenBatch, temperature: float, reference: bool = False) -> FloatArray:
        """Log-probs under the current policy, or under the ``reference``, which is the policy without its adapter.

        float32 [response tokens]. Raises FailedPrecondition when there is no adapter to turn off, or an update broke off.
        """
        self._updates.check_whole()
        if not reference:
            return response_log_probs(self._model, batch, temperature, self._config.micro_batch_tokens)
        if self._adapter is None:
            raise FailedPrecondition(
                "log-probs as the reference: this actor has no adapter to turn off; set actor.lora, or ask a reference service"
            )
        with self._adapter.off():
            return response_log_probs(self._model, batch, temperature, self._config.micro_batch_tokens)

    def update(
        self, run: str, step: int, leader_epoch: int, settings: OptimizationSettings, loss: PolicyLossSettings
    ) -> UpdateResult:
        """Takes one step's PPO update from the sealed experience. Idempotent by (run, step)."""

        def apply() -> dict[str, float]:
            experience = self._buffer(run).experience.load(step)
            return update_policy(
                self._model, self._optimizer, experience, settings, loss, self._config.micro_batch_tokens
            )

        return self._updates.once(run, step, leader_epoch, apply)

    def snapshot(
        self, run: str, leader_epoch: int, directory: str, kind: SaveKind, step: int | None = None
    ) -> Callable[[], list[SavedFile]]:
        """Copies the policy, and its optimizer for a checkpoint; what it gives writes them below the run's directory, once.

        The copy is in host memory, and may be written on any thread while the policy goes on. With an adapter a checkpoint holds
        the adapter alone, and a model is the merged one. Raises InvalidRequest for a directory elsewhere, FailedPrecondition when
        the model is not at ``step``, when it has learned in another run, when another orchestrator leads, when an update broke
        off, or when there is no adapter to save. The writing raises StorageFailed.
        """
        self._updates.check_save(run, leader_epoch, step)
        target = confined(self._root, directory)
        writers: list[Writer] = [self._tokenizer.save_pretrained]
        if self._adapter is not None and kind is not SaveKind.MODEL:
            writers.append(self._adapter.snapshot())
        elif kind is SaveKind.ADAPTER:
            raise FailedPrecondition("save of the adapter: this actor has none; set actor.lora, or save the model")
        else:
            writers.append(snapshot_model(self._model, self._adapter))
        if kind is SaveKind.CHECKPOINT:
            writers += [lambda _: failpoint("actor.saving"), snapshot_optimizer(self._optimizer)]

        def write() -> list[SavedFile]:
            write_model(target, *writers)
            return describe_files(self._root, target)

        return write

    def restore(self, run: str, step: int, leader_epoch: int, directory: str) -> None:
        """Goes back to a checkpoint below the run's directory, or to the initial policy for step 0.

        Raises InvalidRequest, FailedPrecondition for a lower leader epoch, ModelError for a checkpoint that is broken.
        """
        checkpoint = checkpoint_of(self._root, step, directory)
        self._updates.restore(run, step, leader_epoch, lambda: self._load(checkpoint))

    def status(self) -> ServiceStatus:
        """What the actor says of itself."""
        return ServiceStatus(
            role=Role.ACTOR,
            model=self._config.model,
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
            answers_as_reference=self._config.lora is not None,
            broken=self._updates.broken,
        )

    @property
    def policy_version(self) -> int:
        """Updates taken."""
        return self._updates.policy_version
