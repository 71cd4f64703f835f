"""What a run saves and when: checkpoints, beside the step that follows, and the policy at the end."""

from __future__ import annotations

from typing import Any

import structlog

from quartet.buffer.experience_store import ExperienceStore
from quartet.config import Config
from quartet.durable_files import check_saved
from quartet.errors import NoResponse, ServiceFailed, StorageFailed
from quartet.run_directory.checkpoints import Checkpoint
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.checkpointing.checkpoint_writer import Checkpoints, PendingCheckpoint
from quartet.services.orchestrator.control.progress import ProgressBoard
from quartet.services.orchestrator.leadership import Leadership
from quartet.services.orchestrator.rollout.collector import wait_for_all
from quartet.services.orchestrator.service_clients import ServiceClients
from quartet.services.orchestrator.telemetry.stopwatch import Stopwatch
from quartet.services.orchestrator.telemetry.timeline import Timeline
from quartet.types import Role, SaveKind

log = structlog.get_logger()


class Saving:
    """The checkpoint under way, the newest one, and the last that could not be written."""

    def __init__(
        self,
        config: Config,
        files: RunFiles,
        service_clients: ServiceClients,
        experience: ExperienceStore,
        board: ProgressBoard,
        stopwatch: Stopwatch,
        timeline: Timeline,
    ) -> None:
        self._config, self._run, self._timeline = config, config.run.name, timeline
        self._files, self._service_clients, self._experience, self._board, self._stopwatch = (
            files,
            service_clients,
            experience,
            board,
            stopwatch,
        )
        self._checkpoints = Checkpoints(files, config.checkpoint.keep_last, config.to_yaml())
        self._saved = self._unsaved = 0
        self._pending: PendingCheckpoint | None = None

    def newest(self, verify: bool) -> Checkpoint | None:
        """The run's newest checkpoint: by its manifest, or with ``verify`` one of which every byte was looked at."""
        return self._checkpoints.newest(self._run, verify)

    def passed_over(self) -> list[str]:
        """What is wrong with checkpoints that were passed over, each said once."""
        return self._checkpoints.passed_over()

    def go_back(self, saved: int, step: int) -> None:
        """Goes on from ``step``, with ``saved`` the newest checkpoint's.

        The checkpoint under way is let go: without its manifest it is none, and it is begun again where it is due.
        """
        if self._pending is not None:
            self._pending.abandon()
        self._pending = None
        self._saved = saved
        if step < self._unsaved:
            self._unsaved = 0

    @property
    def newest_step(self) -> int:
        """Of the newest checkpoint that is written or under way; 0 without one."""
        return self._pending.step if self._pending else self._saved

    def is_due(self, step: int, last: bool, asked: bool) -> bool:
        """Whether a checkpoint is to be begun after ``step``. ``last``: no step follows. ``asked``: a user wants one."""
        every = self._config.checkpoint.every_steps
        due = every > 0 and (step % every == 0 or last) and step != self._unsaved
        under_way = self._pending.step if self._pending else 0
        return (due or asked) and step not in (0, under_way, self._saved)

    def begin(self, step: int, leader_epoch: int, state: dict[str, Any]) -> None:
        """Begins a checkpoint of the models after ``step``, and of the orchestrator's own ``state``."""
        with self._stopwatch.part("checkpoint"):
            self._pending = self._checkpoints.begin(self._run, step, leader_epoch, self._service_clients.trained, state)
            for client, call in zip(self._service_clients.trained, self._pending.calls, strict=True):
                self._timeline.watch(client.role, "checkpoint", call)

    def finish(self, leadership: Leadership) -> None:
        """Waits for the checkpoint under way, if there is one. One that cannot be written is noted; the run goes on without.

        Raises FailedPrecondition when the lease is lost: whoever leads now saves its own.
        """
        if self._pending is None:
            return
        leadership.check()
        pending, self._pending = self._pending, None
        waits = not pending.done()
        if waits:
            self._board.update(phase="checkpoint")
        phase = "wait" if waits else "checkpoint"
        try:
            with self._stopwatch.part("checkpoint"), self._timeline.part(Role.ORCHESTRATOR, phase):
                pending.finish()
        except NoResponse:
            raise  # That is a service's trouble, not the disk's.
        except (ServiceFailed, StorageFailed) as error:
            self._unsaved = pending.step
            kept = f"step {self._saved}'s stays" if self._saved else "there is none yet"
            self._board.note(f"checkpoint of step {pending.step} failed: {error}; {kept}; the next is tried as usual")
            log.warning("checkpoint failed", step=pending.step, newest=self._saved, error=str(error))
        else:
            # What a checkpoint covers need not be replayed.
            covered, self._saved = range(self._saved + 1, pending.step + 1), pending.step
            with self._stopwatch.part("checkpoint"):
                self._experience.discard(covered)

    def save_policy(self, step: int, leader_epoch: int) -> None:
        """Writes the policy after ``step``, in Hugging Face format, and its adapter where it has one."""
        self._board.update(phase="save")
        wanted = {self._files.policy: SaveKind.MODEL}
        if self._config.actor.lora is not None:
            wanted[self._files.adapter] = SaveKind.ADAPTER
        for path, kind in wanted.items():
            saving = self._service_clients.actor.save(self._run, leader_epoch, path.name, kind, step)
            try:
                wait_for_all([saving])
            except NoResponse:
                raise
            except (ServiceFailed, StorageFailed) as error:
                raise StorageFailed(f"{error}; the run goes on from step {step} with --resume") from None
            check_saved(self._files.root, saving.result())
            log.info("saved", kind=str(kind.value), path=str(path), step=step)
