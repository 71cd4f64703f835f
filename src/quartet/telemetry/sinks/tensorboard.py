"""TensorBoard sink. Writes event files without the TensorBoard package."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import text

from quartet.contract.control import Alert
from quartet.telemetry.sinks.sink import with_prefix


class TensorBoard:
    """One event file for each start of the run. TensorBoard hides obsolete steps by the session logs in them.

    The writer of tensorboardX is not used: it needs another thread, and flushes to the disk.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._file = folder, self._open(folder)
        self._write(Event(file_version="brain.Event:2"))

    def continues_from(self, step: int) -> None:
        """Make TensorBoard hide the metrics of later steps."""
        self._write(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics below ``train``."""
        self._scalars(step, with_prefix("train", metrics))

    def evaluation(self, step: int, summary: Mapping[str, float]) -> None:
        """Write an evaluation's metrics below ``evaluation``."""
        self._scalars(step, with_prefix("evaluation", summary))

    def alert(self, alert: Alert) -> None:
        """Write an alert as text."""
        content = f"{alert.evidence}. {alert.remedy} ({alert.action})"
        self._write(Event(step=alert.step, summary=text(f"alerts/{alert.guard}", content)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(Event(step=step, summary=Summary(value=values)))

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        data = event.SerializeToString()
        header = struct.pack("<Q", len(data))
        checked = [header, _checksum(header), data, _checksum(data)]
        self._file.write(b"".join(checked))
        self._file.flush()

    @staticmethod
    def _open(folder: Path) -> BinaryIO:
        """Open a new file. TensorBoard reads the files of a folder in the order of their names."""
        now = time.time_ns()
        return (folder / f"events.out.tfevents.{now // 10**9}.quartet.{now}.{os.getpid()}").open("xb")


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(data))
