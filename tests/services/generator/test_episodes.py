"""Episodes: turns of the policy and an environment, with limits, failures and answers at any time."""

from __future__ import annotations

import itertools
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from quartet.codec.trajectories import trajectory_from_bytes, trajectory_to_bytes
from quartet.contract.generation import EpisodeSettings, GenerationBatch, GenerationRequest, SamplingParameters
from quartet.contract.trajectory import EnvironmentReply, FinishReason, Outcome, SegmentRole, Trajectory, TrajectoryId
from quartet.engines.engine import EngineResponse, TurnSource
from quartet.engines.request_checks import check_response
from quartet.errors import Cancelled, FailedPrecondition, MismatchError
from quartet.models.generation.torch_engine import TorchEngine
from quartet.services.generator.episodes import EnvironmentAccess, generate_episodes
from tests.services.generator.environments import EchoEnvironment, ForgetfulEnvironment, failure
from tests.unit.models import tiny

STOPS = frozenset({tiny.EOS, 7, 9})
LIMIT, TURN = 40, 6
REQUESTS = tiny.requests(12, step=3, lengths=(2, 9))


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    return TorchEngine(tiny.causal("llama", max_position_embeddings=128), STOPS, 64)


def batch_of(requests: Sequence[GenerationRequest] = REQUESTS, **changes: object) -> GenerationBatch:
    settings = {"max_turns": 5, "max_turn_tokens": TURN, **changes}
    limit = settings.pop("max_response_tokens", LIMIT)
    episode = EpisodeSettings(**settings)  # type: ignore[arg-type]
    return GenerationBatch("run", 3, 1, requests, SamplingParameters(int(limit)), 5, 2, attempt=4, episode=episode)  # type: ignore[call-overload]


def episodes(
    engine: TorchEngine,
    environment: EchoEnvironment,
    batch: GenerationBatch,
    slots: int = 64,
    max_open: int = 100,
    rounds: bool = False,
    cancelled: Callable[[], bool] = lambda: False,
    on_turn: Callable[[Trajectory], None] = lambda turn: None,
    max_attempts: Callable[[Outcome], int] = lambda outcome: 1,
) -> list[Trajectory]:
    """Generate the episodes of ``batch`` and return them, ordered by id. ``rounds``: as with an engine without turns."""
    engine._max_concurrent = slots
    finished: list[Trajectory] = []

    def observed(responses: Iterator[EngineResponse]) -> Iterator[Trajectory]:
        for response in responses:
            turn = check_response(response, engine._served, batch.sampling, 2, "torch")
            on_turn(turn)
            yield turn

    def generate(turns: Sequence[GenerationRequest]) -> Iterator[Trajectory]:
        return observed(engine.generate(turns, batch.sampling, batch.seed, cancelled))

    def generate_turns(prompts: Sequence[GenerationRequest], turns: TurnSource) -> Iterator[Trajectory]:
        return observed(engine.generate_turns(prompts, batch.sampling, batch.seed, cancelled, turns))

    generate_episodes(
        EnvironmentAccess(environment, max_open, max_attempts),
        batch,
        batch.requests,
        tiny.VOCABULARY,
        generate,
        None if rounds else generate_turns,
        finished.append,
        cancelled,
    )
    assert not environment.sessions
    return sorted(finished, key=lambda trajectory: trajectory.id)


def encoded(trajectories: Sequence[Trajectory]) -> list[bytes]:
    return [trajectory_to_bytes(item) for item in sorted(trajectories, key=lambda item: item.id)]


