"""ProfileService of a process: records its compute thread, and streams the trace with a summary."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import grpc
import structlog

from quartet.codec.messages import to_message
from quartet.errors import FailedPrecondition
from quartet.models.operator_profile import OperatorProfile
from quartet.rpc.compute_thread import ComputeThread
from quartet.system.machine import free_memory_bytes, resident_bytes
from quartet.telemetry.trace_summary import summarise
from quartet.v1 import profile_pb2, profile_pb2_grpc

log = structlog.get_logger()

CHUNK_BYTES = 1024 * 1024
MAX_TRACE_BYTES = 512 * 1024 * 1024
"""Largest compressed trace that is sent. Of a larger one, only the summary is."""
MAX_SECONDS = 600.0
"""Time after which a profile ends by itself, because the orchestrator may have died."""
GROWTH_AT_END = 6
"""Memory of a profile that has ended, over that in which it was recorded. Measured: 1.5 kB and 0.26 kB an event."""
CHECK_SECONDS = 0.5
"""Time between two checks of these limits while a call works."""


class ProfileServicer(profile_pb2_grpc.ProfileServiceServicer):
    """ProfileService of a process whose model work runs on ``compute``."""

    def __init__(self, compute: ComputeThread) -> None:
        self._compute = compute
        compute.around, compute.at_poll = self._around, self._end_at_limit
        # Only the compute thread changes them.
        self._profile: OperatorProfile | None = None
        self._name, self._is_cut_off = "", False
        self._memory, self._next_check = 0, 0.0

    def register(self, server: grpc.Server) -> None:
        """Add this servicer to a server."""
        profile_pb2_grpc.add_ProfileServiceServicer_to_server(self, server)

    def StartProfile(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Start a profile after the work in progress. It replaces one that is under way."""
        self._compute.run("profile", context, lambda _: self._start(request.profile))
        return profile_pb2.StartProfileResponse()

    def TakeProfile(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        """End a profile after the work in progress. Yield that it has ended, its summary, then its trace."""
        profile, cut_off = self._compute.run("profile", context, lambda _: self._end(request.profile))
        yield profile_pb2.TakeProfileResponse()
        summary = summarise(profile.events(), profile.seconds, cut_off)
        yield to_message(profile_pb2.TakeProfileResponse, summary=summary)
        with tempfile.TemporaryDirectory(prefix="quartet-profile-") as folder:
            path = Path(folder, "trace.json.gz")
            profile.write(path)
            if (size := path.stat().st_size) > MAX_TRACE_BYTES:
                log.warning("trace not sent", bytes=size, limit=MAX_TRACE_BYTES)
                return
            with path.open("rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    yield profile_pb2.TakeProfileResponse(chunk=chunk)

    def _start(self, name: str) -> None:
        if self._profile is not None and not self._is_cut_off:
            self._profile.stop()
        self._profile, self._name, self._is_cut_off = OperatorProfile(), name, False
        self._memory = resident_bytes() or 0
        log.info("profile started", profile=name)

    def _end(self, name: str) -> tuple[OperatorProfile, bool]:
        profile, cut_off = self._profile, self._is_cut_off
        if profile is None or name != self._name:
            raise FailedPrecondition(
                f"profile {name}: not under way in this process, which has been restarted or has another one"
            )
        if not cut_off:
            profile.stop()
        self._profile = None
        log.info("profile ended", profile=name, seconds=profile.seconds)
        return profile, cut_off

    def _around(self, kind: str) -> AbstractContextManager[object]:
        """Return the context of a call on the compute thread."""
        self._next_check = 0.0
        self._end_at_limit()
        if self._profile is None or self._is_cut_off or kind == "profile":
            return nullcontext()
        return self._profile.work(kind)

    def _end_at_limit(self) -> None:
        """End a profile that has lasted too long, or that would take more than half of the free memory."""
        profile = self._profile
        if profile is None or self._is_cut_off or time.perf_counter() < self._next_check:
            return
        self._next_check = time.perf_counter() + CHECK_SECONDS
        recorded = max(0, (resident_bytes() or 0) - self._memory)
        if profile.running_seconds() > MAX_SECONDS or GROWTH_AT_END * recorded > free_memory_bytes() / 2:
            profile.stop()
            self._is_cut_off = True
            log.warning("profile ended: it has reached its limit", profile=self._name, seconds=profile.seconds)
