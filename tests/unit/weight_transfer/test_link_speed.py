"""The choice between everything and a delta, by the measured seconds of both."""

from __future__ import annotations

import pytest

from quartet.weight_transfer import receiver
from quartet.weight_transfer.link_speed import REPEAT, LinkSpeed
from quartet.weight_transfer.receiver import WeightMirror
from quartet.weight_transfer.source import WeightSource
from tests.unit.weight_transfer.samples import RUN, assert_equal, history, pull


@pytest.mark.parametrize(
    ("everything", "delta", "wanted"),
    [(None, None, True), (1.0, None, True), (None, 9.0, True), (1.0, 0.9, True), (1.0, 1.0, True), (1.0, 1.1, False)],
)
def test_a_delta_is_wanted_until_it_has_taken_longer(
    everything: float | None, delta: float | None, wanted: bool
) -> None:
    assert LinkSpeed(everything, delta, transfers=1).prefers_delta() is wanted


def choices(everything: float, delta: float, count: int) -> list[bool]:
    """Return what a receiver asks for over a link with these seconds. It begins with nothing."""
    speed, result = LinkSpeed(), []
    for number in range(count):
        result.append(speed.prefers_delta() and number > 0)
        speed.record(result[-1], delta if result[-1] else everything)
    return result


@pytest.mark.parametrize(("everything", "delta"), [(1.0, 0.7), (0.7, 1.0)])
def test_the_slower_kind_is_measured_again_now_and_then(everything: float, delta: float) -> None:
    chosen = choices(everything, delta, 4 * REPEAT)
    faster = delta < everything
    assert [number for number, each in enumerate(chosen) if each is not faster and number > 1] == [
        REPEAT,
        2 * REPEAT,
        3 * REPEAT,
    ]


@pytest.mark.parametrize(("everything", "delta"), [(1.0, 0.4), (0.4, 1.0)])
def test_a_kind_that_is_much_slower_is_not_tried_again(everything: float, delta: float) -> None:
    assert set(choices(everything, delta, 4 * REPEAT)[2:]) == {delta < everything}


def test_the_seconds_of_a_link_choose_the_way_and_no_bits(
    source: WeightSource, mirror: WeightMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "MIN_MEASURED_BYTES", 0)
    ways = []
    seconds = [(None, None), (9.0, None), (9.0, 0.0), (0.0, 9.0), (9.0, 0.0)]
    for (number, tensors), (everything, delta) in zip(enumerate(history(5)), seconds, strict=True):
        source.publish(number, tensors.items(), run=RUN)
        for speed in mirror.speeds.values():
            speed.everything, speed.delta = everything, delta
        result = pull(mirror, source, number, tensors)
        ways.append(result.way)
        assert_equal(result.weight_set, tensors)
    assert ways == ["full", "delta", "delta", "full", "delta"]
    [speed] = mirror.speeds.values()
    assert speed.transfers == 5
    assert speed.delta is not None
    assert 0.0 < speed.delta < 9.0


def test_small_weights_always_come_as_deltas(source: WeightSource, mirror: WeightMirror) -> None:
    for number, tensors in enumerate(history(3)):
        source.publish(number, tensors.items(), run=RUN)
        pull(mirror, source, number, tensors)
    assert all(speed == LinkSpeed() for speed in mirror.speeds.values())
