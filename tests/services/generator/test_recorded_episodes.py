"""Episodes that continue after their records, when the call, the process or the environment before them has ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from quartet.buffer import turn_records
from quartet.buffer.connection import Redis
from quartet.buffer.turn_records import TurnRecords, TurnRecordStore
from quartet.contract.arrays import IntArray
from quartet.contract.generation import EpisodeSettings, GenerationBatch, GenerationRequest, SamplingParameters
from quartet.contract.trajectory import EnvironmentReply, Outcome, Trajectory, TrajectoryId
from quartet.contract.turn_record import RecordedTurn
from quartet.engines.engine import EngineResponse, TurnSource
from quartet.engines.request_checks import check_response
from quartet.errors import Cancelled, MismatchError
from quartet.models.generation.torch_engine import TorchEngine
from quartet.services.generator.episodes import EnvironmentAccess, generate_episodes
from tests.services.generator.environments import Call, EchoEnvironment, ForgetfulEnvironment, failure
from tests.services.generator.test_episodes import STOPS, encoded, jitter
from tests.unit.models import tiny

TURNS = 4
Turn = tuple[TrajectoryId, int]


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    return TorchEngine(tiny.causal("llama", max_position_embeddings=128), STOPS, 64)


class Recorded:
    """Generate calls for one batch, with records, and the turns that the engine has generated for them."""

    def __init__(self, engine: TorchEngine, store: TurnRecordStore, run: str, count: int = 6) -> None:
        self._engine, self.store = engine, store
        requests = [
            replace(request, id=replace(request.id, run=run)) for request in tiny.requests(count, 3, lengths=(2, 9))
        ]
        self.batch = GenerationBatch(
            run, 3, 1, requests, SamplingParameters(80), 5, 2, attempt=1, episode=EpisodeSettings(TURNS, 6)
        )
        self.generated: list[Turn] = []
        self.turns: Counter[str] = Counter()
        self.is_recorded = True

    def records(self, batch: GenerationBatch) -> TurnRecords:
        return self.store.records_of(batch)

    def generate(
        self,
        environment: EchoEnvironment,
        rounds: bool = False,
        stop_after: int = 1000,
        max_attempts: int = 1,
        error: type[BaseException] = Cancelled,
    ) -> list[Trajectory]:
        """Return the finished trajectories. After ``stop_after`` turns of the engine, the call ends with ``error``."""
        finished: list[Trajectory] = []
        batch = self.batch
        self.batch = replace(batch, attempt=batch.attempt + 1)
        last = len(self.generated) + stop_after

        def observed(responses: Iterator[EngineResponse]) -> Iterator[Trajectory]:
            for response in responses:
                turn = check_response(response, self._engine._served, batch.sampling, 2, "torch")
                self.generated.append((turn.id, response.request.turn))
                yield turn
                if len(self.generated) == last:
                    raise error("the end")

        def generate(turns: Sequence[GenerationRequest]) -> Iterator[Trajectory]:
            return observed(self._engine.generate(turns, batch.sampling, batch.seed, lambda: False))

        def generate_turns(prompts: Sequence[GenerationRequest], turns: TurnSource) -> Iterator[Trajectory]:
            return observed(self._engine.generate_turns(prompts, batch.sampling, batch.seed, lambda: False, turns))

        generate_episodes(
            EnvironmentAccess(
                environment, 100, lambda outcome: max_attempts, self.records if self.is_recorded else None
            ),
            batch,
            batch.requests,
            tiny.VOCABULARY,
            generate,
            None if rounds else generate_turns,
            finished.append,
            lambda: False,
            self.turns,
        )
        return finished

    def expected(self, environment: EchoEnvironment) -> list[bytes]:
        """Return the trajectories of a call without records."""
        self.is_recorded = False
        result = encoded(self.generate(environment))
        self.is_recorded, self.generated = True, []
        self.turns.clear()
        return result


@pytest.fixture
def recorded(
    engine: TorchEngine, redis_client: Redis, redis_url: str, request: pytest.FixtureRequest
) -> Iterator[Recorded]:
    run = request.node.name.replace("[", "-").replace("]", "")
    result = Recorded(engine, TurnRecordStore(redis_client, redis_url, run), run)
    yield result
    result.store.forget_all()


# test_an_interruption_at_every_turn_generates_each_turn_once has all turns.
@pytest.mark.parametrize("environment", [EchoEnvironment, ForgetfulEnvironment])
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("stop_after", [4, 23, *(pytest.param(other, marks=pytest.mark.slow) for other in (1, 9))])
def test_a_call_continues_where_the_one_before_ended_and_generates_no_turn_twice(
    recorded: Recorded, environment: type[EchoEnvironment], rounds: bool, stop_after: int
) -> None:
    expected = recorded.expected(environment(turns=TURNS))
    with pytest.raises(Cancelled):
        recorded.generate(environment(turns=TURNS, wait=jitter), rounds, stop_after)
    before = Counter(recorded.turns)
    result = recorded.generate(environment(turns=TURNS), rounds)
    assert encoded(result) == expected
    assert max(Counter(recorded.generated).values()) == 1
    assert len(recorded.generated) == len(result) * TURNS == recorded.turns["generated"]
    assert (before["generated"], recorded.turns["recorded"]) == (stop_after, stop_after)


def test_an_interruption_at_every_turn_generates_each_turn_once(recorded: Recorded) -> None:
    expected = recorded.expected(EchoEnvironment(turns=TURNS))
    calls = 0
    while True:
        try:
            result = recorded.generate(EchoEnvironment(turns=TURNS), stop_after=1, error=MismatchError)
            break
        except MismatchError:
            calls += 1
    assert encoded(result) == expected
    assert calls == len(expected) * TURNS
    assert max(Counter(recorded.generated).values()) == 1


def test_finished_episodes_need_no_environment(recorded: Recorded) -> None:
    expected = encoded(recorded.generate(EchoEnvironment(turns=TURNS)))
    environment = EchoEnvironment()
    assert encoded(recorded.generate(environment)) == expected
    assert not environment.calls
    assert not environment.resumed
    assert len(recorded.generated) == len(expected) * TURNS


def test_the_environment_gets_only_turns_without_a_recorded_reply(recorded: Recorded) -> None:
    with pytest.raises(Cancelled):
        recorded.generate(EchoEnvironment(turns=TURNS), rounds=True, stop_after=9)
    environment = EchoEnvironment(turns=TURNS)
    recorded.generate(environment)
    # All six have a first turn with a reply, and three a second one, which has a reply by now or not.
    assert len(environment.resumed) == 6
    assert {call.turn for call in environment.calls} <= set(range(2, TURNS + 1))
    assert max(Counter((call.session, call.turn) for call in environment.calls).values()) == 1


def test_an_environment_that_answers_otherwise_makes_an_episode_begin_again(recorded: Recorded) -> None:
    with pytest.raises(Cancelled):
        recorded.generate(EchoEnvironment(turns=TURNS, tokens=2), rounds=True, stop_after=9)
    # All six have a first turn with a reply. A turn without one would stay.
    expected = recorded.expected(EchoEnvironment(turns=TURNS, tokens=3))
    assert encoded(recorded.generate(EchoEnvironment(turns=TURNS, tokens=3))) == expected
    # The new records count from now on.
    assert encoded(recorded.generate(EchoEnvironment(turns=TURNS, tokens=3))) == expected
    assert len(recorded.generated) == len(expected) * TURNS


def test_records_of_other_weights_are_not_used(recorded: Recorded) -> None:
    recorded.generate(EchoEnvironment(turns=TURNS))
    recorded.generated.clear()
    recorded.batch = replace(recorded.batch, policy_version=7)
    recorded.generate(EchoEnvironment(turns=TURNS))
    assert len(recorded.generated) == 6 * TURNS


@pytest.mark.parametrize("failing_turn", [0, 1, 3])
def test_a_failed_episode_continues_at_the_turn_that_failed(recorded: Recorded, failing_turn: int) -> None:
    expected = recorded.expected(EchoEnvironment(turns=TURNS))

    def fail(session: str, turn: int) -> EnvironmentReply | None:
        return failure() if turn == failing_turn and session.count(".") == 1 else None

    environment = EchoEnvironment(turns=TURNS, fail=fail)
    assert encoded(recorded.generate(environment, max_attempts=2)) == expected
    assert max(Counter(recorded.generated).values()) == 1
    assert len(environment.resumed) == (6 if failing_turn else 0)


class LostEnvironment(EchoEnvironment):
    """An environment that cannot continue an episode, as if its sandbox were gone. A new episode works."""

    def resume(
        self,
        session: str,
        seed: int,
        fields: str,
        token_ids: IntArray,
        turns: Sequence[IntArray],
        replies: Sequence[EnvironmentReply],
    ) -> EnvironmentReply:
        self.resumed.append(Call(session, len(turns), ()))
        return failure()


def test_an_episode_that_cannot_continue_begins_again_in_the_next_attempt(recorded: Recorded) -> None:
    expected = recorded.expected(EchoEnvironment(turns=TURNS))

    def fail(session: str, turn: int) -> EnvironmentReply | None:
        return failure() if turn == 2 and session.count(".") == 1 else None

    environment = LostEnvironment(turns=TURNS, fail=fail)
    assert encoded(recorded.generate(environment, max_attempts=3)) == expected
    # Once each, in the second attempt. The third one generates both recorded turns again, and its records count.
    assert [call.session.rpartition(".")[2] for call in environment.resumed] == ["2"] * len(expected)
    assert len(recorded.generated) == len(expected) * (TURNS + 2)
    assert encoded(recorded.generate(LostEnvironment())) == expected


def test_a_turn_that_fails_after_its_episode_continued_keeps_the_records(recorded: Recorded) -> None:
    expected = recorded.expected(EchoEnvironment(turns=TURNS))

    def fail(session: str, turn: int) -> EnvironmentReply | None:
        return failure() if turn == 2 and not session.endswith(".3") else None

    environment = EchoEnvironment(turns=TURNS, fail=fail)
    assert encoded(recorded.generate(environment, max_attempts=3)) == expected
    assert len(environment.resumed) == 2 * len(expected)
    assert max(Counter(recorded.generated).values()) == 1


def test_an_unusable_reply_is_not_used_again(recorded: Recorded) -> None:
    expected = recorded.expected(EchoEnvironment(turns=TURNS))
    unusable = EnvironmentReply(np.array([tiny.VOCABULARY], np.int32), 0.0, False)

    def fail(session: str, turn: int) -> EnvironmentReply | None:
        return unusable if turn == 1 and session.count(".") == 1 else None

    environment = EchoEnvironment(turns=TURNS, fail=fail)
    assert encoded(recorded.generate(environment, max_attempts=2)) == expected


def test_a_failure_is_not_recorded(recorded: Recorded) -> None:
    environment = EchoEnvironment(turns=TURNS, fail=lambda session, turn: failure() if turn == 2 else None)
    assert {item.outcome for item in recorded.generate(environment)} == {Outcome.ENVIRONMENT_ERROR}
    record = recorded.records(recorded.batch).load(recorded.batch.requests[0].id)
    assert (len(record.turns), len(record.replies)) == (2, 2)


def test_a_turn_that_another_process_has_recorded_first_counts(recorded: Recorded) -> None:
    """The other process has generated another second turn, as an engine without seeds does."""
    other = recorded.records(recorded.batch)
    id = recorded.batch.requests[0].id
    changed: list[RecordedTurn] = []

    def intrude(session: str, turn: int) -> None:
        if session.startswith(f"{id}/") and turn == 1 and not changed:
            (first,) = other.load(id).turns
            tokens = np.array([3, 4, 5], np.int32)
            segment = replace(first.segment, token_ids=tokens, log_probs=np.zeros(3, np.float32))
            changed.append(replace(first, index=1, segment=segment))
            assert other.append(id, changed[0])

    result = recorded.generate(EchoEnvironment(turns=TURNS, wait=intrude))
    (trajectory,) = (item for item in result if item.id == id)
    assert trajectory.turns[1].token_ids.tolist() == [3, 4, 5]
    assert recorded.turns["recorded"] == 2
    assert [turn.segment.token_ids.tolist() for turn in other.load(id).turns] == [
        turn.token_ids.tolist() for turn in trajectory.turns
    ]


def test_turns_that_no_thread_has_recorded_yet_are_recorded_at_the_end(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[Callable[[], object]] = []

    def never(self: object, pool: object, episode: object, call: Callable[[], object]) -> None:
        submitted.append(call)

    with monkeypatch.context() as patch:
        original = generate_episodes.__globals__["Episodes"]._call

        def call(self: object, pool: object, episode: object, work: Callable[[], object]) -> None:
            (never if pool is self._steps else original)(self, pool, episode, work)  # type: ignore[attr-defined]

        patch.setattr(generate_episodes.__globals__["Episodes"], "_call", call)
        with pytest.raises(Cancelled):
            recorded.generate(EchoEnvironment(turns=TURNS), rounds=True, stop_after=4)
    assert len(submitted) == 4
    recorded.generate(EchoEnvironment(turns=TURNS))
    assert max(Counter(recorded.generated).values()) == 1


def test_without_a_buffer_the_end_of_a_call_is_its_own_error(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_records, "PATIENCE_SECONDS", 0.0)
    broken = TurnRecordStore(Redis(unix_socket_path="/nowhere"), "unix:///nowhere", "run")

    class Broken(TurnRecords):
        def append(self, id: TrajectoryId, turn: RecordedTurn) -> bool:
            return broken.records_of(recorded.batch).append(id, turn)

    def records(batch: GenerationBatch) -> TurnRecords:
        whole = recorded.store.records_of(batch)
        return Broken(whole._client, whole._url, whole._origins)

    monkeypatch.setattr(recorded, "records", records)
    with pytest.raises(Cancelled, match="the end"):
        recorded.generate(EchoEnvironment(turns=TURNS), rounds=True, stop_after=6)
