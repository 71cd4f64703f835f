"""State of a run, its alerts, and its settings that can change."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

ENDLESS_STEPS = 1_000_000_000
"""Number of steps of a run without an end, such as one that serves users: the largest value of run.steps."""


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert of a guard after a step."""

    step: int
    guard: str
    action: str
    """warn, pause or stop."""
    evidence: str
    """The metrics that the guard compared."""
    remedy: str
    """Advice that usually helps."""

    def __str__(self) -> str:
        return f"guard {self.guard} ({self.action}) after step {self.step}: {self.evidence}; {self.remedy}"


class RunState(enum.StrEnum):
    """State of a run."""

    STARTING = "starting"
    TRAINING = "training"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    PAUSED = "paused"
    RECOVERING = "recovering"

    @property
    def ended(self) -> bool:
        """Return whether the state is final."""
        return self in (RunState.FINISHED, RunState.STOPPED, RunState.FAILED)


@dataclass(slots=True)
class Progress:
    """Progress of a run. See ``Progress`` in proto/quartet/v1/orchestrator.proto for every field.

    ``metrics`` are the metrics of the last committed step. ``notes_before`` and ``alerts_before`` count the entries that were
    dropped before the first of ``notes`` and ``alerts``.
    """

    run: str
    total_steps: int
    state: RunState = RunState.STARTING
    step: int = 0
    phase: str = "starting"
    num_scored: int = 0
    num_expected: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    error: str = ""
    exit_code: int = 0
    notes: list[str] = field(default_factory=list)
    alerts: list[Alert] = field(default_factory=list)
    recoveries: int = 0
    notes_before: int = 0
    alerts_before: int = 0

    @property
    def is_endless(self) -> bool:
        """Return whether the run has no last step that anyone waits for."""
        return self.total_steps >= ENDLESS_STEPS


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that can be changed during training."""

    name: str
    """Such as kl_coefficient or actor.learning_rate."""
    value: float
    """Value for the next step. For a learning rate, the initial value of its schedule."""
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A change of a setting."""

    setting: str
    before: float
    after: float
    step: int
    """First step with the new value."""
    user: str
    """Who requested it: access of the token and network address of the client, or a name."""
    at: float
    """Time in seconds since 1970."""
