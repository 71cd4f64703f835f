"""Profile of the operators of one thread and of the kernels that they start, by torch's profiler."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from quartet.telemetry.trace_summary import WORK_PREFIX, TraceEvent


class OperatorProfile:
    """A profile of the thread that creates and stops it. A process has one at a time. No result depends on it."""

    def __init__(self) -> None:
        """Start to record: operators on the CPU, and kernels if this process uses a GPU."""
        activities = [ProfilerActivity.CPU]
        # Any other question would start the CUDA driver.
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()
        self._started = time.perf_counter()
        self.seconds = 0.0
        """Duration, once it has stopped."""

    def running_seconds(self) -> float:
        """Return the time since the start."""
        return time.perf_counter() - self._started

    def work(self, kind: str) -> AbstractContextManager[object]:
        """Return a context that marks a call of this kind of work in the trace."""
        return record_function(f"{WORK_PREFIX}{kind}")

    def stop(self) -> None:
        """Stop to record, on the thread of the start."""
        self.seconds = self.running_seconds()
        self._profile.stop()

    def events(self) -> Iterator[TraceEvent]:
        """Yield what was recorded, after the stop."""
        results = self._profile.profiler
        assert results is not None
        assert results.kineto_results is not None
        for event in results.kineto_results.events():
            if event.device_type() == DeviceType.CPU:
                kind = event.activity_type()
                if kind not in ("cpu_op", "user_annotation"):
                    continue  # Calls of the CUDA driver: what they start is recorded as kernels.
                yield TraceEvent(
                    event.name(),
                    event.start_ns(),
                    event.end_ns(),
                    event.device_resource_id(),
                    "operator" if kind == "cpu_op" else "annotation",
                )
            elif event.activity_type() != "gpu_user_annotation":
                yield TraceEvent(event.name(), event.start_ns(), event.end_ns(), event.device_resource_id(), "kernel")

    def write(self, path: Path) -> None:
        """Write a Chrome trace, compressed with gzip. ``path`` ends in .json.gz."""
        self._profile.export_chrome_trace(str(path))
