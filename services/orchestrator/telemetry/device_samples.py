"""Samples of how busy the devices of the trained models and the generators are, for the metrics and the timeline of each step."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from quartet.contract.status import DeviceReading
from quartet.errors import QuartetError
from quartet.rpc.security.credentials import LOCAL, Credentials
from quartet.rpc.service_channel import ServiceChannel

INTERVAL_SECONDS = 1.0
"""Seconds between two questions to a service, as services read their devices."""
MAX_SAMPLES = 200
"""Largest number of samples of a service in a step. Beyond it, every second one is dropped."""


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """The devices of a service at a time (``time.perf_counter``): mean use, and sums of memory and power. None: not reported."""

    at: float
    busy: float | None
    memory_bytes: float | None
    power_watts: float | None

    @classmethod
    def of(cls, at: float, readings: tuple[DeviceReading, ...]) -> DeviceSample:
        """Return the sample of the readings of one process."""
        busy = [each.busy for each in readings if each.busy is not None]
        memory = [each.memory_used_bytes for each in readings if each.memory_used_bytes is not None]
        power = [each.power_watts for each in readings if each.power_watts is not None]
        return cls(at, fmean(busy) if busy else None, sum(memory) if memory else None, sum(power) if power else None)


class DeviceSampler:
    """Sampler that asks services once a second, on a separate thread and without waiting for any of them. Thread-safe."""

    def __init__(self, targets: Callable[[], Mapping[str, str]], credentials: Credentials = LOCAL) -> None:
        """``targets`` returns the address of each service by its name on the timeline: actor, generator HOST:PORT."""
        self._targets, self._credentials = targets, credentials
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._samples: defaultdict[str, list[DeviceSample]] = defaultdict(list)
        self._last: dict[str, DeviceSample] = {}
        self._channels: dict[tuple[str, str], ServiceChannel] = {}
        self._questions: dict[tuple[str, str], Future[None]] = {}

    def start(self) -> None:
        """Begin to ask."""
        threading.Thread(target=self._follow, name="device-samples", daemon=True).start()

    def close(self) -> None:
        """Ask no more."""
        self._ended.set()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step so far: ``device_busy_ROLE`` and others. Without a new sample: those of the last."""
        with self._lock:
            services = {name: self._samples[name] or [last] for name, last in self._last.items()}
        roles: defaultdict[str, list[DeviceSample]] = defaultdict(list)
        for name, samples in services.items():
            roles[name.partition(" ")[0]] += samples
        metrics: dict[str, float] = {}
        for role, samples in roles.items():
            for metric, field, combine in _METRICS:
                if values := [value for each in samples if (value := getattr(each, field)) is not None]:
                    metrics[f"{metric}_{role}"] = combine(values)
        return metrics

    def take(self, started: float) -> list[dict[str, Any]]:
        """Return the samples since the last call, as objects of ``timeline.jsonl``, in seconds since ``started``."""
        with self._lock:
            samples, self._samples = self._samples, defaultdict(list)
        return [
            {
                "service": name,
                "samples": [
                    [round(each.at - started, 3), each.busy, each.memory_bytes, each.power_watts]
                    for each in own
                    if each.at >= started
                ],
            }
            for name, own in sorted(samples.items())
            if own
        ]

    def add(self, name: str, sample: DeviceSample) -> None:
        """Add a sample of a service."""
        with self._lock:
            own = self._samples[name]
            own.append(sample)
            if len(own) > MAX_SAMPLES:
                del own[::2]
            self._last[name] = sample

    def _follow(self) -> None:
        while not self._ended.wait(INTERVAL_SECONDS):
            self._ask()
        for channel in self._channels.values():
            channel.close()

    def _ask(self) -> None:
        """Ask each service that has answered the last question."""
        targets = dict.fromkeys(self._targets().items())
        for gone in self._channels.keys() - targets.keys():
            self._channels.pop(gone).close()
            with self._lock:
                self._last.pop(gone[0], None)
        for target in targets:
            name, address = target
            if target not in self._channels:
                self._channels[target] = ServiceChannel(name.partition(" ")[0], address, self._credentials)
            if (question := self._questions.get(target)) is None or question.done():
                try:
                    self._questions[target] = self._channels[target].start_status(
                        lambda process, name=name: (  # type: ignore[misc]
                            self.add(name, DeviceSample.of(time.perf_counter(), process.devices))
                            if process.devices
                            else None
                        )
                    )
                except QuartetError:
                    continue  # The next question may find it again.


_METRICS: tuple[tuple[str, str, Callable[[list[float]], float]], ...] = (
    ("device_busy", "busy", fmean),
    ("device_memory_bytes", "memory_bytes", max),
    ("device_power_watts", "power_watts", fmean),
)
