"""Summary of a profile of one process, and of a run. See proto/quartet/v1/profile.proto for the fields of a summary."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_PROFILED_STEPS = 10
"""Largest number of steps of a profile: a trace grows with each operator."""


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """Time of an operator or a kernel in all its calls."""

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Gap:
    """Time in a call in which nothing was computed or sent, between two operators or kernels."""

    after: str
    before: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ProfileSummary:
    """Where the time of a profile of one process went."""

    device: str
    seconds: float
    work_seconds: dict[str, float] = field(default_factory=dict)
    compute_seconds: float = 0.0
    gap_seconds: float = 0.0
    communication_seconds: float = 0.0
    exposed_communication_seconds: float = 0.0
    kernels: tuple[OperatorTime, ...] = ()
    operators: tuple[OperatorTime, ...] = ()
    gaps: tuple[Gap, ...] = ()
    cut_off: bool = False


@dataclass(frozen=True, slots=True)
class ServiceProfile:
    """Profile of one process. ``problem`` says why it is incomplete, or is empty."""

    service: str
    """actor, critic, or "generator HOST:PORT"; "actor+critic" for roles in one process."""
    file: str | None = None
    """Name of the trace in the folder of the profile; None without one."""
    bytes: int = 0
    problem: str = ""
    summary: ProfileSummary | None = None


@dataclass(frozen=True, slots=True)
class RunProfile:
    """Profile of steps of a run, as in ``summary.json``."""

    step: int
    """First step."""
    last_step: int
    created: float
    """Time of its end, in seconds since 1970."""
    step_seconds: dict[str, float]
    """Duration of each step by its number. A step that was repeated has that of its last attempt."""
    services: tuple[ServiceProfile, ...]
