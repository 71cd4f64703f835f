"""A run in a few figures: of its files, and of its orchestrator where it has one."""

from __future__ import annotations

from quartet.config import Config
from quartet.errors import ConfigError
from quartet.gateway.monitors.run_monitor import Live
from quartet.gateway.readers import Reading
from quartet.gateway.runs.catalog import Runs
from quartet.gateway.schemas import Progress, RunDetail, RunSummary, State
from quartet.run_directory.checkpoints import checkpoint_folders
from quartet.run_directory.run_files import RunFiles

ENDED = (State.FINISHED, State.STOPPED, State.FAILED)


class Summaries:
    """What can be said of each run of a folder."""

    def __init__(self, runs: Runs, reading: Reading, live: Live) -> None:
        self._runs, self._reading, self._live = runs, reading, live

    def summary(self, name: str) -> RunSummary:
        """The run in a list: of one whose files cannot be read, that. Raises NotFound."""
        files = self._runs.find(name)
        try:
            return self._summary(files, name, self._runs.config(name), self._live.progress(name))
        except ConfigError as error:
            return RunSummary(
                name=name,
                state=State.IDLE,
                live=False,
                step=0,
                total_steps=0,
                estimator="",
                seed=0,
                changed=_changed(files),
                reward_mean=None,
                kl_mean=None,
                problem=str(error),
            )

    def detail(self, name: str) -> RunDetail:
        """The run by itself. Raises NotFound, and ConfigError when its files cannot be read."""
        files, config = self._runs.find(name), self._runs.config(name)
        progress = self._live.progress(name)
        controller = config.algorithm.kl_controller
        return RunDetail(
            **self._summary(files, name, config, progress).model_dump(),
            progress=progress,
            kl_target=None if controller.kind == "fixed" else controller.target,
            has_critic=config.has_critic,
            metric_names=self._reading.metrics.of(files.metrics).names(),
            checkpoints=len(checkpoint_folders(files)),
            evaluations=len(self._reading.records.of(files.evaluation_summaries)),
            alerts=len(self._reading.records.of(files.alerts)),
            failed_trajectories=len(self._reading.records.of(files.failed_trajectories)),
        )

    def _summary(self, files: RunFiles, name: str, config: Config, progress: Progress | None) -> RunSummary:
        columns = self._reading.metrics.of(files.metrics)
        step = columns.count()
        newest = columns.rows([step], ["reward_mean", "kl_mean"]) if step else []
        found = newest[0] if newest else {}
        return RunSummary(
            name=name,
            state=progress.state if progress is not None else _state_at_rest(files, step, config.run.steps),
            live=progress is not None and progress.state not in ENDED,
            step=step,
            total_steps=config.run.steps,
            estimator=config.algorithm.estimator,
            seed=config.run.seed,
            changed=_changed(files),
            reward_mean=found.get("reward_mean"),
            kl_mean=found.get("kl_mean"),
        )


def _state_at_rest(files: RunFiles, step: int, steps: int) -> State:
    """Of a run that nobody runs: how one ended that did not come to its last step is written nowhere."""
    return State.FINISHED if step >= steps and files.policy.is_dir() else State.IDLE


def _changed(files: RunFiles) -> float:
    for path in (files.metrics, files.config):
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return 0.0
