"""Cases of the chaos suite: process, fault, moment of a step, and seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quartet.system.failpoints import VARIABLE

STEPS = 6
CHECKPOINT_EVERY = 2
KEPT = (4, 6)
"""Steps of the checkpoints that exist at the end."""
PROMPTS_PER_STEP = 12
SCORE_BATCH = 4
MINI_BATCHES = 3
FLUSHES = 2
"""Number of times that the actor writes to the stream in a step: after 8 trajectories, and at the end. Each of two ranks has
fewer trajectories, and writes once."""

PROCESSES = ("orchestrator", "actor", "critic", "reward", "reference", "redis")
"""Processes that a run needs. The launcher starts, monitors and restarts them."""
GATEWAY = "gateway"
"""A process that the launcher restarts, but that a run does not need."""
AGENT = "agent"
"""The process of one agent, which the environment service starts."""
EVERYTHING = "everything"
"""The launcher with every process that it started. The suite then runs `quartet train --resume`."""
RANKS = ("actor-0", "actor-1", "critic-0", "critic-1")
"""Ranks of the worker groups of actor and critic."""
OF_EVERY_RANK = (
    *("actor.loading", "critic.loading", "critic.scoring"),
    *("actor.stepping", "actor.stepped", "critic.stepping", "critic.stepped"),
)
"""Failpoints that every rank of a group reaches. Rank 0 reaches the others."""
KILL, STOP = "SIGKILL", "SIGSTOP"
STOPPED_SECONDS = 1.5
"""Seconds between SIGSTOP and SIGCONT."""
SEEDS = (0, 1, 2)
HOLD = "CHAOS_HOLD"
"""Environment variable of agents with the step and the turn, as STEP/TURN, before which the first of them holds the run."""


def role_and_rank(process: str) -> tuple[str, int]:
    """Return the role of a process, and its rank in the worker group."""
    role, _, rank = process.partition("-")
    return role, int(rank or 0)


@dataclass(frozen=True)
class Moment:
    """A moment of the step's transaction, at which a failpoint holds the run.

    ``by_process`` has the failpoints of processes that do not use ``failpoint``. A step passes the failpoint ``per_step`` times,
    and the ``nth`` time is the moment. If ``of_checkpoint`` is set, only a checkpoint passes it, once. If ``at_start`` is set,
    each process passes it once, before the first step. If ``agent_turn`` is set, an agent holds the run before this turn; it
    counts from 1.
    """

    name: str
    failpoint: str
    by_process: Mapping[str, str] = field(default_factory=dict)
    per_step: int = 1
    nth: int = 1
    of_checkpoint: bool = False
    at_start: bool = False
    agent_turn: int = 0

    def setting(self, victim: str, seed: int) -> str:
        """Return the setting of the failpoint: its name, and the pass at which it holds the run."""
        step = self.step(seed)
        per_step, nth = (1, 1) if victim in RANKS and self.per_step == FLUSHES else (self.per_step, self.nth)
        passed = step // CHECKPOINT_EVERY - 1 if self.of_checkpoint else (step - 1) * per_step
        name, role, rank = self.failpoint_of(victim), *role_and_rank(victim)
        held = f":{rank}" if rank and name in OF_EVERY_RANK and name.startswith(role) else ""
        return f"{name}{held}=hold@{passed + nth}"

    def failpoint_of(self, victim: str) -> str:
        """Return the name of the failpoint that holds the run."""
        return self.by_process.get(role_and_rank(victim)[0], self.failpoint)

    def step(self, seed: int) -> int:
        """Return the step of the fault: before the first checkpoint, right after it, or one committed step after it.

        At the start it is the first.
        """
        if self.at_start:
            return 1
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
    Moment(
        "loading",
        "actor.loading",
        {role: f"{role}.loading" for role in ("critic", "reward", "reference", "orchestrator")},
        at_start=True,
    ),
    Moment("starting", "orchestrator.starting", at_start=True),
)
"""Moments in the order of a step, then those of a start. docs/evidence/durability.md describes each."""


@dataclass(frozen=True)
class Case:
    """One fault at one moment."""

    process: str
    fault: str
    moment: Moment
    seed: int

    @property
    def name(self) -> str:
        return f"{self.process}-{self.fault}-{self.moment.name}-seed{self.seed}"

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables that hold the run at the moment."""
        if self.moment.agent_turn:
            return {HOLD: f"{self.moment.step(self.seed)}/{self.moment.agent_turn}"}
        return {VARIABLE: self.moment.setting(self.process, self.seed)}


PAIRS = [
    *((process, fault) for process in PROCESSES for fault in (KILL, STOP)),
    (EVERYTHING, KILL),
    *((GATEWAY, fault) for fault in (KILL, STOP)),
]


@dataclass(frozen=True)
class LongEpisodes:
    """Episodes of TURNS turns each, of agents or of an environment.

    ``generators``: processes that generate instead of the actor. ``restores``: the environment has snapshots; without them, its
    turns are repeated.
    """

    agents: bool = False
    generators: int = 1
    restores: bool = True


TURNS = 40
HELD = (1, 20, 39)
"""Turns in which a process is killed."""
EPISODES_PER_STEP = 4
TURNS_PER_STEP = EPISODES_PER_STEP * TURNS


@dataclass(frozen=True, eq=False)
class Part:
    """A part of the suite, with a table on the page. ``ranks``: processes of actor and of critic."""

    name: str
    pairs: tuple[tuple[str, str], ...]
    ranks: int = 1
    moments: tuple[Moment, ...] = MOMENTS
    episodes: LongEpisodes | None = None

    @property
    def cases(self) -> tuple[Case, ...]:
        """Return the cases, row by row. Each row starts with another seed, so every pair and moment is tested with every seed."""
        return tuple(
            Case(process, fault, moment, (row + column) % len(SEEDS))
            for row, moment in enumerate(self.moments)
            for column, (process, fault) in enumerate(self.pairs)
        )


def part_of_turns(name: str, episodes: LongEpisodes, *processes: str) -> Part:
    """Return a part whose moments are in the middle of one episode. The others continue meanwhile, to their end."""

    def moment(turn: int) -> Moment:
        name_of_turn = f"{name}-turn{turn}"
        if episodes.agents:
            return Moment(name_of_turn, AGENT, agent_turn=turn)
        # Before the environment gets the turn. The episodes take their turns together.
        nth = (turn - 1) * EPISODES_PER_STEP + 3
        return Moment(name_of_turn, "environment.stepping", per_step=TURNS_PER_STEP, nth=nth)

    return Part(name, tuple((process, KILL) for process in processes), 1, tuple(map(moment, HELD)), episodes)


SERVICES = Part("services", tuple(PAIRS))
GROUPS = Part("groups", tuple((process, fault) for process in RANKS for fault in (KILL, STOP)), 2)
TURN_PARTS = (
    part_of_turns("agents", LongEpisodes(agents=True), AGENT, "environment", "generator", "orchestrator", "redis"),
    part_of_turns("environment", LongEpisodes(), "environment", "generator", "orchestrator", "redis", EVERYTHING),
    part_of_turns("actor", LongEpisodes(generators=0), "environment", "actor", EVERYTHING),
    part_of_turns("replay", LongEpisodes(generators=0, restores=False), "environment", "actor", EVERYTHING),
)
PARTS = (SERVICES, GROUPS, *TURN_PARTS)
CASES = tuple(case for part in PARTS for case in part.cases)


def part_of(case: Case) -> Part:
    """Return the part of a case."""
    return next(part for part in PARTS if (case.process, case.fault) in part.pairs and case.moment in part.moments)
