"""The training thread's work: a run to its end, and what becomes of its failure."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from quartet.errors import Cancelled, ConfigError
from quartet.services.orchestrator.control.progress import ProgressBoard, RunState
from quartet.services.orchestrator.run import Training

log = structlog.get_logger()


def train(training: Training, board: ProgressBoard, finished: Callable[[int], None]) -> None:
    """Runs the training to its end, notes how it ended on the board, and passes its exit status on."""
    try:
        training.run()
    except Cancelled as error:
        board.update(state=RunState.STOPPED, phase="done", error=str(error))
        finished(0)
    except Exception as error:
        code = 2 if isinstance(error, ConfigError) else 1
        log.error("run failed", error=str(error), exc_info=None if code == 2 else error)
        board.update(state=RunState.FAILED, phase="failed", error=str(error) or type(error).__name__, exit_code=code)
        finished(code)
    else:
        finished(training.exit_code)
