"""Summaries of runs, from their files and from their orchestrators."""

from __future__ import annotations

from typing import Any

from quartet.config.root import Config
from quartet.config.supervised import StageConfig
from quartet.errors import ConfigError
from quartet.gateway.monitors.run_progress import END_STATES, RunMonitor
from quartet.gateway.readers.run_catalog import RunCatalog
from quartet.gateway.readers.run_readers import RunReaders
from quartet.gateway.schemas import ProgressInfo, RunDetail, RunSummary, State
from quartet.run_directory.checkpoints import checkpoint_folders
from quartet.run_directory.locking_and_removal import is_locked
from quartet.run_directory.run_files import RunFiles


class RunSummaries:
    """Summaries of the runs of a folder."""

    def __init__(self, catalog: RunCatalog, readers: RunReaders, monitor: RunMonitor) -> None:
        self._catalog, self._readers, self._monitor = catalog, readers, monitor

    def summary(self, name: str) -> RunSummary:
        """Return the entry of a run in the list of runs; ``problem`` is set if its files cannot be read. Raises NotFound."""
        files = self._catalog.find(name)
        try:
            return self._summary(files, name, self._catalog.any_config(name), self._monitor.progress(name))
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
        """Return everything about one run. Raises NotFound, and ConfigError if its files cannot be read."""
        files, config = self._catalog.find(name), self._catalog.any_config(name)
        progress = self._monitor.progress(name)
        return RunDetail(
            **self._summary(files, name, config, progress).model_dump(),
            progress=progress,
            **_parts(config),
            metric_names=self._readers.metrics(files.metrics).names(),
            checkpoints=len(checkpoint_folders(files)),
            evaluations=len(self._readers.records(files.evaluation_summaries)),
            alerts=len(self._readers.records(files.alerts)),
            failed_trajectories=len(self._readers.records(files.failed_trajectories)),
        )

    def _summary(
        self, files: RunFiles, name: str, config: Config | StageConfig, progress: ProgressInfo | None
    ) -> RunSummary:
        columns = self._readers.metrics(files.metrics)
        step = columns.count()
        rows = columns.rows([step], ["reward_mean", "kl_mean"]) if step else []
        newest = rows[0] if rows else {}
        state = _inactive_state(files, step, config.run.steps or 0)
        if isinstance(config, StageConfig) and state is State.IDLE and is_locked(files):
            state = State.TRAINING
        return RunSummary(
            name=name,
            state=progress.state if progress is not None else state,
            live=progress is not None and progress.state not in END_STATES,
            step=step,
            total_steps=config.run.steps or 0,
            estimator=config.stage if isinstance(config, StageConfig) else config.algorithm.estimator,
            seed=config.run.seed,
            changed=_changed(files),
            reward_mean=newest.get("reward_mean"),
            kl_mean=newest.get("kl_mean"),
        )


def _parts(config: Config | StageConfig) -> dict[str, Any]:
    """Return which parts a run has, as in RunDetail."""
    if isinstance(config, StageConfig):
        absent = dict.fromkeys(("has_critic", "has_scores", "has_teacher"), False)
        return {**absent, "has_stage": True, "kl_target": None, "reward_parts": []}
    controller = config.algorithm.kl_controller
    return {
        "kl_target": None if controller.kind == "fixed" else controller.target,
        "has_critic": config.has_critic,
        "has_scores": config.has_scores,
        "has_teacher": config.algorithm.distillation is not None,
        "has_stage": False,
        "reward_parts": list(config.reward.part_weights),
    }


def _inactive_state(files: RunFiles, step: int, total_steps: int) -> State:
    """Return the state of a run without an orchestrator. The files do not record why a run ended before its last step."""
    return State.FINISHED if step >= total_steps and files.is_finished(step) else State.IDLE


def _changed(files: RunFiles) -> float:
    for path in (files.metrics, files.config):
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return 0.0
