"""Schedule of saves: checkpoints in parallel with the next step, and the policy at the end of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog

from quartet.contract.status import Role
from quartet.contract.weights import SaveKind
from quartet.errors import StorageFailed
from quartet.run_directory.checkpoints import Checkpoint, checkpoint_folders, checkpoint_step, has_value, tag_best
from quartet.services.orchestrator.checkpointing.checkpoint_writer import CheckpointWriter, PendingCheckpoint
from quartet.services.orchestrator.context import RunContext
from quartet.services.orchestrator.service_clients import wait_for_all
from quartet.system.durable_files import check_saved_files

log = structlog.get_logger()


class CheckpointScheduler:
    """Scheduler of checkpoints: one in progress, the newest one, and the last one that failed."""

    def __init__(self, run: RunContext) -> None:
        self._config, self._name, self._files, self._board = run.config, run.config.run.name, run.files, run.board
        self._run, config = run, run.config
        self._writer = CheckpointWriter(run.files, config.checkpoint.keep_last, config.to_yaml(), self._tag_best)
        self._saved_step = self._failed_step = 0
        self._reported_missing = False
        self._pending: PendingCheckpoint | None = None

    def newest(self, verify: bool) -> Checkpoint | None:
        """Return the run's newest checkpoint by its manifest. With ``verify``, the newest one whose checksums all match."""
        return self._writer.newest(self._name, verify)

    def take_skipped(self) -> list[str]:
        """Return a note for each skipped checkpoint that has not been reported yet."""
        return self._writer.take_skipped()

    def resume(self, checkpoint_step: int, step: int) -> None:
        """Continue from ``step``, with the newest checkpoint at ``checkpoint_step``.

        The checkpoint in progress is abandoned. It starts again when its step is due.
        """
        if self._pending is not None:
            self._pending.abandon()
        self._pending = None
        self._saved_step = checkpoint_step
        if step < self._failed_step:
            self._failed_step = 0
        self._tag_best()

    @property
    def newest_step(self) -> int:
        """Step of the newest checkpoint that is written or in progress; 0 without one."""
        return self._pending.step if self._pending else self._saved_step

    def is_due(self, step: int, last: bool, requested: bool) -> bool:
        """Return whether to start a checkpoint after ``step``. ``last``: no step follows. ``requested``: by a user."""
        every = self._config.checkpoint.every_steps
        due = every > 0 and (step % every == 0 or last) and step != self._failed_step
        in_progress = self._pending.step if self._pending else 0
        return (due or requested) and step not in (0, in_progress, self._saved_step)

    def start(self, step: int, leader_epoch: int, state: dict[str, Any]) -> None:
        """Start a checkpoint of the models after ``step`` and of the orchestrator's ``state``."""
        with self._run.profiler.span(Role.ORCHESTRATOR, "checkpoint"):
            self._pending = self._writer.start(self._name, step, leader_epoch, self._run.clients.trained, state)
            for client, call in zip(self._run.clients.trained, self._pending.calls, strict=True):
                self._run.profiler.observe(client.role, "checkpoint", call)

    def finish(self, check_lease: Callable[[], None]) -> None:
        """Wait for the checkpoint in progress, if any. A checkpoint that the disk refuses is noted, and the run continues.

        Raises the error of ``check_lease`` if the lease is lost: the new leader saves its own checkpoint. Any other failure of a
        save, such as an unforeseen exception in a service, is raised and ends the step.
        """
        if self._pending is None:
            return
        check_lease()
        pending, self._pending = self._pending, None
        waits = not pending.done()
        if waits:
            self._board.update(phase="checkpoint")
        try:
            with self._run.profiler.span(Role.ORCHESTRATOR, "checkpoint", waits=waits):
                pending.finish()
        except StorageFailed as error:
            self._failed_step = pending.step
            kept = f"the checkpoint of step {self._saved_step} is kept" if self._saved_step else "there is none yet"
            self._board.note(
                f"checkpoint of step {pending.step} failed: {error}; {kept}; the next one is saved as scheduled"
            )
            log.warning("checkpoint failed", step=pending.step, newest=self._saved_step, error=str(error))
        else:
            # Steps before a checkpoint need no replay, so their experience is dropped.
            covered, self._saved_step = range(self._saved_step + 1, pending.step + 1), pending.step
            with self._run.profiler.span("redis", "discard"):
                self._run.experience.discard(covered)

    def _tag_best(self) -> None:
        """Give the tag ``best`` to the best checkpoint. If the disk refuses it, the next checkpoint tries again."""
        config = self._config.checkpoint
        try:
            best = tag_best(self._files, config)
        except StorageFailed as error:
            self._board.note(f"the best checkpoint is not tagged: {error}")
            log.warning("best checkpoint not tagged", error=str(error))
            return
        if best is not None:
            log.info("best checkpoint", step=best.step, metric=config.best_metric, value=best.value)
            self._board.note(f"checkpoint of step {best.step} is the best: {config.best_metric} {best.value:.4g}")
        self._check_best_metric()

    def _check_best_metric(self) -> None:
        """Note once if the newest checkpoint has no value of checkpoint.best_metric."""
        metric, newest = self._config.checkpoint.best_metric, checkpoint_folders(self._files)
        if metric is None or self._reported_missing or not newest:
            return
        step = checkpoint_step(newest[-1])
        if not has_value(self._files, metric, step):
            self._reported_missing = True
            self._board.note(
                f"the checkpoint of step {step} cannot be the best: {metric} has no finite value in this step; if it never has "
                "one, choose another checkpoint.best_metric"
            )
            log.warning("best metric missing", step=step, metric=metric)

    def save_policy(self, step: int, leader_epoch: int) -> None:
        """Write the policy after ``step`` in Hugging Face format, its adapter and its average if it has them, and their step."""
        self._board.update(phase="save")
        kinds = {self._files.policy: SaveKind.MODEL}
        if self._config.actor.lora is not None:
            kinds[self._files.adapter] = SaveKind.ADAPTER
        if self._config.actor.ema_decay is not None:
            kinds[self._files.policy_ema] = SaveKind.EMA
        self._files.remove_policy_step()
        for path, kind in kinds.items():
            call = self._run.clients.actor.save(self._name, leader_epoch, path.name, kind, step)
            try:
                wait_for_all([call])
            except StorageFailed as error:
                raise StorageFailed(f"{error}; continue the run from step {step} with --resume") from None
            check_saved_files(self._files.root, call.result())
            log.info("policy saved", kind=str(kind.value), path=str(path), step=step)
        self._files.write_policy_step(step)
