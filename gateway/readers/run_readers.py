"""All readers of run files that a gateway shares between requests."""

from __future__ import annotations

from quartet.gateway.readers.jsonl_records import RecordReader
from quartet.gateway.readers.metric_columns import MetricsReader
from quartet.gateway.readers.timeline_reader import TimelineReader
from quartet.gateway.readers.token_texts import TokenizerCache
from quartet.gateway.readers.trajectory_index import TrajectoryIndexes


class RunReaders:
    """One reader per kind of file. Each holds only caches, which can be dropped at any time."""

    def __init__(self) -> None:
        self.metrics = MetricsReader()
        self.records = RecordReader()
        self.timelines = TimelineReader()
        self.tokenizers = TokenizerCache()
        self.trajectories = TrajectoryIndexes()
