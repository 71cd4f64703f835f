"""The way back to the last committed step: checkpoint, then replay of the sealed experience; or regeneration where it is lost."""

from __future__ import annotations

import structlog

from quartet.buffer.experience import ExperienceStore
from quartet.checkpoints import Checkpoint
from quartet.config import Config
from quartet.telemetry.run_files import RunFiles
from quartet.types import Role, ServiceStatus
from services.orchestrator.collector import wait_for_all
from services.orchestrator.course import Course
from services.orchestrator.peers import Peers, Statuses
from services.orchestrator.settings import begin_update

log = structlog.get_logger()


class Recovery:
    """Brings models, optimizers and the algorithm's own state to the same step."""

    def __init__(
        self, config: Config, files: RunFiles, peers: Peers, experience: ExperienceStore, leader_epoch: int
    ) -> None:
        self._config, self._files, self._peers = config, files, peers
        self._experience, self._epoch = experience, leader_epoch

    def to_last_commit(self, checkpoint: Checkpoint | None, statuses: Statuses, course: Course) -> int:
        """Goes to the last committed step, or, where the buffer has lost what leads there, back to the checkpoint's.

        What came after that step is forgotten: the same seeds bring the same again. Gives the step.
        """
        base = checkpoint.step if checkpoint else 0
        history = self._files.committed()
        last = max(base, len(history))
        replayed = range(base + 1, last + 1)
        if not self._experience.holds(replayed):
            log.warning("sealed experience is lost; its steps are taken again", first=base + 1, last=last)
            last, replayed = base, range(0)
        self._files.forget_after(last)
        history = history[:last]
        course.restore(base, checkpoint.state if checkpoint else None, history[:base])
        for metrics in history[base:]:
            course.commit(metrics, self._files.scores(int(metrics["step"])))
        for client in self._peers.trained:
            self._bring(client.role, statuses[client.role], checkpoint, base, last)
        return last

    def _bring(self, role: Role, status: ServiceStatus, checkpoint: Checkpoint | None, base: int, last: int) -> None:
        """One model to step ``last``: as it stands where it is on the way, from the checkpoint otherwise."""
        client = next(client for client in self._peers.trained if client.role == role)
        run, step = self._config.run.name, status.step
        fresh = status.policy_version == 0 and base == 0
        if not fresh and not (status.run == run and base <= step <= last):
            directory = f"{checkpoint.path.relative_to(self._files.root).as_posix()}/{role}" if checkpoint else ""
            restoring = client.restore(run, base, self._epoch, directory)
            wait_for_all([restoring])
            step = base
        for replay in range(step + 1, last + 1):
            wait_for_all([begin_update(client, self._config, replay, self._epoch)])
