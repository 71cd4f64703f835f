"""Optional outputs of a run: tokens, timeline, tokenizer and sinks such as TensorBoard. None of them can fail the run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import structlog

from quartet.config.root import Config
from quartet.contract.control import Alert
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.algorithm.experience import PreparedStep
from quartet.services.orchestrator.checkpointing.step_artifacts import token_arrays
from quartet.services.orchestrator.control.progress import ProgressBoard
from quartet.services.orchestrator.telemetry.step_profiler import StepProfiler
from quartet.system.durable_files import replace_directory
from quartet.telemetry.sinks.background import Sinks
from quartet.telemetry.sinks.configured import check_sinks, open_sinks

log = structlog.get_logger()


class RunTelemetry:
    """Writer of the optional files and sinks. An output that fails is noted once and skipped."""

    def __init__(self, config: Config, files: RunFiles, board: ProgressBoard, profiler: StepProfiler) -> None:
        """Raise ConfigError if the config requests a sink whose package is not installed."""
        check_sinks(config)
        self._config, self._settings = config, config.telemetry
        self._files, self._board, self._profiler = files, board, profiler
        self._sinks = Sinks({}, board.note)
        self._failed: set[str] = set()

    def start(self, tokenizer: Any, run_id: str) -> None:
        """Save the tokenizer with the run, and connect to the sinks."""
        with self._noting_failures("tokenizer"):
            if not self._files.tokenizer.exists():
                replace_directory(self._files.tokenizer, tokenizer.save_pretrained)
        self._sinks = open_sinks(self._config, self._files, run_id, self._board.note)

    def continues_from(self, step: int) -> None:
        """Tell the sinks that the run continues after ``step``; 0 at its start."""
        self._sinks.continues_from(step)

    def write_tokens(self, step: int, prepared: PreparedStep) -> None:
        """Write the trajectories of ``step`` token by token, if configured for this step."""
        every = self._settings.tokens_every_steps
        if not every or step % every:
            return
        with self._noting_failures("tokens"):
            arrays = token_arrays(prepared, self._config.has_critic)
            self._files.write_tokens(step, arrays, self._settings.tokens_keep_steps)

    def committed(
        self, step: int, started: float, metrics: Mapping[str, float], devices: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Write the timeline since ``started`` (``time.perf_counter``), and pass the metrics of the step to the sinks.

        ``devices``: see ``DeviceSampler.take``.
        """
        seconds = time.perf_counter() - started
        spans = self._profiler.end_step(started)
        if self._settings.timeline:
            with self._noting_failures("timeline"):
                self._files.append_timeline(
                    {
                        "step": step,
                        "started": time.time() - seconds,
                        "seconds": seconds,
                        "spans": [span.row() for span in spans],
                        **({"devices": devices} if devices else {}),
                    }
                )
        self._sinks.step(step, metrics)

    def evaluated(self, step: int, summary: Mapping[str, float]) -> None:
        """Pass the metrics of an evaluation to the sinks."""
        self._sinks.evaluation(step, summary)

    def alert(self, alert: Alert) -> None:
        """Pass an alert to the sinks."""
        self._sinks.alert(alert)

    def close(self) -> None:
        """Flush the sinks. May be called again."""
        self._sinks.close()

    @contextmanager
    def _noting_failures(self, output: str) -> Iterator[None]:
        """Note the first failure to write ``output`` for the user, and only log the next ones."""
        try:
            yield
        except Exception as error:  # On a full disk, libraries raise other exceptions than OSError.
            log.warning("output not written", output=output, error=str(error), kind=type(error).__name__)
            if output not in self._failed:
                self._failed.add(output)
                reason = getattr(error, "strerror", None) or error
                self._board.note(f"{output}: cannot be written ({reason}); the run continues without it")