def test_the_ids_of_three_turns_are_those_of_engine_and_environment(engine: TorchEngine) -> None:
    environment, turns = EchoEnvironment(turns=3), list[Trajectory]()
    result = episodes(engine, environment, batch_of(), on_turn=turns.append)
    assert [item.id for item in result] == [request.id for request in REQUESTS]
    for trajectory in result:
        own = [turn for turn in turns if turn.id == trajectory.id]
        roles = [segment.role for segment in trajectory.segments]
        assert roles == [SegmentRole.PROMPT, *[SegmentRole.POLICY, SegmentRole.OBSERVATION] * 2, SegmentRole.POLICY]
        assert [part.token_ids.tolist() for part in trajectory.turns] == [turn.response_ids.tolist() for turn in own]
        assert [part.log_probs.tolist() for part in trajectory.turns] == [turn.log_probs.tolist() for turn in own]
        # The engine computed each turn after exactly the tokens that the trajectory has before it.
        for index, turn in enumerate(own):
            before = [part.token_ids for part in trajectory.segments[: 1 + 2 * index]]
            assert turn.prompt_ids.tolist() == np.concatenate(before).tolist()
        # The environment got each turn as the engine generated it.
        got = [call for call in environment.calls if call.session.startswith(f"{trajectory.id}/")]
        assert [(call.turn, list(call.token_ids)) for call in got] == [
            (0, trajectory.prompt_ids.tolist()),
            *((number, turn.response_ids.tolist()) for number, turn in enumerate(own, 1)),
        ]
        assert trajectory.finish_reason is FinishReason.DONE
        assert len(trajectory.turn_rewards) == 3
        assert (trajectory.policy_version, trajectory.outcome) == (2, Outcome.OK)
        assert encoded([trajectory_from_bytes(trajectory_to_bytes(trajectory))]) == encoded([trajectory])


def test_the_first_turn_is_the_response_without_an_environment_and_later_turns_have_own_streams(
    engine: TorchEngine,
) -> None:
    result = episodes(engine, EchoEnvironment(turns=3), batch_of())
    single = tiny.generated(engine, list(REQUESTS), seed=5, max_response_tokens=TURN)
    assert [item.turns[0].token_ids.tolist() for item in result] == [item.response_ids.tolist() for item in single]
    for turn in (1, 2):
        requests = [
            GenerationRequest(
                item.id, np.concatenate([part.token_ids for part in item.segments[: 1 + 2 * turn]]), number, TURN
            )
            for item in result
            for number in (turn, 0)
        ]
        own, first = (tiny.generated(engine, requests[start::2], seed=5, max_response_tokens=LIMIT) for start in (0, 1))
        assert [item.response_ids.tolist() for item in own] == [item.turns[turn].token_ids.tolist() for item in result]
        assert [item.response_ids.tolist() for item in own] != [item.response_ids.tolist() for item in first]


def test_a_turn_that_does_not_continue_the_tokens_begins_a_branch(engine: TorchEngine) -> None:
    environment, turns = ForgetfulEnvironment(turns=5, tokens=3), list[Trajectory]()
    result = episodes(engine, environment, batch_of(max_response_tokens=60), on_turn=turns.append)
    for trajectory in result:
        own = [turn for turn in turns if turn.id == trajectory.id]
        assert [len(branch.turns) for branch in trajectory.branches] == [2, 2, 1]
        assert [branch.parent for branch in trajectory.branches] == [-1, 0, 1]
        # All tokens before a turn, as the engine got them, are those of its branch, and each turn is in one branch.
        before = []
        for branch in trajectory.branches:
            ids = np.concatenate([part.token_ids for part in branch.segments])
            ends = np.cumsum([len(part.token_ids) for part in branch.segments])
            before += [
                ids[: end - len(part.token_ids)].tolist()
                for part, end in zip(branch.segments, ends, strict=True)
                if part.role is SegmentRole.POLICY
            ]
        assert [turn.prompt_ids.tolist() for turn in own] == before
        assert [part.token_ids.tolist() for part in trajectory.turns] == [turn.response_ids.tolist() for turn in own]
        assert len(trajectory.turn_rewards) == 5
        for parent, branch in itertools.pairwise(trajectory.branches):
            ids = np.concatenate([part.token_ids for part in parent.segments])
            shared = branch.shared_tokens
            assert shared >= len(trajectory.prompt_ids)
            assert ids[:shared].tolist() == branch.prompt_ids[:shared].tolist()
            assert ids[shared : shared + 1].tolist() != branch.prompt_ids[shared : shared + 1].tolist()
        assert encoded([trajectory_from_bytes(trajectory_to_bytes(trajectory))]) == encoded([trajectory])


def test_a_branch_that_shares_no_token_has_no_parent(engine: TorchEngine) -> None:
    environment = ForgetfulEnvironment(bare=True, turns=3, tokens=3)
    for trajectory in episodes(engine, environment, batch_of(max_response_tokens=60)):
        (branch,) = trajectory.further_branches
        assert (branch.parent >= 0) == (branch.shared_tokens > 0)
        trajectory_from_bytes(trajectory_to_bytes(trajectory))


