"""Episodes that a step does not need any more."""

from __future__ import annotations

from itertools import permutations

from quartet.contract.trajectory import TrajectoryId
from quartet.services.generator.stragglers import Stragglers
from tests.buffer.samples import trajectory


def test_an_episode_is_left_out_once_enough_of_its_prompt_have_finished_with_less() -> None:
    stragglers, id = Stragglers(2), TrajectoryId("run", 1, 4, 3)
    stragglers.finish(trajectory("run", 4, sample=0, response=5))
    assert not stragglers.is_left_out(id, 100, 9)
    stragglers.finish(trajectory("run", 4, sample=1, response=7))
    assert not stragglers.is_left_out(id, 6, 1)
    assert stragglers.is_left_out(id, 8, 1)
    # Equal tokens: first the turns, then the samples decide.
    assert not stragglers.is_left_out(id, 7, 0)
    assert stragglers.is_left_out(id, 7, 1)
    assert not stragglers.is_left_out(TrajectoryId("run", 1, 4, 0), 7, 1)
    # A third one with less lowers the limit.
    stragglers.finish(trajectory("run", 4, sample=2, response=4))
    assert stragglers.is_left_out(id, 6, 1)


def test_episodes_of_other_prompts_do_not_count() -> None:
    stragglers = Stragglers(1)
    stragglers.finish(trajectory("run", 4, response=1))
    assert not stragglers.is_left_out(TrajectoryId("run", 1, 5, 0), 100, 9)


def test_a_step_that_keeps_all_leaves_out_none() -> None:
    stragglers = Stragglers(0)
    stragglers.finish(trajectory("run", 4, response=1))
    assert not stragglers.is_left_out(TrajectoryId("run", 1, 4, 1), 100, 9)


def test_no_episode_is_left_out_that_the_step_would_keep() -> None:
    """Whatever finishes first, and whenever the others are asked."""
    tokens = [5, 3, 9, 4]
    kept = sorted(range(4), key=lambda sample: tokens[sample])[:2]
    for order in permutations(range(4)):
        stragglers, ended = Stragglers(2), set[int]()
        for sample in order:
            if sample not in ended:
                stragglers.finish(trajectory("run", 4, sample=sample, response=tokens[sample]))
            ended |= {
                each for each in range(4) if stragglers.is_left_out(TrajectoryId("run", 1, 4, each), tokens[each], 1)
            }
        assert ended.isdisjoint(kept)
