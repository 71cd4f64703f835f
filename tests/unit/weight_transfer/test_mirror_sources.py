"""A mirror that passes its weights on."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from quartet.errors import (
    Cancelled,
    FailedPrecondition,
    ServiceUnavailable,
)
from quartet.weight_transfer.messages import (
    WeightsRequest,
)
from quartet.weight_transfer.receiver import PulledWeights, WeightMirror
from quartet.weight_transfer.source import WeightSource
from tests.unit.weight_transfer.samples import (
    GONE,
    RUN,
    LocalPeer,
    assert_equal,
    cut_after,
    digest,
    history,
    published,
    pull,
)
from tests.waiting import LIMIT


def test_a_mirror_serves_its_version_and_the_delta_to_it(source: WeightSource, mirror: WeightMirror) -> None:
    versions = history(3)
    children = [WeightMirror(num_threads=1, shares=False), WeightMirror(num_threads=1, shares=False)]
    for number, tensors in enumerate(versions):
        source.publish(number, tensors.items(), run=RUN)
        pull(mirror, source, number, tensors)
        results = [pull(child, mirror, number, tensors) for child in children[: 2 if number == 2 else 1]]
        assert [result.way for result in results] == ([["full"], ["delta"], ["delta", "full"]][number])
        assert_equal(results[-1].weight_set, tensors)
    with pytest.raises(FailedPrecondition, match="this generator has no version 0"):
        pull(WeightMirror(num_threads=1, shares=False), mirror, 0, versions[0])
    assert_equal(pull(WeightMirror(num_threads=1, shares=False), mirror, 1, versions[1]).weight_set, versions[1])


def test_memory_that_was_lent_stays_as_it_is_after_the_end_of_the_streams(source: WeightSource) -> None:
    versions = history(6)
    private = WeightSource(num_threads=1, shares=False)
    private.publish(0, versions[0].items(), run=RUN)
    mirror, readers = WeightMirror(num_threads=1), [WeightMirror(num_threads=1) for _ in range(2)]
    assert pull(mirror, private, 0, versions[0]).way == "full"
    source.publish(0, versions[0].items(), run=RUN)
    results = [pull(reader, lender, 0, versions[0]) for reader, lender in zip(readers, (mirror, source), strict=True)]
    assert [result.way for result in results] == ["shared memory", "shared memory"]
    for lender, reader in zip((mirror, source), readers, strict=True):
        lender.end_streams()
        assert reader._lease is not None
        assert next(reader._lease, None) is None
    for number in range(1, 6):
        source.publish(number, versions[number].items(), run=RUN)
        private.publish(number, versions[number].items(), run=RUN)
        # Everything goes to new memory.
        mirror.reset()
        assert_equal(pull(mirror, private, number, versions[number]).weight_set, versions[number])
        for result in results:
            result.verify()
    for each in (mirror, *readers, private):
        each.close()


def test_a_source_may_wait_for_a_version(source: WeightSource, mirror: WeightMirror) -> None:
    before, after = published(source)
    child = WeightMirror(num_threads=1, shares=False)
    results: list[PulledWeights] = []
    waiting = threading.Thread(
        target=lambda: results.append(
            child.pull([LocalPeer(mirror)], RUN, 1, digest(after), timeout=20, wait_seconds=20)
        )
    )
    waiting.start()
    pull(mirror, source, 0, before)
    pull(mirror, source, 1, after)
    waiting.join(LIMIT)
    assert_equal(results[0].weight_set, after)


def test_a_wait_ends_when_the_pull_of_the_source_fails(source: WeightSource, mirror: WeightMirror) -> None:
    _, after = published(source)
    stream = mirror.stream(WeightsRequest(RUN, 1, digest(after), wait_seconds=60))
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(next, stream)
        failing = LocalPeer(source, fault=cut_after(1, GONE))
        while not waiting.done():
            with pytest.raises(ServiceUnavailable):
                pull(mirror, failing, 1, after)
        with pytest.raises(ServiceUnavailable, match="version 1 did not arrive"):
            waiting.result()


def test_a_wait_ends_with_the_caller_and_with_the_store(source: WeightSource) -> None:
    gone = threading.Event()
    with ThreadPoolExecutor(2) as executor:
        request = WeightsRequest(RUN, 1, wait_seconds=60)
        first = executor.submit(next, source.stream(request, gone.is_set))
        second = executor.submit(next, source.stream(request))
        gone.set()
        source.wake()
        with pytest.raises(Cancelled):
            first.result(LIMIT)
        source.close()
        with pytest.raises(ServiceUnavailable):
            second.result(LIMIT)