@pytest.mark.parametrize(("slots", "rounds"), [(3, False), (64, True), pytest.param(1, False, marks=pytest.mark.slow)])
def test_branches_do_not_depend_on_the_engines_batches(engine: TorchEngine, slots: int, rounds: bool) -> None:
    batch = batch_of(max_response_tokens=60)
    expected = episodes(engine, ForgetfulEnvironment(turns=5), batch)
    assert encoded(
        episodes(engine, ForgetfulEnvironment(wait=jitter, turns=5), batch, slots, rounds=rounds)
    ) == encoded(expected)


def test_no_branch_is_longer_than_the_prompt_and_the_limit(engine: TorchEngine) -> None:
    result = episodes(engine, ForgetfulEnvironment(turns=9, tokens=2), batch_of(max_turns=9, max_response_tokens=20))
    for trajectory in result:
        for branch in trajectory.branches:
            ids = sum(len(part.token_ids) for part in branch.segments)
            assert ids <= len(trajectory.prompt_ids) + 20
            assert branch.segments[-1].role is SegmentRole.POLICY
    assert any(len(trajectory.policy_ids) > 20 for trajectory in result)
    # A prompt that leaves no room for a turn ends the episode with the branch before it.
    long = episodes(engine, ForgetfulEnvironment(turns=9, tokens=30), batch_of(max_turns=9, max_response_tokens=20))
    assert {(item.finish_reason, item.further_branches) for item in long} == {(FinishReason.LENGTH, ())}


def test_a_failed_episode_begins_again_with_its_first_branch(engine: TorchEngine) -> None:
    failed: set[str] = set()

    def fail(session: str, turn: int) -> EnvironmentReply | None:
        if turn < 3 or session in failed or session.endswith(".2"):
            return None
        failed.add(session)
        return failure()

    batch = batch_of(max_response_tokens=60)
    expected = episodes(engine, ForgetfulEnvironment(turns=5), batch)
    again = episodes(engine, ForgetfulEnvironment(turns=5, fail=fail), batch, max_attempts=lambda outcome: 2)
    assert len(failed) == len(REQUESTS)
    assert encoded(again) == encoded(expected)
    last = episodes(engine, ForgetfulEnvironment(turns=5, fail=lambda _, turn: failure() if turn == 3 else None), batch)
    for trajectory in last:
        assert (trajectory.finish_reason, len(trajectory.branches)) == (FinishReason.FAILED, 2)
        trajectory_from_bytes(trajectory_to_bytes(trajectory))


def test_a_branch_before_the_first_turn_or_outside_the_vocabulary_is_a_failure(engine: TorchEngine) -> None:
    def begins(turn_of: int, ids: list[int]) -> Callable[[str, int], EnvironmentReply | None]:
        reply = EnvironmentReply(np.zeros(0, np.int32), 0.0, False, prompt=np.array(ids, np.int32))
        return lambda session, turn: reply if turn == turn_of else None

    for fail, problem in (
        (begins(0, [2]), "its first answer begins another sequence"),
        (begins(1, [2, tiny.VOCABULARY]), "its observation after turn 1 has token ids outside"),
    ):
        (item, *_) = episodes(engine, EchoEnvironment(fail=fail), batch_of())
        assert item.outcome is Outcome.ENVIRONMENT_ERROR
        assert problem in item.detail


def jitter(session: str, turn: int) -> None:
    """Delay an answer by up to 6 ms."""
    time.sleep(zlib.crc32(f"{session} {turn}".encode()) % 7 / 1000)


@pytest.mark.parametrize(
    ("slots", "max_open", "rounds"),
    [
        (3, 5, False),
        (3, 4, True),
        *(pytest.param(*other, marks=pytest.mark.slow) for other in ((64, 100, False), (1, 2, False), (64, 100, True))),
    ],
)
def test_timing_and_batches_change_no_bit(engine: TorchEngine, slots: int, max_open: int, rounds: bool) -> None:
    expected = encoded(episodes(engine, EchoEnvironment(), batch_of()))
    environment = EchoEnvironment(wait=jitter)
    assert encoded(episodes(engine, environment, batch_of(), slots, max_open, rounds)) == expected
    assert environment.most_open <= max_open


def test_the_number_of_generators_changes_no_bit(engine: TorchEngine) -> None:
    expected = encoded(episodes(engine, EchoEnvironment(), batch_of()))
    parts = [episodes(engine, EchoEnvironment(wait=jitter), batch_of(REQUESTS[start::3])) for start in range(3)]
    assert encoded([item for part in parts for item in part]) == expected


