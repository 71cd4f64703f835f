"""Logic of the actor service, without gRPC."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quartet.buffer.experience_store import ExperienceStore
from quartet.buffer.rollout_stream import RolloutStream
from quartet.buffer.turn_records import TurnRecordStore
from quartet.config.deployment import OffloadConfig
from quartet.config.models import ActorConfig
from quartet.config.policy_losses import BUILT_IN_POLICY_LOSSES, policy_loss_spec
from quartet.contract.arrays import FloatArray
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.trajectory import TokenBatch
from quartet.contract.update import OptimizationSettings, PolicyLossSettings, UpdateResult
from quartet.contract.weights import PublishedWeights
from quartet.engines.engine import Engine, Policy, ServedModel
from quartet.engines.stop_strings import token_decoder
from quartet.errors import ConfigError, FailedPrecondition, InvalidRequest, MismatchError
from quartet.models.forward.batching import MicroBatch
from quartet.models.forward.log_probs import EntropyUse, forward_log_probs
from quartet.models.forward.router_replay import routers_of
from quartet.models.forward.scoring import response_log_probs
from quartet.models.generation.torch_engine import served_model
from quartet.models.training.update_memory import UpdateMemory, measure_policy
from quartet.models.training.updates import update_policy
from quartet.models.training.weight_average import WeightAverage
from quartet.models.weights.host_tensors import adapter_settings, complete_tensors, host_tensor, named_weights
from quartet.models.weights.loading import check_causal_lm, load_causal_lm, snapshot_model, stop_token_ids
from quartet.models.weights.lora import Adapter
from quartet.models.weights.snapshot import Writer
from quartet.models.weights.streamed_model import write_config
from quartet.models.workers.workers import SINGLE, Workers
from quartet.ppo.losses import PolicyLossFunction, TokenSelector, checked_policy_loss
from quartet.services.generator.generator import Generator
from quartet.services.memory_budget import UpdateLimits
from quartet.services.trainable_model import TrainableModel
from quartet.system.user_code import NotImportable, import_callable
from quartet.weight_transfer.slices import SliceWriter
from quartet.weight_transfer.source import WeightSource
from quartet.weight_transfer.tensors import WeightSet


@dataclass(frozen=True, slots=True)
class BufferAccess:
    """Rollout stream, experience store and turn records of one run."""

    rollouts: RolloutStream
    experience: ExperienceStore
    turns: TurnRecordStore


class Actor(TrainableModel):
    """The policy and its optimizer. Every version of the policy is published."""

    role = Role.ACTOR
    saving = "actor.saving"

    def __init__(
        self,
        config: ActorConfig,
        device: str,
        run_directory: Path,
        buffer: Callable[[str], BufferAccess],
        seed: int = 0,
        create_engine: Callable[[Policy], Engine] | None = None,
        update_threads: int | None = None,
        limits: UpdateLimits | None = None,
        policy_loss: str = "clipped",
        workers: Workers = SINGLE,
        offload: OffloadConfig | None = None,
        policy_loss_parameters: Mapping[str, float] | None = None,
        router_replay: bool = False,
    ) -> None:
        """Load the model. ``buffer`` returns the access to the buffer of a run by its name.

        ``create_engine`` creates an engine for a generator in this process that shares the weights of the policy. ``policy_loss``
        is the name or import path of the only policy loss that updates may request; a custom one is tried with
        ``policy_loss_parameters``. ``router_replay``: updates need the experts of their tokens. See TrainableModel for the other
        arguments. Raises ModelError, ConfigError.
        """
        self._config, self._buffer = config, buffer
        self._engine: Engine | None = None
        self._source: WeightSource | None = None
        self._writer: SliceWriter | None = None
        self._generator: Generator | None = None
        self._last_copy: PublishedWeights | None = None
        self._policy_loss, self._loss_function = (
            policy_loss,
            _import_policy_loss(policy_loss, policy_loss_parameters or {}),
        )
        selector = policy_loss_spec(policy_loss).select_tokens
        self._select_tokens: TokenSelector | None = import_callable(selector) if selector else None
        self._create_engine = create_engine
        if config.ema_decay is not None and workers.size > 1:
            raise ConfigError(
                f"actor.ema_decay {config.ema_decay:g}: one process keeps the average of all weights, and this actor has "
                f"{workers.size} ranks; set ema_decay null"
            )
        self._router_replay = router_replay
        super().__init__(config, config.model, device, run_directory, seed, update_threads, limits, workers, offload)

    def _read(self, source: str | Path) -> Any:
        return load_causal_lm(source, self._config.dtype, self._device, self._workers)

    def _check(self, source: str | Path) -> None:
        check_causal_lm(source, self._model)

    def _measure(self, longest: int, limits: UpdateLimits) -> UpdateMemory:
        use: EntropyUse = "train" if limits.trains_entropy else "report"
        return measure_policy(self._model, longest, use, self._workers, self._offload.optimizer)

    def _outputs(self, micro_batch: MicroBatch) -> Any:
        return forward_log_probs(self._model, micro_batch, 1.0)[0]

    def _adapted(self) -> Any:
        return self._model

    def _snapshot(self, adapter: Adapter | None, merged: bool) -> Writer:
        if adapter is not None and not merged:
            return adapter.snapshot()
        return snapshot_model(self._model, adapter)

    def _snapshot_average(self) -> Writer:
        if self._average is None:
            return super()._snapshot_average()
        with self._average.applied():
            return self._snapshot(self._adapter, merged=True)

    def _snapshot_state(self) -> list[Writer]:
        return [] if self._average is None else [self._average.snapshot()]

    def _snapshot_rest(self, dtype: Any) -> Writer:
        return lambda directory: write_config(self._model, directory, dtype)

    def _whole_parameters(self) -> list[Any]:
        return [] if self._adapter is None else self._adapter.parameters()

    def _load(self, checkpoint: Path | None) -> None:
        # The engine references the previous model, which must be released first.
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        self._average: WeightAverage | None = None
        super()._load(checkpoint)
        if self._router_replay:
            # Later, the trial of the ranks of a group would run in the middle of another pass.
            self._workers.evaluate(lambda: routers_of(self._model))
        if self._config.ema_decay is not None:
            self._average = WeightAverage(self._model, self._optimizer, self._config.ema_decay)
            if checkpoint is not None:
                self._average.read(checkpoint)
        if self._create_engine is not None:
            policy = Policy(self._model, self._tokenizer, self._adapter, self.served_model())
            self._engine = self._create_engine(policy)

    def served_model(self) -> ServedModel:
        """Return the description of the policy for an engine."""
        stop_ids = stop_token_ids(self._model, self._tokenizer)
        return served_model(self._model, stop_ids, token_decoder(self._tokenizer))

    def engine(self) -> Engine | None:
        """Return the engine that shares the weights of the policy, or None after a failed restore."""
        return self._engine

    @contextmanager
    def hold(self, version: int, digest: bytes) -> Iterator[tuple[WeightSet, Mapping[str, bytes]]]:
        """Hold the policy for the engine that shares its weights, see ``HeldWeights``: there is nothing to copy.

        Raises FailedPrecondition if the policy is not of this version, if there is a digest, or after a failed update.
        """
        self._updates.check_not_broken()
        if version != self._updates.policy_version or digest:
            raise FailedPrecondition(
                f"generate with policy version {version}: this policy is version {self._updates.policy_version}; "
                "restart the actor for a new run"
            )
        yield WeightSet(version, b"", {}), {}

    def publish_to(
        self,
        source: WeightSource | None = None,
        generator: Generator | None = None,
        writer: SliceWriter | None = None,
    ) -> None:
        """Publish the current policy version and every later one: to ``source``, or to the engine of ``generator``.

        With neither, this rank only takes part: with a ``writer``, it writes its slices to the memory of its machine. On rank
        0, it is that of ``source``.
        """
        self._source, self._generator, self._writer = source, generator, writer
        self._publish()

    def _publish(self) -> None:
        if self._source is None and self._generator is None and self._workers.size == 1:
            return
        version, run = self._updates.policy_version, self._updates.run
        if self._writer is not None and self._publish_slices(self._writer, version, run):
            return
        tensors = complete_tensors(named_weights(self._model, self._adapter), self._workers)
        if self._source is not None:
            on_host = ((name, host_tensor(value)) for name, value in tensors)
            # A copy from a device does not use the processor, which hashes meanwhile. Only this thread takes part in a group.
            ahead = self._device != "cpu" and self._workers.size == 1
            self._source.publish(version, on_host, adapter_settings(self._adapter), run, ahead)
            if self._device != "cpu":
                self._source.copy_on_device(named_weights(self._model, self._adapter))
        elif self._generator is not None:
            self._last_copy = None
            self._last_copy = self._generator.copy(version, tensors)
        else:
            deque(tensors, maxlen=0)

    def _publish_slices(self, writer: SliceWriter, version: int, run: str) -> bool:
        """Publish what each rank holds. Return False if the ranks cannot share memory."""
        # Imported here because a single process does not need torch.distributed.
        from quartet.models.workers.weight_slices import weight_slices

        slices = weight_slices(named_weights(self._model, self._adapter), self._workers)  # type: ignore[arg-type]
        if self._source is None:
            return writer.follow(slices)
        return self._source.publish_slices(version, slices, adapter_settings(self._adapter), run)

    def restore(self, run: str, step: int, leader_epoch: int, directory: str) -> None:
        """Restore a checkpoint. See ``TrainableModel.restore``."""
        super().restore(run, step, leader_epoch, directory)
        if self._source is not None:
            # The numbers of its versions may stand for other weights now.
            self._source.reset()
        self._publish()

    def log_probs(self, batch: TokenBatch, temperature: float, reference: bool = False) -> FloatArray:
        """Return log-probs, float32 [response tokens], under the current policy or under the policy without its adapter.

        Raises FailedPrecondition if there is no adapter to disable, or after a failed update.
        """
        self._updates.check_not_broken()
        if not reference:
            return self._score(batch, temperature)
        if self._adapter is None:
            raise FailedPrecondition(
                "log-probs as the reference: this actor has no adapter to disable; set actor.lora, or use a reference service"
            )
        with self._adapter.off():
            return self._score(batch, temperature)

    def _score(self, batch: TokenBatch, temperature: float) -> FloatArray:
        return response_log_probs(self._model, batch, temperature, self._config.max_forward_tokens, self._workers)

    def update(
        self, run: str, step: int, leader_epoch: int, settings: OptimizationSettings, loss: PolicyLossSettings
    ) -> UpdateResult:
        """Apply the PPO update of one step from the experience in the buffer. Idempotent by (run, step)."""

        if loss.policy_loss != self._policy_loss:
            raise MismatchError(
                f"algorithm.policy_loss {loss.policy_loss}: this actor was started with {self._policy_loss}; start actor and "
                "orchestrator with the same config"
            )
        if loss.policy_loss in BUILT_IN_POLICY_LOSSES:
            try:
                loss = replace(loss, parameters=policy_loss_spec(loss.policy_loss).resolve(loss.parameters))
            except ValueError as error:
                raise InvalidRequest(f"algorithm.{error}") from None

        def apply() -> dict[str, float]:
            experience = self._workers.agreed(lambda: self._buffer(run).experience.load(step))
            if self._router_replay and experience.batch.routed_experts is None:
                raise MismatchError(
                    f"experience of step {step}: has no experts of its tokens, and this actor was started with "
                    "rollout.router_replay; start actor, generators and orchestrator with the same config"
                )
            if self._engine is not None:
                self._engine.sleep(self._budget.frees_cache)
            tokens, checkpointing = self._budget.resolve(settings.micro_batch_tokens)
            spec = policy_loss_spec(self._policy_loss)
            with self._passes_of_update(checkpointing):
                metrics = update_policy(
                    self._model,
                    self._optimizer,
                    experience,
                    settings,
                    loss,
                    tokens,
                    self._loss_function,
                    self._workers,
                    self._select_tokens,
                    spec.needs_old_log_probs,
                    spec.uses_geometric_mean,
                )
            if settings.num_epochs and self._average is not None:
                self._average.update()
            if settings.num_epochs:
                self._tokens["trained"] += experience.policy_tokens
            return metrics

        applied = self._updates.policy_version
        result = self._update_once(run, step, leader_epoch, apply)
        if self._updates.policy_version != applied:
            self._publish()
        last = self._last_publication()
        return replace(result, publication=last if last and last.policy_version == result.policy_version else None)

    def _last_publication(self) -> PublishedWeights | None:
        return self._last_copy if self._source is None else self._source.last

    def status(self) -> ServiceStatus:
        """Return the status of the actor."""
        last, machine = self._last_publication(), ""
        published = {} if last is None else {last.policy_version: last.weights_digest}
        if self._source is not None:
            published, machine = self._source.published(), self._source.machine
        return replace(
            super().status(),
            answers_as_reference=self._config.lora is not None,
            published_weights=published,
            last_publication=last,
            machine=machine,
        )


def _import_policy_loss(name: str, parameters: Mapping[str, float]) -> PolicyLossFunction:
    """Return the policy loss of this name or import path. A custom loss is tried on a few tokens. Raises ConfigError."""
    try:
        function = import_callable(policy_loss_spec(name).function)
    except NotImportable as error:
        raise ConfigError(f"algorithm.policy_loss {name}: {error}") from None
    if name in BUILT_IN_POLICY_LOSSES:
        return function
    return checked_policy_loss(function, f"algorithm.policy_loss {name}", parameters)
