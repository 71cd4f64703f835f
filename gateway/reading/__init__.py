"""The files of runs, read so that looking costs little: what is asked for again is kept, the rest is not loaded whole."""

from __future__ import annotations

from gateway.reading.metrics import Metrics
from gateway.reading.records import Records
from gateway.reading.timeline import Timelines
from gateway.reading.tokens import Tokenizers
from gateway.reading.trajectories import Trajectories


class Reading:
    """What a gateway keeps in memory of the files: caches alone, which may be dropped at any time."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.records = Records()
        self.timelines = Timelines()
        self.tokenizers = Tokenizers()
        self.trajectories = Trajectories()
