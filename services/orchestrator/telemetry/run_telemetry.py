"""What a run tells of itself besides the files that it needs: tokens, timeline, sinks. None of it can fail the run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import structlog

from quartet.config import Config
from quartet.durable_files import replace_directory
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.algorithm.experience import PreparedStep
from quartet.services.orchestrator.checkpointing.step_artifacts import token_arrays
from quartet.services.orchestrator.control.progress import ProgressBoard
from quartet.services.orchestrator.telemetry.timeline import Timeline
from quartet.telemetry.sinks.background import Sinks
from quartet.telemetry.sinks.configured import check_sinks, open_sinks
from quartet.types import Alert

log = structlog.get_logger()


class Telemetry:
    """Writes down and sends what a run's users may want to see. What cannot be written is noted once, and left out."""

    def __init__(self, config: Config, files: RunFiles, board: ProgressBoard) -> None:
        """Raises ConfigError when the config asks for a sink whose package is not installed."""
        check_sinks(config)
        self._config, self._settings = config, config.telemetry
        self._files, self._board = files, board
        self.timeline = Timeline()
        self._sinks = Sinks({}, board.note)
        self._failed: set[str] = set()

    def begin(self, tokenizer: Any, identity: str) -> None:
        """Keeps the tokenizer with the run, and connects to the sinks. ``identity`` is the run's id."""
        with self._noting("tokenizer"):
            if not self._files.tokenizer.exists():
                replace_directory(self._files.tokenizer, tokenizer.save_pretrained)
        self._sinks = open_sinks(self._config, self._files, identity, self._board.note)

    def continues_from(self, step: int) -> None:
        """The run goes on after ``step``, 0 at its start."""
        self._sinks.continues_from(step)

    def keep_tokens(self, step: int, prepared: PreparedStep) -> None:
        """Writes down a step's trajectories token by token, where that is wanted of this step."""
        every = self._settings.tokens_every_steps
        if not every or step % every:
            return
        with self._noting("tokens"):
            arrays = token_arrays(prepared.experience, self._config.has_critic)
            self._files.write_tokens(step, arrays, self._settings.tokens_keep_steps)

    def committed(self, step: int, started: float, metrics: Mapping[str, float]) -> None:
        """Writes down what was done since ``started``, by the timeline's clock, and passes the step's figures on."""
        seconds = time.perf_counter() - started
        spans = self.timeline.lap(started)
        if self._settings.timeline:
            with self._noting("timeline"):
                self._files.append_timeline(
                    {
                        "step": step,
                        "started": time.time() - seconds,
                        "seconds": seconds,
                        "spans": [span.row() for span in spans],
                    }
                )
        self._sinks.step(step, metrics)

    def evaluated(self, step: int, summary: Mapping[str, float]) -> None:
        """Passes an evaluation's figures on."""
        self._sinks.evaluation(step, summary)

    def alert(self, alert: Alert) -> None:
        """Passes on what a guard found."""
        self._sinks.alert(alert)

    def close(self) -> None:
        """Lets the sinks take in what waits for them. May be called again."""
        self._sinks.close()

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """Around the writing of what the run can do without: the first failure is said, the next ones only logged."""
        try:
            yield
        except Exception as error:  # Libraries raise errors of their own where the disk is full.
            log.warning("not kept", what=what, error=str(error), kind=type(error).__name__)
            if what not in self._failed:
                self._failed.add(what)
                why = getattr(error, "strerror", None) or error
                self._board.note(f"{what}: cannot be written ({why}); the run goes on without")
