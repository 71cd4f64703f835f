"""Episodes that a step does not need any more."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations

import pytest

from quartet.contract.generation import GenerationRequest
from quartet.contract.trajectory import Outcome, Trajectory, TrajectoryId
from quartet.engines.engine import TurnSource
from quartet.engines.request_checks import check_response
from quartet.models.generation.torch_engine import TorchEngine
from quartet.services.generator.episodes import EnvironmentAccess, generate_episodes
from quartet.services.generator.stragglers import Stragglers
from tests.buffer.samples import trajectory
from tests.services.generator.environments import EchoEnvironment
from tests.services.generator.test_episodes import REQUESTS, STOPS, batch_of, encoded, episodes, jitter
from tests.unit.models import tiny


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


@pytest.mark.parametrize(
    ("slots", "max_open", "rounds"), [(64, 100, False), (3, 100, False), (64, 2, False), (64, 100, True)]
)
def test_the_step_chooses_the_same_episodes_whether_the_others_are_ended_or_not(
    slots: int, max_open: int, rounds: bool
) -> None:
    """In any batches, and however long the environment takes."""
    engine = TorchEngine(tiny.causal("llama", max_position_embeddings=128), STOPS, 64)
    (prompt, *_) = REQUESTS
    samples = [replace(prompt, id=replace(prompt.id, sample=sample)) for sample in range(8)]
    whole = episodes(engine, EchoEnvironment(), batch_of(samples))
    expected = {item.id: item for item in sorted(whole, key=lambda item: item.consumption)[:3]}
    ended = episodes(
        engine, EchoEnvironment(wait=jitter), batch_of(samples, kept_samples=3), slots, max_open, rounds=rounds
    )
    finished = sorted((item for item in ended if item.outcome is Outcome.OK), key=lambda item: item.consumption)
    assert encoded(finished[:3]) == encoded([*expected.values()])
    assert {item.outcome for item in ended} <= {Outcome.OK, Outcome.LEFT_OUT}
    # Equal rounds of turns may end together.
    assert rounds or len(finished) < len(samples)
    assert {item.turn_rewards for item in ended if item.outcome is Outcome.LEFT_OUT} == {()}


def test_an_episode_that_waits_for_its_environment_is_ended_too() -> None:
    engine = TorchEngine(tiny.causal("llama", max_position_embeddings=128), STOPS, 64)
    (prompt, *_) = REQUESTS
    samples = [replace(prompt, id=replace(prompt.id, sample=sample)) for sample in range(4)]
    longest = max(episodes(engine, EchoEnvironment(), batch_of(samples)), key=lambda item: item.consumption)
    left_out = threading.Event()

    def wait(session: str, turn: int) -> None:
        # After its last turn: it has used more than the others by then.
        if turn == len(longest.turns) and session.rpartition("/")[0] == str(longest.id):
            assert left_out.wait(60)

    def cancelled() -> bool:
        return False

    finished = []
    environment = EchoEnvironment(wait=wait)
    batch = batch_of(samples, kept_samples=3)

    def generate_turns(prompts: Sequence[GenerationRequest], turns: TurnSource) -> Iterator[Trajectory]:
        for response in engine.generate_turns(prompts, batch.sampling, batch.seed, cancelled, turns):
            yield check_response(response, engine._served, batch.sampling, 2, "torch")

    access = EnvironmentAccess(environment, 100)
    generate_episodes(
        access, batch, samples, tiny.VOCABULARY, lambda turns: iter(()), generate_turns, finished.append, cancelled
    )
    left_out.set()
    assert {item.id: item.outcome for item in finished}[longest.id] is Outcome.LEFT_OUT


def test_greedy_episodes_are_not_left_out() -> None:
    engine = TorchEngine(tiny.causal("llama", max_position_embeddings=128), STOPS, 64)
    (prompt, *_) = REQUESTS
    samples = [replace(prompt, id=replace(prompt.id, sample=sample), greedy=sample > 1) for sample in range(4)]
    result = episodes(engine, EchoEnvironment(), batch_of(samples, kept_samples=1))
    assert [item.outcome for item in result[2:]] == [Outcome.OK] * 2