def test_another_seed_gives_other_observations(engine: TorchEngine) -> None:
    def first_observations(seed: int) -> list[list[int]]:
        batch = replace(batch_of(), seed=seed)
        result = episodes(engine, EchoEnvironment(first_observation=True), batch)
        return [item.segments[1].token_ids.tolist() for item in result]

    assert first_observations(5) != first_observations(6)


def test_the_observation_of_a_reset_is_before_the_first_turn(engine: TorchEngine) -> None:
    for item in episodes(engine, EchoEnvironment(turns=1, tokens=2, first_observation=True), batch_of()):
        assert [segment.role for segment in item.segments] == ["prompt", "observation", "policy"]
        assert item.response_mask.tolist() == [False, False] + [True] * len(item.policy_ids)
        assert item.log_probs[:2].tolist() == [0, 0]
        assert item.response_ids.tolist() == np.concatenate([part.token_ids for part in item.segments[1:]]).tolist()


def test_an_empty_observation_is_no_segment(engine: TorchEngine) -> None:
    for item in episodes(engine, EchoEnvironment(turns=2, tokens=0), batch_of()):
        assert [segment.role for segment in item.segments] == ["prompt", "policy", "policy"]
        assert item.response_mask.all()


def test_the_prompts_own_fields_reach_the_environment(engine: TorchEngine) -> None:
    environment = EchoEnvironment(turns=1)
    fields = {request.id.prompt: f'{{"number": {request.id.prompt}}}' for request in REQUESTS}
    episodes(engine, environment, batch_of(fields=fields))
    assert {session.split("/")[2]: text for session, text in environment.fields.items()} == {
        str(prompt): text for prompt, text in fields.items()
    }


def test_the_limit_of_turns_ends_an_episode(engine: TorchEngine) -> None:
    environment = EchoEnvironment(turns=100)
    for item in episodes(engine, environment, batch_of(max_turns=2)):
        assert (item.finish_reason, len(item.turns), len(item.turn_rewards)) == (FinishReason.LENGTH, 2, 2)
        # The observation after the last turn is not part of the trajectory.
        assert item.segments[-1].role is SegmentRole.POLICY


@pytest.mark.parametrize("limit", [9, 10, 11, 17])
def test_the_limit_of_tokens_covers_all_turns_and_observations(engine: TorchEngine, limit: int) -> None:
    environment = EchoEnvironment(turns=100, tokens=3)
    result = episodes(engine, environment, batch_of(max_turns=50, max_response_tokens=limit))
    for item in result:
        assert item.finish_reason is FinishReason.LENGTH
        # Another observation and a token would not have fitted.
        assert limit - 3 <= len(item.response_ids) <= limit
        assert all(len(turn.token_ids) <= TURN for turn in item.turns)
        assert len(item.turn_rewards) == len(item.turns)
    assert max(len(item.response_ids) for item in result) > limit - 3


def test_without_a_limit_of_turn_tokens_a_turn_may_take_all_tokens(engine: TorchEngine) -> None:
    result = episodes(engine, EchoEnvironment(turns=1), batch_of(max_turn_tokens=0))
    single = tiny.generated(engine, list(REQUESTS), seed=5, max_response_tokens=LIMIT)
    assert [item.response_ids.tolist() for item in result] == [item.response_ids.tolist() for item in single]


@pytest.mark.parametrize(
    ("failing_turn", "outcome"), [(0, Outcome.ENVIRONMENT_ERROR), (1, Outcome.TIMEOUT), (2, Outcome.ENVIRONMENT_ERROR)]
)
def test_a_failed_environment_is_an_outcome_and_no_reward(
    engine: TorchEngine, outcome: Outcome, failing_turn: int
) -> None:
    dead = REQUESTS[4].id

    def fail(session: str, turn: int) -> EnvironmentReply | None:
        return failure(outcome) if session.startswith(f"{dead}/") and turn == failing_turn else None

    expected = episodes(engine, EchoEnvironment(turns=3), batch_of())
    result = episodes(engine, EchoEnvironment(turns=3, fail=fail), batch_of())
    for item, good in zip(result, expected, strict=True):
        if item.id != dead:
            assert encoded([item]) == encoded([good])
            continue
        assert (item.finish_reason, item.outcome, item.detail) == (FinishReason.FAILED, outcome, "the dice are lost")
        assert item.turn_rewards == ()
        assert len(item.turns) == failing_turn
        assert encoded([trajectory_from_bytes(trajectory_to_bytes(item))]) == encoded([item])


