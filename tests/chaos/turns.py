"""What must hold in the middle of long episodes: every turn is generated once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from quartet.buffer.connection import connect
from quartet.buffer.embedded_redis import EMBEDDED_SOCKET
from tests.chaos.cases import AGENT, EPISODES_PER_STEP, EVERYTHING, TURNS, TURNS_PER_STEP, Case, LongEpisodes
from tests.chaos.corridor import NOTES
from tests.chaos.runs import RUN
from tests.e2e.commands import Command


class Observer:
    """Counts the turns in Redis at the moment of a fault, and those that are generated in the whole run."""

    def __init__(self, case: Case, episodes: LongEpisodes) -> None:
        self._step, self._episodes, self._victim = case.moment.step(case.seed), episodes, case.process
        self.recorded = 0
        """Turns in Redis at the moment of the fault."""

    @property
    def steps(self) -> tuple[Callable[[Command], None], Callable[[Path], Iterator[str]]]:
        """Return what to do before the fault, and after the run."""
        return self.wait_for_the_others, self.problems

    def wait_for_the_others(self, command: Command) -> None:
        """Wait until all episodes but the held one are played to their end and recorded."""
        (socket,) = command.scratch.rglob(EMBEDDED_SOCKET)
        whole = {"turn": TURNS} if self._episodes.agents else {"turn": TURNS, "reply": TURNS + 1}
        with connect(f"unix://{socket}") as client:

            def finished() -> bool:
                keys = client.scan_iter(f"quartet:{RUN}:turns:{self._step}/*")
                # A field is ORIGIN/KIND/NUMBER.
                counts = [Counter(field.decode().split("/")[1] for field in client.hkeys(key)) for key in keys]
                self.recorded = sum(count["turn"] for count in counts)
                return sum(count.items() >= whole.items() for count in counts) == EPISODES_PER_STEP - 1

            command.wait_for(finished)

    def problems(self, run: Path) -> Iterator[str]:
        """Yield what is wrong with the numbers of turns."""
        if self.recorded <= TURNS_PER_STEP - TURNS - 1:
            yield f"only {self.recorded} turns were recorded at the moment of the fault"
        logs = [path.read_text(errors="replace") for path in (run / "logs").glob("*.log")]
        generated: Counter[int] = Counter()
        for log in logs:
            pattern = rf"event='turns of episodes' run='{RUN}' step=(\d+) generated=(\d+) recorded=\d+"
            for step, number in re.findall(pattern, log):
                generated[int(step)] += int(number)
        if self._victim in ("generator" if self._episodes.generators else "actor", EVERYTHING):
            # It could not report the turns that it had generated, which are all recorded.
            generated[self._step] += self.recorded
        if wrong := {step: number for step, number in generated.items() if number != TURNS_PER_STEP}:
            yield f"steps with other numbers of generated turns than {TURNS_PER_STEP}: {wrong}"
        if self._victim == AGENT and (failed := sum(log.count("event='agent failed'") for log in logs)) != 1:
            yield f"{failed} agents have failed; expected the one that was killed"
        if not self._episodes.agents:
            yield from self._given_twice(run)

    def _given_twice(self, run: Path) -> Iterator[str]:
        given = Counter((run.parents[1] / NOTES).read_text().split("\n")[:-1])
        twice = [line for line, number in given.items() if number > 1]
        # The answer to the held turn is lost with its caller, so this turn alone is given again.
        if self._episodes.restores and len(twice) > 1:
            yield f"the environment got {len(twice)} turns more than once, such as {twice[0]}"
