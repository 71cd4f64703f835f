"""The evaluations of a run: those that are due, what is told of them, and what becomes of one that fails."""

from __future__ import annotations

import structlog

from quartet.errors import ComputationFailed, InvalidRequest
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.checkpointing.step_artifacts import failed_evaluation_lines
from quartet.services.orchestrator.control.progress import ProgressBoard
from quartet.services.orchestrator.rollout.evaluation import Evaluator
from quartet.services.orchestrator.telemetry.run_telemetry import Telemetry

log = structlog.get_logger()


class EvaluationSchedule:
    """Evaluates the policy where that is due. Training does not depend on it, but on the one that all others are held against."""

    def __init__(self, run: str, files: RunFiles, board: ProgressBoard, telemetry: Telemetry) -> None:
        """None is due before ``begin``."""
        self._run, self._files, self._board, self._telemetry = run, files, board, telemetry
        self._evaluator: Evaluator | None = None
        self._evaluated: int | None = None

    def begin(self, evaluator: Evaluator) -> None:
        """The services are there, so that the policy can be evaluated. ``close`` closes the evaluator, too."""
        self._evaluator = evaluator

    def go_on(self) -> None:
        """Goes on after the last evaluation that is written down."""
        self._evaluated = self._files.evaluated()

    def is_due(self, step: int, last: bool) -> bool:
        """Whether there is to be an evaluation after ``step``. ``last``: no step follows."""
        return step != self._evaluated and self._evaluator is not None and self._evaluator.is_due(step, last)

    def evaluate(self, step: int, leader_epoch: int) -> None:
        """Evaluates the policy after ``step``, and tells of it. One that fails is written down, but for the one of step 0."""
        evaluator = self._evaluator
        assert evaluator is not None
        self._evaluated = step
        self._board.update(phase="evaluate", scored=0, wanted=evaluator.responses)
        try:
            summary = evaluator.evaluate(step, step, leader_epoch, self._board.show_scored)
        except (ComputationFailed, InvalidRequest) as error:
            if step == 0:
                raise  # All later ones would be held against it.
            # The error's text may quote a response, which is no matter for a log.
            self._files.append_failed_trajectories(failed_evaluation_lines(self._run, step, error))
            log.warning("evaluation failed", step=step, error=type(error).__name__)
            self._board.note(
                f"evaluation after step {step} failed ({type(error).__name__}), see failed_trajectories.jsonl; the run goes on"
            )
            return
        log.info("evaluated", step=step, **summary)
        self._telemetry.evaluated(step, summary)
        figures = ", ".join(f"{name.removeprefix('eval_').replace('_', ' ')} {summary[name]:.2f}" for name in summary)
        self._board.note(f"evaluation after step {step}: {figures}")

    def close(self) -> None:
        """Ends what evaluates. May be called again."""
        if self._evaluator is not None:
            self._evaluator.close()
