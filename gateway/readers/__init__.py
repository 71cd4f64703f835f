"""The files of runs, read so that looking costs little: what is asked for again is kept, the rest is not loaded whole."""

from __future__ import annotations

from quartet.gateway.readers.jsonl_records import Records
from quartet.gateway.readers.metrics import Metrics
from quartet.gateway.readers.timeline import Timelines
from quartet.gateway.readers.tokens import Tokenizers
from quartet.gateway.readers.trajectories import Trajectories


class Reading:
    """What a gateway keeps in memory of the files: caches alone, which may be dropped at any time."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.records = Records()
        self.timelines = Timelines()
        self.tokenizers = Tokenizers()
        self.trajectories = Trajectories()
