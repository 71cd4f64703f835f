"""The contents of run files that a gateway shares between requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quartet.errors import ConfigError
from quartet.gateway.readers.file_cache import FileCache, RecentFiles
from quartet.gateway.readers.jsonl_records import Record, read_records
from quartet.gateway.readers.metric_columns import MetricColumns
from quartet.gateway.readers.timeline_reader import Timeline
from quartet.gateway.readers.token_texts import load_tokenizer
from quartet.gateway.readers.trajectory_index import StepIndex, build_index

MAX_RECORD_FILES = 64
MAX_TOKENIZERS = 8
MAX_TIMELINES = 32
MAX_TRAJECTORY_STEPS = 20_000
"""Steps of all runs whose trajectories are indexed."""
MAX_METRICS_BYTES = 512 * 1024 * 1024
"""Size of the columns of all runs. Beyond it, the least recently used run is dropped."""


class RunReaders:
    """Reader of the files of runs. It holds only caches, which can be dropped at any time. Thread-safe."""

    def __init__(self, max_metrics_bytes: int = MAX_METRICS_BYTES) -> None:
        self._records = FileCache(read_records, MAX_RECORD_FILES)
        self._tokenizers = FileCache(load_tokenizer, MAX_TOKENIZERS)
        self._trajectories = FileCache(build_index, MAX_TRAJECTORY_STEPS)
        self._metrics = RecentFiles(MetricColumns, max_metrics_bytes, lambda columns: columns.size)
        self._timelines = RecentFiles(Timeline, MAX_TIMELINES)

    def metrics(self, path: Path) -> MetricColumns:
        """Return the columns of a ``metrics.jsonl`` as it is now; empty if there is no file. Raises ConfigError."""
        columns = self._metrics.of(path)
        columns.refresh()
        return columns

    def timeline(self, path: Path) -> Timeline:
        """Return the timeline of a run."""
        return self._timelines.of(path)

    def records(self, path: Path) -> list[Record]:
        """Return every record of a small file; empty if there is no file. Raises ConfigError."""
        try:
            return self._records.of(path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be read ({error.strerror}); give the gateway's user read permission"
            ) from None

    def trajectories(self, folder: Path, step: int) -> StepIndex | None:
        """Return the index of a step's trajectories, or None if it has none. Raises ConfigError."""
        try:
            return self._trajectories.of(folder / f"step-{step:06d}.jsonl")
        except OSError:
            return None

    def tokenizer(self, folder: Path) -> Any | None:
        """Return the tokenizer in a run's ``tokenizer/`` folder, or None if it is missing or cannot be loaded."""
        try:
            return self._tokenizers.of(folder / "tokenizer.json")
        except OSError:
            return None
