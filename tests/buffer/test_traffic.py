"""Sessions of users in Redis: each one with a reward is taken by exactly one trajectory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from quartet.buffer import traffic as module
from quartet.buffer.connection import Redis
from quartet.buffer.traffic import SessionInfo, SessionRequest, SessionState, TrafficStore, new_period
from quartet.contract.trajectory import FinishReason, Segment, SegmentRole, TrajectoryId
from quartet.contract.turn_record import RecordedTurn
from quartet.errors import FailedPrecondition

HOUR = 3600.0


@pytest.fixture
def store(redis_client: Redis, redis_url: str, request: pytest.FixtureRequest) -> TrafficStore:
    return TrafficStore(redis_client, redis_url, request.node.name)


def turn(index: int, token: int = 7) -> RecordedTurn:
    segment = Segment(SegmentRole.POLICY, np.array([token], np.int32), np.array([-0.5], np.float32), 3)
    return RecordedTurn(index, segment, 3, b"d" * 16, FinishReason.EOS, request=b"r" * 16)


def opened(id: str, number: int = 1, owner: str = "owner") -> SessionInfo:
    return SessionInfo(id, SessionState.OPEN, number, owner)


def append(store: TrafficStore, id: str, number: int, period: str = "", request: bool = True) -> None:
    """Record a turn, and the request that it answers."""
    assert store.append_turn(opened(id), turn(number), HOUR, period)
    if request:
        body = b"{}\n%d" % number
        assert store.append_request(id, number, SessionRequest("/v1/completions", body, (number,)), HOUR)


def answered(store: TrafficStore, id: str, requests: int = 1, period: str = "") -> str:
    """Open a session with answered requests."""
    for number in range(requests):
        append(store, id, number, period)
    return id


def rewarded(store: TrafficStore, id: str, reward: float = 1.0) -> str:
    store.give_reward(answered(store, id), reward)
    return id


def state(store: TrafficStore, id: str) -> SessionState:
    info = store.info(id)
    assert info is not None
    return info.state


def place(step: int, prompt: int) -> TrajectoryId:
    return TrajectoryId("any", step, prompt, 0)


def test_a_session_has_its_requests_and_turns_in_order(store: TrafficStore) -> None:
    answered(store, "a", 3)
    requests, record = store.load("a")
    assert [each.body for each in requests] == [b"{}\n0", b"{}\n1", b"{}\n2"]
    assert [each.index for each in record.turns] == [0, 1, 2]


def test_numbers_of_sessions_are_never_used_twice(store: TrafficStore) -> None:
    numbers = [store.new_number() for _ in range(3)]
    assert len(set(numbers)) == 3
    store.remove_all()
    assert store.new_number() not in numbers


def test_the_first_turn_opens_a_session_and_no_other_one_with_its_id(store: TrafficStore) -> None:
    assert not store.append_turn(opened("a"), turn(1), HOUR)
    assert store.info("a") is None
    assert store.append_turn(opened("a", 5, "mine"), turn(0), HOUR)
    assert not store.append_turn(opened("a", 6, "other"), turn(0), HOUR)
    assert not store.append_turn(opened("a", 6, "other"), turn(1), HOUR)
    assert store.info("a") == SessionInfo("a", SessionState.OPEN, 5, "mine")
    assert store.count_open() == 1


def test_another_turn_or_request_with_the_same_number_is_refused(store: TrafficStore) -> None:
    answered(store, "a")
    assert store.append_turn(opened("a"), turn(0), HOUR)
    assert not store.append_turn(opened("a"), turn(0, token=8), HOUR)
    assert not store.append_request("a", 0, SessionRequest("/v1/completions", b"other"), HOUR)
    assert store.load("a")[0][0].body == b"{}\n0"


def test_rewards_form_a_queue_and_end_their_sessions(store: TrafficStore) -> None:
    for id, reward in (("a", 1.0), ("b", -0.1)):
        answered(store, id)
        info = store.give_reward(id, reward, '{"x": 1}')
        assert info is not None
        assert (info.state, info.reward) == (SessionState.REWARDED, reward)
    assert not store.append_turn(opened("a"), turn(1), HOUR)
    assert not store.append_request("a", 1, SessionRequest("/v1/completions", b""), HOUR)
    assert store.logged("a") == '{"x": 1}'
    assert (store.count_open(), store.count_rewarded()) == (0, 2)
    # A repeated request does not change the first one.
    info = store.give_reward("a", 5.0)
    assert info is not None
    assert info.reward == 1.0
    assert store.count_rewarded() == 2
    assert [store.take(place(1, 0)), store.take(place(1, 1)), store.take(place(1, 2))] == ["a", "b", None]


def test_sessions_that_are_attested_together_are_taken_in_the_order_of_their_rewards(store: TrafficStore) -> None:
    ids = [f"{number * 7 % 10}" for number in range(10)]
    for number, id in enumerate(ids):
        assert store.append_turn(opened(id, number + 1), turn(0), HOUR, "period")
        assert store.append_request(id, 0, SessionRequest("/v1/completions", b"{}"), HOUR)
        store.give_reward(id, 1.0)
    for id in sorted(ids):
        store.end_period(id, "period", attested=True)
    assert [store.take(place(1, prompt)) for prompt in range(10)] == ids


def test_a_session_without_an_answer_gets_no_reward(store: TrafficStore) -> None:
    append(store, "a", 0, request=False)
    info = store.give_reward("a", 1.0)
    assert info is not None
    assert info.state is SessionState.OPEN
    assert store.give_reward("never", 1.0) is None


def test_a_trajectory_that_is_generated_again_keeps_its_session(store: TrafficStore) -> None:
    rewarded(store, "a")
    rewarded(store, "b")
    assert [store.take(place(1, 5)) for _ in range(3)] == ["a"] * 3
    assert store.take(place(2, 5)) == "b"
    assert state(store, "a") is SessionState.TAKEN


def test_concurrent_trajectories_take_each_session_once(store: TrafficStore) -> None:
    ids = {rewarded(store, f"s{number}") for number in range(24)}
    places = [place(1, number % 24) for number in range(72)]
    with ThreadPoolExecutor(8) as threads:
        taken = list(threads.map(store.take, places))
    by_place = {}
    for where, id in zip(places, taken, strict=True):
        assert by_place.setdefault(where, id) == id
    assert set(by_place.values()) == ids
    assert store.count_rewarded() == 0


def test_a_committed_step_leaves_only_the_states_of_its_sessions(store: TrafficStore, redis_client: Redis) -> None:
    rewarded(store, "a", 0.25)
    rewarded(store, "b")
    store.take(place(1, 0))
    store.take(place(3, 0))
    store.forget_before(3)
    info = store.info("a")
    assert info is not None
    assert (info.state, info.reward, info.requests, info.step) == (SessionState.TRAINED, 0.25, 1, 1)
    assert store.load("a")[1].turns == ()
    assert store.taken(1) == {}
    assert store.taken(3) == {"0/0": "b"}
    assert redis_client.ttl(store._session("a")) > 0
    assert redis_client.ttl(store._session("b")) == -1
    # The id of a trained session does not begin another one.
    assert not store.append_turn(opened("a"), turn(0), HOUR)


def test_a_session_that_cannot_be_trained_makes_room_for_the_next(store: TrafficStore) -> None:
    rewarded(store, "old")
    rewarded(store, "new")
    assert store.take(place(9, 0)) == "old"
    store.drop(place(9, 0), "old", SessionState.STALE)
    assert store.take(place(9, 0)) == "new"
    assert state(store, "old") is SessionState.STALE


def test_sessions_are_deleted_unless_a_step_has_them(store: TrafficStore) -> None:
    answered(store, "open")
    for id in ("queued", "taken"):
        rewarded(store, id)
    store.drop(place(1, 0), store.take(place(1, 0)) or "", SessionState.DELETED)
    assert store.take(place(1, 1)) == "taken"
    for id in ("open", "taken"):
        store.delete(id)
    assert [state(store, id) for id in ("open", "queued", "taken")] == ["deleted", "deleted", "taken"]
    assert store.load("open")[0] == []
    assert store.delete("never") is None


def test_sessions_without_a_reward_expire_after_their_last_request(store: TrafficStore) -> None:
    for id in ("a", "b"):
        assert store.append_turn(opened(id), turn(0), -1.0)
    store.append_request("b", 0, SessionRequest("/v1/completions", b""), HOUR)
    store.expire()
    assert [state(store, id) for id in ("a", "b")] == ["expired", "open"]
    assert store.count_open() == 1


def test_a_session_is_taken_only_after_all_its_turns_are_attested(store: TrafficStore) -> None:
    periods = [new_period() for _ in range(3)]
    for number, period in enumerate(periods[:2]):
        append(store, "a", number, period)
    store.end_period("a", periods[1], attested=True)
    store.give_reward("a", 1.0)
    rewarded(store, "b")
    # The queue does not wait for it, and it is not lost.
    assert [store.take(place(1, 0)), store.take(place(1, 1))] == ["b", None]
    assert (store.count_rewarded(), state(store, "a")) == (1, SessionState.REWARDED)
    for _ in range(2):
        store.end_period("a", periods[0], attested=True)
        store.end_period("a", periods[2], attested=True)
    assert [store.take(place(1, 1)), store.take(place(1, 2))] == ["a", None]
    assert not store.is_spoiled("a")


@pytest.mark.parametrize("first", ["attestation", "reward"])
def test_a_session_with_turns_of_damaged_weights_is_known(store: TrafficStore, first: str) -> None:
    period = new_period()
    answered(store, "a", period=period)
    if first == "reward":
        store.give_reward("a", 1.0)
    store.end_period("a", period, attested=False)
    store.end_period("never", period, attested=False)
    store.give_reward("a", 1.0)
    assert store.is_spoiled(store.take(place(1, 0)) or "")
    assert store.take(place(1, 1)) is None
    assert store.info("never") is None


def test_sessions_of_a_process_that_ended_before_the_attestation_are_given_up(
    store: TrafficStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, silent = "1@gone", new_period()
    for id, period in (("gone", gone), ("silent", silent)):
        answered(store, id, period=period)
        store.give_reward(id, 1.0)
    monkeypatch.setattr(module, "has_ended", "gone".__eq__)
    store.end_lost_periods()
    assert store.is_spoiled(store.take(place(1, 0)) or "")
    assert store.take(place(1, 1)) is None
    monkeypatch.setattr(module, "UNATTESTED_SECONDS", -1.0)
    store.end_lost_periods()
    assert store.take(place(1, 1)) == "silent"
    assert store.is_spoiled("silent")


def test_an_ended_session_keeps_its_numbers_and_the_digest_of_what_was_logged(store: TrafficStore) -> None:
    def ended(id: str) -> SessionInfo:
        info = store.info(id)
        assert info is not None
        return info

    answered(store, "deleted", 2)
    store.delete("deleted")
    answered(store, "expired", 3)
    store.append_request("expired", 3, SessionRequest("/v1/completions", b""), -1.0)
    store.expire()
    assert [ended(id).requests for id in ("deleted", "expired")] == [2, 4]
    for number, end in enumerate((SessionState.STALE, SessionState.TRAINED)):
        info = store.give_reward(answered(store, end), 0.5, '{"x": 1}')
        assert info is not None
        assert store.take(place(2, number)) == end
        if end is SessionState.STALE:
            store.drop(place(2, number), end, end)
        else:
            store.forget_step(2)
        kept = ended(end)
        assert (kept.state, kept.requests, kept.reward, kept.logged_digest) == (end, 1, 0.5, info.logged_digest)
        assert kept.logged_digest not in ("", module.digest_of('{"x": 2}'))


def test_sessions_of_an_earlier_run_are_removed_in_every_state(store: TrafficStore, redis_client: Redis) -> None:
    answered(store, "open")
    for id in ("taken", "queued"):
        rewarded(store, id)
    assert store.take(place(1, 0)) == "taken"
    store.give_reward(answered(store, "waiting", period=new_period()), 1.0)
    other = TrafficStore(redis_client, "", f"{store._prefix}-other")
    answered(other, "open")
    store.remove_all()
    assert [store.info(id) for id in ("open", "taken", "queued", "waiting")] == [None] * 4
    assert (store.count_open(), store.count_rewarded(), store.taken(1)) == (0, 0, {})
    assert store.take(place(1, 0)) is None
    assert other.count_open() == 1


def test_a_request_keeps_its_idempotency_key(store: TrafficStore) -> None:
    append(store, "a", 0, request=False)
    request = SessionRequest("/v1/completions", b"{}", (0,), key="a key=\n% é")
    assert store.append_request("a", 0, request, HOUR)
    assert store.load("a")[0] == [request]


def test_sessions_of_policies_that_the_run_has_no_more_are_ended(store: TrafficStore) -> None:
    answered(store, "open")
    for id in ("taken", "queued"):
        rewarded(store, id)
    store.give_reward(answered(store, "waiting", period=new_period()), 1.0)
    assert store.take(place(1, 0)) == "taken"
    store.forget_all()
    states = [state(store, id) for id in ("open", "queued", "waiting", "taken")]
    assert states == ["stale", "stale", "stale", "taken"]
    assert (store.count_open(), store.count_rewarded()) == (0, 0)


def test_a_second_call_does_not_drop_what_the_first_has_taken_instead(store: TrafficStore) -> None:
    for id in ("old", "new", "newer"):
        rewarded(store, id)
    assert store.take(place(9, 0)) == "old"
    for _ in range(2):
        store.drop(place(9, 0), "old", SessionState.STALE)
        assert store.take(place(9, 0)) == "new"
    assert state(store, "newer") is SessionState.REWARDED


def test_a_call_that_was_left_takes_nothing_for_a_committed_step(store: TrafficStore) -> None:
    rewarded(store, "a")
    rewarded(store, "b")
    assert store.take(place(2, 0)) == "a"
    store.forget_step(2)
    for step in (1, 2):
        with pytest.raises(FailedPrecondition, match="is committed"):
            store.take(place(step, 1))
    # A run that computes a step again takes sessions for it.
    store.forget_before(2)
    assert store.take(place(2, 1)) == "b"


def test_an_answer_counts_as_delivered_only_once_that_is_recorded(store: TrafficStore) -> None:
    append(store, "a", 0, request=False)
    assert store.append_request("a", 0, SessionRequest("/v1/completions", b"", (0,), delivered=False), HOUR)
    assert [(each.turns, each.delivered) for each in store.load("a")[0]] == [((0,), False)]
    store.set_delivered("a", 0)
    assert [each.delivered for each in store.load("a")[0]] == [True]
