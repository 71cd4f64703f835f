"""Base class of actor and critic: a model that takes updates, is saved while it works, and is restored from checkpoints."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import structlog

from quartet.config.deployment import OffloadConfig
from quartet.config.models import TrainedModelConfig
from quartet.contract.leader_fence import LeaderFence
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.update import UpdateResult
from quartet.contract.weights import SavedFile, SaveKind
from quartet.errors import FailedPrecondition, ModelError
from quartet.model_files.sharded_files import is_sharded
from quartet.models.forward.batching import MicroBatch
from quartet.models.forward.model_capabilities import keeps_states, max_positions, vocabulary_size
from quartet.models.matmul_peak import matmul_peak
from quartet.models.torch_settings import deterministic_update, torch_threads
from quartet.models.training.activation_checkpointing import activation_checkpointing
from quartet.models.training.compiled_layers import compiled_layers, try_compiled
from quartet.models.training.optimizer import (
    OPTIMIZER_FILE,
    MasterWeightAdamW,
    create_optimizer,
    load_optimizer,
    load_optimizer_state,
    snapshot_optimizer,
)
from quartet.models.training.update_memory import UpdateMemory
from quartet.models.weights.loading import count_parameters, freeze_parameters
from quartet.models.weights.lora import Adapter, add_adapter, matrices_without_adapter
from quartet.models.weights.snapshot import Writer, write_model
from quartet.models.weights.tokenizer import load_tokenizer, tokenizer_fingerprint
from quartet.models.workers.workers import SINGLE, Workers
from quartet.services.memory_budget import MemoryBudget, UpdateLimits, find_budget, free_bytes
from quartet.services.update_log import UpdateLog
from quartet.system.durable_files import checkpoint_path, confine_path, describe_files
from quartet.system.failpoints import failpoint

if TYPE_CHECKING:
    from quartet.models.workers.group_saves import GroupSaves

log = structlog.get_logger()


class TrainableModel(ABC):
    """A model with its optimizer, an optional LoRA adapter, and a log of its updates."""

    role: ClassVar[Role]
    saving: ClassVar[str]
    """Failpoint between the files of a checkpoint."""

    def __init__(
        self,
        config: TrainedModelConfig,
        model: str,
        device: str,
        run_directory: Path,
        seed: int,
        update_threads: int | None,
        limits: UpdateLimits | None = None,
        workers: Workers = SINGLE,
        offload: OffloadConfig | None = None,
    ) -> None:
        """Load ``model``. Saves go below ``run_directory``; ``seed`` initialises an adapter.

        ``update_threads``: CPU threads of an update; None uses the process's number. ``limits``: limits of the updates for the
        memory measurement; None skips it. ``workers``: the ranks that share the model. ``offload``: what stays in host memory.
        Raises ModelError, ConfigError.
        """
        self._workers, self._limits, self._offload = workers, limits, offload or OffloadConfig()
        self._group: GroupSaves | None = None
        self._model_config, self._name, self._device = config, model, device
        self._root, self._seed, self._update_threads = run_directory, seed, update_threads
        self._tokenizer = load_tokenizer(model)
        self._fingerprint = tokenizer_fingerprint(self._tokenizer)
        self._updates = UpdateLog()
        self._tokens: Counter[str] = Counter()
        self._load(None)
        self._compiles = config.compile and not keeps_states(self._model)
        self._vocabulary = vocabulary_size(self._model)
        self._positions = max_positions(self._model) or 0
        self._budget = self._find_budget()
        self._peak_flops = matmul_peak(device, config.dtype, update_threads)
        if self._compiles:
            self._compile()
        elif config.compile:
            log.warning("compile is off: layers of this model keep a state", role=self.role, model=model)

    @abstractmethod
    def _read(self, source: str | Path) -> Any:
        """Load the model from a checkpoint, or this rank's part of it. Raises ModelError."""

    @abstractmethod
    def _check(self, source: str | Path) -> None:
        """Check the model that the ranks have loaded in parts. Raises ModelError."""

    @abstractmethod
    def _adapted(self) -> Any:
        """Return the part of the model that gets an adapter."""

    @abstractmethod
    def _snapshot(self, adapter: Adapter | None, merged: bool) -> Writer:
        """Copy the weights: all of them, with the adapter ``merged`` if there is one, or only the adapter's weights."""

    @abstractmethod
    def _snapshot_rest(self, dtype: Any) -> Writer:
        """Copy what a model has besides the weights of ``_adapted``, which are of ``dtype``: its config, and a critic's head."""

    @abstractmethod
    def _measure(self, longest: int, limits: UpdateLimits) -> UpdateMemory:
        """Measure the memory of an update with sequences of at most ``longest`` tokens."""

    @abstractmethod
    def _outputs(self, micro_batch: MicroBatch) -> Any:
        """Return what an update computes from a micro-batch: log-probs or values of its response tokens."""

    @abstractmethod
    def _whole_parameters(self) -> list[Any]:
        """Return the trained parameters that every rank keeps whole."""

    def _find_budget(self) -> MemoryBudget:
        config, limits = self._model_config, self._limits
        if limits is None or None not in (config.micro_batch_tokens, config.gradient_checkpointing):
            return MemoryBudget(self.role, config.max_forward_tokens, config.gradient_checkpointing)
        longest = min(limits.max_sequence_tokens, self._positions) if self._positions else limits.max_sequence_tokens
        memory = self._measure(longest, limits)
        # All ranks compute the same micro-batches.
        free = self._workers.smallest(free_bytes(self._model, limits))
        return find_budget(self.role, config, memory, free, limits)

    def _compile(self) -> None:
        """Compile the layers now: an update has a time limit, and ranks that wait for another one's compiler seem to hang."""
        start = time.monotonic()
        log.info("compiling layers; the first start takes minutes", role=self.role)
        _, checkpointing = self._budget.resolve(0)
        with self._passes_of_update(checkpointing):
            try_compiled(self._model, self._outputs, self.role, self._workers)
        self._optimizer.zero_grad(set_to_none=True)
        log.info("layers compiled", role=self.role, seconds=round(time.monotonic() - start, 1))

    def _read_rest(self, checkpoint: Path) -> None:
        """Load what a checkpoint has besides the weights of ``_adapted``, which may include an adapter. Raises ModelError."""
        if self._adapter is not None:
            self._adapter.read(checkpoint)

    def _load(self, checkpoint: Path | None) -> None:
        """Load model, adapter and optimizer: initial ones, or those of a checkpoint. Raises ModelError.

        The previous ones are released first, because there may be no memory for both. After an error there is no model.
        """
        for part in ("_model", "_adapter", "_optimizer"):
            vars(self).pop(part, None)
        self._workers.release()
        config, lora, optimizer = self._model_config, self._model_config.lora, self._model_config.optimizer
        # Each rank of a group reads its parts of a sharded checkpoint, when the model is sharded.
        in_parts = checkpoint is not None and self._workers.size > 1 and is_sharded(checkpoint)
        source = self._name if checkpoint is None or lora or in_parts else checkpoint
        self._model = self._workers.agreed(lambda: self._read(source))
        self._adapter = add_adapter(self._adapted(), self._name, lora, self._seed) if lora else None
        if self._adapter is not None and (left_out := matrices_without_adapter(self._adapted())):
            log.info("LoRA: matrices without an adapter", role=str(self.role), matrices=left_out)
        freeze_parameters(self._model, config.freeze)
        # Before the model is divided over the ranks.
        self._parameters = count_parameters(self._model)
        kind: Callable[..., MasterWeightAdamW] = MasterWeightAdamW
        if self._workers.size > 1:
            kind = self._shard()
            self._workers.evaluate(lambda: self._check(source))
        self._optimizer = create_optimizer(
            self._model,
            config.learning_rate,
            optimizer.betas,
            optimizer.eps,
            optimizer.weight_decay,
            kind,
            self._offload.optimizer,
            lora.learning_rate_ratio if lora else 1.0,
            optimizer,
        )
        if checkpoint is not None:
            self._workers.agreed(lambda: self._load_state(checkpoint, source != checkpoint))

    def _load_state(self, checkpoint: Path, with_weights: bool) -> None:
        """Load the optimizer's state, and ``with_weights`` the trained weights. Raises ModelError."""
        if with_weights:
            self._read_rest(checkpoint)
        if not is_sharded(checkpoint):
            load_optimizer(self._optimizer, checkpoint / OPTIMIZER_FILE)
            return
        # Imported here because other checkpoints do not need torch.distributed.
        from quartet.models.workers.sharded_checkpoint import OPTIMIZER, WEIGHTS, ShardedState
        from quartet.models.workers.sharding import read_weights

        if with_weights and self._adapter is None:
            read_weights(self._adapted(), ShardedState(checkpoint, WEIGHTS), self._workers)
        load_optimizer_state(self._optimizer, ShardedState(checkpoint, OPTIMIZER))

    def _shard(self) -> Callable[..., MasterWeightAdamW]:
        """Shard the model over the ranks, and return the class of its optimizer."""
        # Imported here because a single process does not need torch.distributed.
        from quartet.models.workers.group import WorkerGroup
        from quartet.models.workers.sharding import ShardedAdamW, shard_model

        assert isinstance(self._workers, WorkerGroup)
        try:
            shard_model(self._model, self._workers, self._whole_parameters(), self._offload.parameters)
        except ModelError as error:
            raise ModelError(f"services.{self.role}.parallel: {error}") from error
        if self._group is None:
            # Imported here because a single process does not need torch.distributed.
            from quartet.models.workers.group_saves import GroupSaves

            self._group = GroupSaves(self._workers, self._root)
        return partial(ShardedAdamW, workers=self._workers)

    def snapshot(
        self, run: str, leader_epoch: int, directory: str, kind: SaveKind, step: int | None = None
    ) -> Callable[[], list[SavedFile]]:
        """Copy the model to host memory and return a function that writes the copy below the run's directory. Call it once.

        A checkpoint includes the optimizer state. The function may run on any thread while the model continues. With an adapter,
        a checkpoint has only the adapter (and a critic's head), and a model has the merged weights. Raises InvalidRequest for a
        directory outside the run's, and FailedPrecondition if the model is not at ``step``, belongs to another run, has a newer
        leader, has a failed update, or has no adapter or average to save. The function raises StorageFailed.

        In a group, each rank writes its part of a checkpoint in the background. A model is written here, one tensor after the
        other. Only rank 0 may call the function.
        """
        self._updates.check_save(run, leader_epoch, step)
        target = confine_path(self._root, directory)
        if kind is SaveKind.ADAPTER and self._adapter is None:
            raise FailedPrecondition(
                f"save of the adapter: this {self.role} has no adapter; set {self.role}.lora, or save the model"
            )
        # A saved model is complete only with its tokenizer.
        writers: list[Writer] = [self._tokenizer.save_pretrained]
        if kind is SaveKind.EMA:
            writers.append(self._snapshot_average())
            return partial(self._write, target, writers)
        if self._group is not None and kind is not SaveKind.ADAPTER:
            return self._snapshot_group(self._group, target, kind, writers)
        writers.append(self._snapshot(self._adapter, merged=kind is SaveKind.MODEL))
        if kind is SaveKind.CHECKPOINT:
            writers += [lambda _: failpoint(self.saving), snapshot_optimizer(self._optimizer)]
            writers += self._snapshot_state()
        return partial(self._write, target, writers)

    def _write(self, target: Path, writers: list[Writer]) -> list[SavedFile]:
        write_model(target, *writers)
        return describe_files(self._root, target)

    def _snapshot_average(self) -> Writer:
        """Copy the moving average of the weights as a model. Raises FailedPrecondition if there is none."""
        raise FailedPrecondition(
            f"save of the average: this {self.role} keeps none; set actor.ema_decay, or save the model"
        )

    def _snapshot_state(self) -> list[Writer]:
        """Copy what a checkpoint has besides weights and optimizer state."""
        return []

    def _snapshot_group(
        self, group: GroupSaves, target: Path, kind: SaveKind, writers: list[Writer]
    ) -> Callable[[], list[SavedFile]]:
        model, adapter = self._adapted(), self._adapter
        if kind is SaveKind.MODEL:
            rest = self._snapshot_rest(group.dtype(model))
            return group.save_model(target, [*writers, rest], model, adapter)
        saving: Writer = lambda _: failpoint(self.saving)  # noqa: E731
        if adapter is not None:
            return group.save_checkpoint(
                target, [*writers, self._snapshot(adapter, merged=False)], saving, None, self._optimizer
            )
        rest = self._snapshot_rest(group.dtype(model))
        return group.save_checkpoint(target, [*writers, rest], saving, model, self._optimizer)

    def restore(self, run: str, step: int, leader_epoch: int, directory: str) -> None:
        """Restore a checkpoint below the run's directory, or the initial model for step 0.

        Raises InvalidRequest, FailedPrecondition for a lower leader epoch, ModelError for a damaged checkpoint.
        """
        checkpoint = checkpoint_path(self._root, step, directory)
        self._updates.restore(run, step, leader_epoch, lambda: self._load(checkpoint))

    def _update_once(
        self, run: str, step: int, leader_epoch: int, apply: Callable[[], dict[str, float]]
    ) -> UpdateResult:
        with torch_threads(self._update_threads):
            return self._updates.once(run, step, leader_epoch, apply)

    @contextmanager
    def _passes_of_update(self, checkpointing: bool) -> Iterator[None]:
        """Compute forward and backward passes inside the context as the config says, with or without ``checkpointing``."""
        config = self._model_config
        with (
            activation_checkpointing(self._model, checkpointing),
            compiled_layers(self._model, self._compiles),
            deterministic_update(self._device, self.role, config.deterministic_updates),
        ):
            yield

    def status(self) -> ServiceStatus:
        """Return the status of the model. It is also available after a failed restore, when there is no model."""
        status = ServiceStatus(
            role=self.role,
            model=self._name,
            device=self._device,
            dtype=self._model_config.dtype,
            parameters=self._parameters,
            policy_version=self._updates.policy_version,
            tokenizer_fingerprint=self._fingerprint,
            vocabulary_size=self._vocabulary,
            max_sequence_tokens=self._positions,
            run=self._updates.run,
            step=self._updates.step,
            leader_epoch=self._updates.fence.epoch,
            broken=self._updates.broken,
            tokens=dict(self._tokens),
            peak_flops=self._peak_flops,
        )
        return self._budget.add_to(status)

    @property
    def fence(self) -> LeaderFence:
        """The fence against the requests of former leaders."""
        return self._updates.fence

    @property
    def policy_version(self) -> int:
        """Number of updates applied."""
        return self._updates.policy_version
