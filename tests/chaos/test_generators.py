"""Generators and actors that are killed at random times: the bits are the same, however weights reach the generators."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from quartet.contract.weights import TransferWay
from tests.chaos.runs import ChaosSetup, digests, train
from tests.e2e.commands import QUARTET, Command
from tests.waiting import LIMIT

KILLS = 17
"""Kills per case, so that six of the cases have more than 100."""
KILLS_OF_RUN = 6
"""Maximum kills of one run: a run whose only generator is killed again and again gives up, as it should."""
PAUSE = (0.5, 3.0)
"""Shortest and longest time between two kills, in seconds. A process that is killed more often does no work."""
VICTIMS = ("quartet.services generator ", "quartet.services actor ")


RANKS: dict[TransferWay, int] = {"process group": 2}
"""Ranks of actor and critic by the way of the weights, if there are several."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, str]]:
    """Return the digests of a run whose actor generates, by its ranks. The sums of several ranks round in another way."""

    @cache
    def of_ranks(ranks: int) -> dict[str, str]:
        return digests(ChaosSetup(tmp_path_factory.mktemp("chaos-actor"), ranks=ranks).undisturbed(0))

    return of_ranks


@pytest.mark.parametrize("generators", [1, 2, 4])
@pytest.mark.parametrize("way", ["shared memory", "full", "process group"])
@pytest.mark.slow
def test_a_run_whose_generators_and_actor_are_killed_at_random_is_bit_identical(
    way: TransferWay, generators: int, expected: Callable[[int], dict[str, str]], tmp_path: Path
) -> None:
    ranks = RANKS.get(way, 1)
    setup = ChaosSetup(tmp_path, ranks=ranks, generators=generators, way=way)
    assert digests(setup.undisturbed(0)) == expected(ranks)
    log = setup.undisturbed(0) / "logs"
    assert any(f"way='{way}'" in path.read_text() for path in log.glob("generator*.log"))
    schedule, kills = random.Random(f"{way} {generators}"), 0
    for number in range(KILLS):
        if kills >= KILLS:
            break
        folder = tmp_path / f"killed-{number}"
        folder.mkdir()
        command = Command(QUARTET, *train(setup.config, 0), cwd=folder, fresh=setup.fresh)
        try:
            kills += kill_at_random(command, schedule)
            result = command.wait(LIMIT)
            assert (result.code, result.leftovers) == (0, []), result
            assert digests(folder / "runs" / "chaos") == expected(ranks)
        finally:
            command.clean_up()
    assert kills >= KILLS


def kill_at_random(command: Command, schedule: random.Random) -> int:
    """Kill up to KILLS_OF_RUN processes until the run ends. Return how many."""
    kills = 0
    while kills < KILLS_OF_RUN and command.process.poll() is None:
        time.sleep(schedule.uniform(*PAUSE))
        victims = sorted(pid for pid, line in command.processes().items() if any(each in line for each in VICTIMS))
        if victims and command.process.poll() is None:
            os.kill(schedule.choice(victims), signal.SIGKILL)
            kills += 1
    return kills