@pytest.mark.parametrize(("failing_turn", "rounds"), [(0, True), (1, False), (2, True), (2, False)])
def test_an_episode_that_fails_once_is_played_again_to_the_same_bits(
    engine: TorchEngine, failing_turn: int, rounds: bool
) -> None:
    def fail(session: str, turn: int) -> EnvironmentReply | None:
        first = session.endswith("/1.4")
        return failure() if first and turn == failing_turn and zlib.crc32(session.encode()) % 2 else None

    expected = episodes(engine, EchoEnvironment(turns=3), batch_of(), rounds=rounds)
    environment = EchoEnvironment(turns=3, fail=fail)
    result = episodes(engine, environment, batch_of(), 3, 5, rounds, max_attempts=lambda outcome: 3)
    assert encoded(result) == encoded(expected)
    sessions = {call.session for call in environment.calls}
    assert len(REQUESTS) < len(sessions) < 2 * len(REQUESTS)
    assert environment.most_open <= 5


def test_an_episode_that_fails_again_ends_after_the_attempts_of_its_outcome(engine: TorchEngine) -> None:
    dead, slow = REQUESTS[4].id, REQUESTS[7].id

    def fail(session: str, turn: int) -> EnvironmentReply | None:
        outcomes = {f"{dead}/": Outcome.ENVIRONMENT_ERROR, f"{slow}/": Outcome.TIMEOUT}
        return next(
            (failure(outcome) for start, outcome in outcomes.items() if turn and session.startswith(start)), None
        )

    environment = EchoEnvironment(turns=3, fail=fail)
    attempts = {Outcome.ENVIRONMENT_ERROR: 3, Outcome.TIMEOUT: 1}
    result = episodes(engine, environment, batch_of(), max_attempts=attempts.__getitem__)
    failed = {item.id: item for item in result if item.outcome is not Outcome.OK}
    assert {id: (item.outcome, len(item.turns)) for id, item in failed.items()} == {
        dead: (Outcome.ENVIRONMENT_ERROR, 1),
        slow: (Outcome.TIMEOUT, 1),
    }
    sessions = sorted({call.session for call in environment.calls if call.session.startswith((f"{dead}/", f"{slow}/"))})
    assert sessions == [f"{dead}/1.4", f"{dead}/1.4.2", f"{dead}/1.4.3", f"{slow}/1.4"]


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (EnvironmentReply(np.array([tiny.VOCABULARY], np.int32), 0.0, False), "has token ids outside 0..60"),
        (EnvironmentReply(np.array([-1], np.int32), 0.0, False), "has token ids outside 0..60"),
        (
            EnvironmentReply(np.zeros(LIMIT, np.int32), 0.0, False),
            "has 40 tokens; expected less than 40",
        ),
        (EnvironmentReply(np.zeros(0, np.int32), 0.0, True), "it ended the episode before the first turn"),
    ],
)
def test_an_unusable_first_answer_is_an_error_of_the_environment(
    engine: TorchEngine, reply: EnvironmentReply, problem: str
) -> None:
    result = episodes(engine, EchoEnvironment(turns=1, fail=lambda session, turn: None if turn else reply), batch_of())
    assert {item.outcome for item in result} == {Outcome.ENVIRONMENT_ERROR}
    assert all(problem in item.detail for item in result)


@pytest.mark.parametrize("waits", [0, 1])
def test_other_trajectories_finish_while_some_wait_for_their_environment(engine: TorchEngine, waits: int) -> None:
    """Two of twelve episodes get their first answer only when all others are finished, with fewer rows than episodes."""
    slow, others = {str(request.id) for request in REQUESTS[:2]}, threading.Event()
    finished: list[TrajectoryId] = []

    def wait(session: str, turn: int) -> None:
        if turn == waits and session.rpartition("/")[0] in slow:
            assert others.wait(60)

    environment = EchoEnvironment(wait=wait)
    batch = batch_of()

    def generate_turns(prompts: Sequence[GenerationRequest], turns: TurnSource) -> Iterator[Trajectory]:
        engine._max_concurrent = 4
        responses = engine.generate_turns(prompts, batch.sampling, batch.seed, lambda: False, turns)
        return (check_response(each, engine._served, batch.sampling, 2, "torch") for each in responses)

    def on_finished(trajectory: Trajectory) -> None:
        finished.append(trajectory.id)
        if len(finished) == len(REQUESTS) - len(slow):
            others.set()

    generate_episodes(
        EnvironmentAccess(environment, 100),
        batch,
        REQUESTS,
        61,
        lambda turns: iter(()),
        generate_turns,
        on_finished,
        lambda: False,
    )
    assert {str(id) for id in finished[-2:]} == slow


