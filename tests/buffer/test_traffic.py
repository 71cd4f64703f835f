"""Sessions of users in Redis: each one with a reward is taken by exactly one trajectory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from quartet.buffer.connection import Redis
from quartet.buffer.traffic import SessionRequest, SessionState, TrafficStore
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


def answered(store: TrafficStore, id: str, requests: int = 1) -> str:
    """Open a session with answered requests."""
    store.open(id, "owner", HOUR)
    for number in range(requests):
        assert store.append_turn(id, turn(number))
        assert store.append_request(id, number, SessionRequest("/v1/completions", b"{}\n%d" % number, (number,)), HOUR)
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
    store.set_delivered("a", 1, False)
    requests, record = store.load("a")
    assert [(each.body, each.delivered) for each in requests] == [(b"{}\n0", True), (b"{}\n1", False), (b"{}\n2", True)]
    assert [each.index for each in record.turns] == [0, 1, 2]
    store.set_delivered("a", 1, True)
    assert all(each.delivered for each in store.load("a")[0])


def test_numbers_of_sessions_are_never_used_twice(store: TrafficStore) -> None:
    numbers = [store.open("a", "owner", HOUR).number, store.new_number(), store.open("b", "owner", HOUR).number]
    assert len(set(numbers)) == 3
    assert store.open("a", "other", HOUR) == store.info("a")
    assert store.open("a", "other", HOUR).owner == "owner"


def test_another_turn_or_request_with_the_same_number_is_refused(store: TrafficStore) -> None:
    answered(store, "a")
    assert store.append_turn("a", turn(0))
    assert not store.append_turn("a", turn(0, token=8))
    assert not store.append_request("a", 0, SessionRequest("/v1/completions", b"other"), HOUR)
    assert store.load("a")[0][0].body == b"{}\n0"


def test_rewards_form_a_queue_and_end_their_sessions(store: TrafficStore) -> None:
    for id, reward in (("a", 1.0), ("b", -0.1)):
        answered(store, id)
        info = store.give_reward(id, reward, '{"x": 1}')
        assert info is not None
        assert (info.state, info.reward) == (SessionState.REWARDED, reward)
    assert not store.append_turn("a", turn(1))
    assert not store.append_request("a", 1, SessionRequest("/v1/completions", b""), HOUR)
    assert store.logged("a") == '{"x": 1}'
    assert (store.count_open(), store.count_rewarded()) == (0, 2)
    # A repeated request does not change the first one.
    info = store.give_reward("a", 5.0)
    assert info is not None
    assert info.reward == 1.0
    assert store.count_rewarded() == 2
    assert [store.take(place(1, 0)), store.take(place(1, 1)), store.take(place(1, 2))] == ["a", "b", None]


def test_a_session_without_an_answer_gets_no_reward(store: TrafficStore) -> None:
    store.open("a", "owner", HOUR)
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
    assert store.open("a", "owner", HOUR).state is SessionState.TRAINED


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
    store.open("a", "owner", -1.0)
    store.open("b", "owner", -1.0)
    store.append_turn("b", turn(0))
    store.append_request("b", 0, SessionRequest("/v1/completions", b""), HOUR)
    store.expire()
    assert [state(store, id) for id in ("a", "b")] == ["expired", "open"]
    assert store.count_open() == 1


def test_sessions_with_spoiled_turns_are_known_in_every_state(store: TrafficStore) -> None:
    answered(store, "a")
    store.spoil("a")
    store.spoil("never")
    store.give_reward("a", 1.0)
    assert store.is_spoiled(store.take(place(1, 0)) or "")
    assert store.info("never") is None


def test_sessions_of_policies_that_the_run_has_no_more_are_ended(store: TrafficStore) -> None:
    answered(store, "open")
    for id in ("taken", "queued"):
        rewarded(store, id)
    assert store.take(place(1, 0)) == "taken"
    store.forget_all()
    assert [state(store, id) for id in ("open", "queued", "taken")] == ["stale", "stale", "taken"]
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
    store.open("a", "owner", HOUR)
    store.append_turn("a", turn(0))
    assert store.append_request("a", 0, SessionRequest("/v1/completions", b"", (0,), delivered=False), HOUR)
    assert [(each.turns, each.delivered) for each in store.load("a")[0]] == [((0,), False)]
    store.set_delivered("a", 0, True)
    assert [each.delivered for each in store.load("a")[0]] == [True]
