"""Generators and actors that are killed at random times: the bits are the same, however weights reach the generators."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.chaos.runs import ChaosSetup, digests, train
from tests.e2e.commands import QUARTET, Command
from tests.waiting import LIMIT

KILLS = 17
"""Kills per case, so that all six have more than 100."""
KILLS_OF_RUN = 6
"""Maximum kills of one run: a run whose only generator is killed again and again gives up, as it should."""
PAUSE = (0.5, 3.0)
"""Shortest and longest time between two kills, in seconds. A process that is killed more often does no work."""
VICTIMS = ("quartet.services generator ", "quartet.services actor ")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The digests of a run whose actor generates."""
    setup = ChaosSetup(tmp_path_factory.mktemp("chaos-actor"))
    return digests(setup.undisturbed(0))


@pytest.mark.parametrize("generators", [1, 2, 4])
@pytest.mark.parametrize("share_weights", [True, False])
@pytest.mark.slow
def test_a_run_whose_generators_and_actor_are_killed_at_random_is_bit_identical(
    share_weights: bool, generators: int, expected: dict[str, str], tmp_path: Path
) -> None:
    setup = ChaosSetup(tmp_path, generators=generators, share_weights=share_weights)
    assert digests(setup.undisturbed(0)) == expected
    way = "shared memory" if share_weights else "full"
    log = setup.undisturbed(0) / "logs"
    assert any(f"way='{way}'" in path.read_text() for path in log.glob("generator*.log"))
    schedule, kills = random.Random(f"{share_weights} {generators}"), 0
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
            assert digests(folder / "runs" / "chaos") == expected
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