@pytest.mark.parametrize("rounds", [False, True])
def test_a_cancelled_generation_ends_while_the_environment_is_silent(engine: TorchEngine, rounds: bool) -> None:
    silent, asked = threading.Event(), threading.Event()

    def wait(session: str, turn: int) -> None:
        asked.set()
        silent.wait(60)

    environment = EchoEnvironment(wait=wait)
    try:
        with pytest.raises(Cancelled):
            episodes(engine, environment, batch_of(), rounds=rounds, cancelled=asked.is_set)
        assert not environment.sessions
    finally:
        silent.set()


def test_an_error_that_is_no_failure_of_the_environment_is_raised(engine: TorchEngine) -> None:
    def wait(session: str, turn: int) -> None:
        if turn == 1:
            raise MismatchError("another process")

    with pytest.raises(MismatchError, match="another process"):
        episodes(engine, EchoEnvironment(wait=wait), batch_of())


def test_episodes_need_an_environment(engine: TorchEngine) -> None:
    with pytest.raises(FailedPrecondition, match="this process has none"):
        generate_episodes(
            None, batch_of(), REQUESTS, 61, lambda turns: iter(()), None, lambda trajectory: None, lambda: False
        )


@pytest.mark.parametrize("rounds", [False, True])
def test_all_turns_of_a_greedy_request_are_greedy(rounds: bool, engine: TorchEngine) -> None:
    mixed = [replace(request, greedy=index % 2 == 0) for index, request in enumerate(REQUESTS)]
    result = episodes(engine, EchoEnvironment(turns=3), batch_of(mixed), rounds=rounds)
    sampled = episodes(engine, EchoEnvironment(turns=3), batch_of(), rounds=rounds)
    batch = batch_of()
    greedy = episodes(
        engine,
        EchoEnvironment(turns=3),
        replace(batch, sampling=replace(batch.sampling, temperature=0.0)),
        rounds=rounds,
    )
    for index, item in enumerate(result):
        expected = (greedy if index % 2 == 0 else sampled)[index]
        assert item.response_ids.tolist() == expected.response_ids.tolist()
        assert len(item.turns) == 3


# Recurrent states, convolution states and an index of keys; the others of the page of architectures are like one of these.
@pytest.mark.parametrize(
    "kind", ["qwen3_5_text", "lfm2", "deepseek_v32", pytest.param("falcon_h1", marks=pytest.mark.slow)]
)
def test_log_probs_of_turns_of_models_with_states_equal_those_of_whole_sequences(kind: str) -> None:
    model = tiny.causal(kind, max_position_embeddings=512)
    generator = np.random.default_rng(0)
    requests = [
        GenerationRequest(
            TrajectoryId("run", 3, index, 0), generator.integers(0, tiny.VOCABULARY, length).astype(np.int32)
        )
        for index, length in enumerate((1, 200, 3, 64, 17, 130, 3, 65))
    ]
    # Fewer slots than prompts, so that new prompts and turns join rows that are being decoded.
    result = episodes(TorchEngine(model, STOPS, 8), EchoEnvironment(turns=3), batch_of(requests), slots=3)
    assert {len(trajectory.turns) for trajectory in result} == {3}
    differences = list[float]()
    for trajectory in result:
        ids = torch.from_numpy(np.concatenate([part.token_ids for part in trajectory.segments]).astype(np.int64))
        with torch.no_grad():
            log_probs = model(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1).numpy()
        end = 0
        for part in trajectory.segments:
            end += len(part.token_ids)
            if part.role is SegmentRole.POLICY:
                before = np.arange(end - len(part.token_ids), end) - 1
                differences += np.abs(part.log_probs - log_probs[before, part.token_ids]).tolist()
    same = np.mean(np.array(differences) < 1e-5)
    # An index chooses between tokens of equal scores by their columns, which a batch shifts: up to 10 of 125 tokens differ.
    assert same > 0.8 if kind == "deepseek_v32" else same == 1
