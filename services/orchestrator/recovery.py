"""The way back to the last committed step: checkpoint, then replay of the sealed experience; or regeneration where it is lost."""

from __future__ import annotations

import structlog

from quartet.buffer.experience import ExperienceStore
from quartet.checkpoints import Checkpoint
from quartet.config import Config
from quartet.errors import ConfigError
from quartet.rpc.clients import ActorClient, CriticClient
from quartet.telemetry.run_files import RunFiles
from quartet.types import ServiceStatus
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

        What came after that step is forgotten: the same seeds bring the same again. Gives the step. Raises ConfigError when the
        run's files are damaged.
        """
        base = checkpoint.step if checkpoint else 0
        history = self._files.committed()
        last = len(history)
        if last < base:
            raise ConfigError(
                f"metrics {self._files.metrics}: end at step {last}, the newest checkpoint is of step {base}; put the file back, "
                "or start the run anew"
            )
        if not self._experience.holds(range(base + 1, last + 1)):
            log.warning("sealed experience is lost; its steps are taken again", first=base + 1, last=last)
            last = base
        self._files.forget_after(last)
        history = history[:last]
        course.restore(base, checkpoint.state if checkpoint else None, history[:base])
        for metrics in history[base:]:
            course.commit(metrics, self._files.scores(int(metrics["step"])))
        for client in self._peers.trained:
            self._bring(client, statuses[client.role], checkpoint, base, last)
        return last

    def _bring(
        self,
        client: ActorClient | CriticClient,
        status: ServiceStatus,
        checkpoint: Checkpoint | None,
        base: int,
        last: int,
    ) -> None:
        """One model to step ``last``: as it stands where it is on the way, from the checkpoint otherwise."""
        run, step = self._config.run.name, status.step
        fresh = status.policy_version == 0 and base == 0
        if not fresh and not (status.run == run and base <= step <= last):
            directory = (
                f"{checkpoint.path.relative_to(self._files.root).as_posix()}/{client.role}" if checkpoint else ""
            )
            restoring = client.restore(run, base, self._epoch, directory)
            wait_for_all([restoring])
            step = base
        for replay in range(step + 1, last + 1):
            wait_for_all([begin_update(client, self._config, replay, self._epoch)])
