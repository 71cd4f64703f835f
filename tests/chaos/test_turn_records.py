"""Faults in the middle of long episodes: every turn is generated once, and the run ends with the same bits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from quartet.buffer.connection import connect
from quartet.buffer.embedded_redis import EMBEDDED_SOCKET
from tests.chaos.cases import EVERYTHING, KILL, PROMPTS_PER_STEP, STOP, Case, Moment
from tests.chaos.corridor import NOTES
from tests.chaos.runs import RUN, ChaosSetup, disturb
from tests.e2e.commands import Command

TURNS = 40
HELD = (1, 20, 39)
"""Turns in which a process is killed."""
TOTAL = PROMPTS_PER_STEP * TURNS
ACTOR, GENERATOR, REPEATED = "actor", "generator", "repeated"
"""Kinds of runs: the actor generates; a generator does; the environment has no snapshots, so its turns are repeated."""


def moment(turn: int) -> Moment:
    """Return the moment before the environment gets a turn of one episode. The others go on meanwhile, to their end."""
    return Moment(f"turn{turn}", "environment.stepping", per_step=TOTAL, nth=(turn - 1) * PROMPTS_PER_STEP + 5)


def cases() -> Iterator[tuple[str, Case]]:
    for number, turn in enumerate(HELD):
        held = moment(turn)
        for victim in ("actor", "orchestrator", "redis", "environment", EVERYTHING):
            yield ACTOR, Case(victim, KILL, held, number)
        for victim in ("generator", "orchestrator", "redis"):
            yield GENERATOR, Case(victim, KILL, held, number)
        for victim in ("environment", "actor"):
            yield REPEATED, Case(victim, KILL, held, number)
    yield ACTOR, Case("environment", STOP, moment(20), 1)


CASES = tuple(cases())


@pytest.fixture(scope="module")
def setups(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChaosSetup]:
    def setup(kind: str) -> ChaosSetup:
        arguments = {"turns": TURNS, "restores": kind != REPEATED}
        folder = tmp_path_factory.mktemp(f"chaos-{kind}")
        return ChaosSetup(folder, corridor=arguments, generators=int(kind == GENERATOR))

    return {kind: setup(kind) for kind in (ACTOR, GENERATOR, REPEATED)}


@dataclass
class Observer:
    """What is in Redis at the moment of the fault, and what happens after it."""

    step: int
    generator_dies: bool
    restores: bool
    before: Counter[str] = field(default_factory=Counter)

    def wait_for_the_others(self, command: Command) -> None:
        """Wait until all episodes but the held one are played to their end and recorded."""
        (socket,) = command.scratch.rglob(EMBEDDED_SOCKET)
        client = connect(f"unix://{socket}")

        def finished() -> bool:
            counts: Counter[str] = Counter()
            whole = 0
            for key in client.scan_iter(f"quartet:{RUN}:turns:{self.step}/*"):
                names = Counter(name.decode().split("/")[1] for name in client.hkeys(key))
                counts += names
                whole += names == {"turn": TURNS, "reply": TURNS + 1}
            self.before = counts
            return whole == PROMPTS_PER_STEP - 1

        command.wait_for(finished)
        client.close()

    def problems(self, run: Path) -> Iterator[str]:
        """Yield what is wrong with the numbers of turns."""
        generated: Counter[int] = Counter()
        for log in (run / "logs").glob("*.log"):
            pattern = rf"event='turns of episodes' run='{RUN}' step=(\d+) generated=(\d+) recorded=\d+"
            for step, number in re.findall(pattern, log.read_text(errors="replace")):
                generated[int(step)] += int(number)
        if self.generator_dies:
            # It could not report the turns that it had generated, which are all recorded.
            generated[self.step] += self.before["turn"]
        if wrong := {step: number for step, number in generated.items() if number != TOTAL}:
            yield f"steps with other numbers of generated turns than {TOTAL}: {wrong}"
        given = Counter((run.parents[1] / NOTES).read_text().split("\n")[:-1])
        twice = [line for line, number in given.items() if number > 1]
        # The answer to the held turn is lost with its caller, so this turn alone is given again.
        if self.restores and len(twice) > 1:
            yield f"the environment got {len(twice)} turns more than once, such as {twice[0]}"


@pytest.mark.parametrize(("kind", "case"), CASES, ids=lambda each: each.name if isinstance(each, Case) else each)
@pytest.mark.slow
def test_a_fault_in_the_middle_of_episodes_generates_no_turn_twice(
    kind: str, case: Case, setups: dict[str, ChaosSetup]
) -> None:
    generating = "generator" if kind == GENERATOR else "actor"
    observer = Observer(case.moment.step(case.seed), case.process in (generating, EVERYTHING), kind != REPEATED)
    result = disturb(case, setups[kind], observer.wait_for_the_others, observer.problems)
    assert result.problems == ()
    assert observer.before["turn"] > TOTAL - TURNS
