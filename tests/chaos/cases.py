"""Cases of the chaos suite: process, fault, moment of a step, and seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

STEPS = 6
CHECKPOINT_EVERY = 2
KEPT = (4, 6)
"""The steps whose checkpoints are there at the end."""
PROMPTS_PER_STEP = 12
SCORE_BATCH = 4
MINI_BATCHES = 3
FLUSHES = 2
"""Times that the actor writes to the stream in a step: it does so for 8 trajectories, and at the end."""

PROCESSES = ("orchestrator", "actor", "critic", "reward", "reference", "redis")
"""Those that a run needs; the launcher starts, watches and restarts them."""
GATEWAY = "gateway"
"""The same of one that a run does not need."""
EVERYTHING = "everything"
"""The launcher, and with it every process that it started; the run is resumed by hand."""
KILL, STOP = "SIGKILL", "SIGSTOP"
STOPPED_SECONDS = 1.5
"""Seconds between SIGSTOP and SIGCONT."""
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Moment:
    """A boundary of the step's transaction. ``failpoint`` is where the run is held there, unless the victim has its own.

    ``per_step`` is how often a step passes it, ``nth`` which of these is meant; those of checkpoints are passed once for each.
    """

    name: str
    failpoint: str
    own: Mapping[str, str] = field(default_factory=dict)
    per_step: int = 1
    nth: int = 1
    of_checkpoint: bool = False

    def setting(self, victim: str, seed: int) -> str:
        """The failpoint's setting: where to hold, and at which passing."""
        step = self.step(seed)
        passed = step // CHECKPOINT_EVERY - 1 if self.of_checkpoint else (step - 1) * self.per_step
        return f"{self.failpoint_of(victim)}=hold@{passed + self.nth}"

    def failpoint_of(self, victim: str) -> str:
        """Return where the run is held."""
        return self.own.get(victim, self.failpoint)

    def step(self, seed: int) -> int:
        """The step of which it is: before the first checkpoint, right after it, or with a step to replay behind it."""
        return (2, 4, 2)[seed] if self.of_checkpoint else (2, 3, 4)[seed]


MOMENTS = (
    Moment("generating", "actor.generating"),
    Moment("appending", "actor.appending", per_step=FLUSHES, nth=2),
    Moment("appended", "actor.appended", per_step=FLUSHES),
    Moment(
        "scoring",
        "reward.scoring",
        {"reference": "reference.scoring", "critic": "critic.scoring"},
        per_step=PROMPTS_PER_STEP // SCORE_BATCH,
        nth=2,
    ),
    Moment("sealed", "orchestrator.sealed"),
    Moment("stepping", "actor.stepping", {"critic": "critic.stepping"}, per_step=MINI_BATCHES, nth=2),
    Moment("stepped", "actor.stepped", {"critic": "critic.stepped"}, per_step=MINI_BATCHES, nth=2),
    Moment("updated", "orchestrator.updated"),
    Moment("committed", "orchestrator.committed"),
    Moment("saving", "actor.saving", {"critic": "critic.saving"}, of_checkpoint=True),
    Moment("manifest_writing", "orchestrator.manifest_writing", of_checkpoint=True),
    Moment("manifest_written", "orchestrator.manifest_written", of_checkpoint=True),
    Moment("checkpointed", "orchestrator.checkpointed", of_checkpoint=True),
)
"""In the order of a step; docs/durability.md says what each means."""


@dataclass(frozen=True)
class Case:
    """One fault."""

    process: str
    fault: str
    moment: Moment
    seed: int

    @property
    def name(self) -> str:
        return f"{self.process}-{self.fault}-{self.moment.name}-seed{self.seed}"

    @property
    def setting(self) -> str:
        """Of the failpoint that holds the run at the moment."""
        return self.moment.setting(self.process, self.seed)


PAIRS = [
    *((process, fault) for process in PROCESSES for fault in (KILL, STOP)),
    (EVERYTHING, KILL),
    *((GATEWAY, fault) for fault in (KILL, STOP)),
]
# Each row begins with another seed, so every pair and every moment meets every seed.
CASES = tuple(
    Case(process, fault, moment, (row + column) % len(SEEDS))
    for row, moment in enumerate(MOMENTS)
    for column, (process, fault) in enumerate(PAIRS)
)
