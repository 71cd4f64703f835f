"""Weights that ranks send through process groups of torch, here gloo."""

from __future__ import annotations

import gc
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import structlog

from quartet.errors import QuartetError
from quartet.weight_transfer import arrivals, process_group, receiver
from quartet.weight_transfer.arrivals import HELLO, NAME_BYTES
from quartet.weight_transfer.messages import Manifest, RankSlices
from quartet.weight_transfer.process_group import GroupFailed, GroupSettings, Meeting, send_slices
from quartet.weight_transfer.receiver import PulledWeights, WeightMirror
from quartet.weight_transfer.source import WeightSource
from quartet.weight_transfer.tensors import AdapterSettings, Bytes
from tests.unit.weight_transfer.ranks import Trainer
from tests.unit.weight_transfer.samples import (
    RUN,
    LocalPeer,
    Tensors,
    assert_equal,
    descriptor_targets,
    digest,
    history,
    pull,
    tensor,
    weights,
)
from tests.waiting import wait_until

QUICK = GroupSettings(timeout=1.0)
GROUP = GroupSettings(timeout=30.0)


@pytest.fixture
def make_mirror() -> Iterator[Callable[..., WeightMirror]]:
    mirrors: list[WeightMirror] = []

    def make(group: GroupSettings | None = GROUP) -> WeightMirror:
        mirrors.append(WeightMirror(num_threads=1, shares=False, group=group))
        return mirrors[-1]

    yield make
    for each in mirrors:
        each.close()


@pytest.fixture
def make_trainer() -> Iterator[Callable[..., Trainer]]:
    trainers: list[Trainer] = []

    def make(size: int, group: GroupSettings | None = GROUP) -> Trainer:
        trainers.append(Trainer(size, group=group))
        return trainers[-1]

    yield make
    for each in trainers:
        each.close()


def left() -> tuple[int, int]:
    """Return how many sockets and threads this process has."""
    sockets = sum(target.startswith("socket:") for target in descriptor_targets())
    return sockets, len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize(("size", "receivers"), [(1, 1), (2, 1), (2, 2), (2, 4), (3, 2)])
def test_every_receiver_gets_the_bits_of_every_version(
    size: int, receivers: int, make_trainer: Callable[..., Trainer], make_mirror: Callable[..., WeightMirror]
) -> None:
    trainer, mirrors = make_trainer(size), [make_mirror() for _ in range(receivers)]
    with ThreadPoolExecutor(receivers) as pool:
        for number, tensors in enumerate(history(3)):
            trainer.publish(number, tensors, RUN)

            def receive(mirror: WeightMirror, number: int = number, tensors: Tensors = tensors) -> PulledWeights:
                return pull(mirror, trainer.source, number, tensors)

            for result in pool.map(receive, mirrors):
                size_of_all = sum(each.data.nbytes for each in tensors.values())
                assert (result.way, result.bytes_received) == ("process group", size_of_all)
                assert_equal(result.weight_set, tensors)
                assert result.changed == tensors.keys()
    # A receiver has a copy, which it passes on.
    assert pull(make_mirror(None), mirrors[0], 2, tensors).way == "full"


def test_an_adapter_alone_comes_as_a_delta(
    make_trainer: Callable[..., Trainer], make_mirror: Callable[..., WeightMirror]
) -> None:
    trainer, mirror, ways = make_trainer(2), make_mirror(), []
    for number, tensors in enumerate(history(3)):
        trainer.publish(number, tensors, RUN, adapter=AdapterSettings(4, 8.0, ("proj",)))
        result = pull(mirror, trainer.source, number, tensors)
        assert_equal(result.weight_set, tensors)
        ways.append(result.way)
    assert ways == ["process group", "delta", "delta"]


def test_each_rank_sends_what_it_has_written(
    make_trainer: Callable[..., Trainer], make_mirror: Callable[..., WeightMirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: dict[int, int] = {}

    def counted(settings: GroupSettings, group: Any, rank: int, parts: Sequence[Bytes]) -> None:
        sent[rank] = sum(map(len, parts))
        send_slices(settings, group, rank, parts)

    monkeypatch.setattr(process_group, "send_slices", counted)
    monkeypatch.setattr(process_group, "PIECE_BYTES", 2**17)
    trainer, tensors = make_trainer(3), weights()
    trainer.publish(0, tensors, RUN)
    assert pull(make_mirror(), trainer.source, 0, tensors).way == "process group"
    own = [sum(part.num_bytes for part in parts) for parts in trainer.slices(tensors)]
    assert sent == dict(enumerate(own))
    assert max(own) < 0.4 * sum(own)


def test_nothing_is_left_after_transfers(
    make_trainer: Callable[..., Trainer], make_mirror: Callable[..., WeightMirror]
) -> None:
    trainer, mirror, tensors = make_trainer(2), make_mirror(), history(4)
    trainer.publish(0, tensors[0], RUN)
    pull(mirror, trainer.source, 0, tensors[0])
    assert wait_until(lambda: not [each for each in threading.enumerate() if each.name == "weight sender"])
    gc.collect()  # What earlier tests have left in cycles. Threads of theirs may still end.
    before = left()
    for number in range(1, 4):
        trainer.publish(number, tensors[number], RUN)
        pull(mirror, trainer.source, number, tensors[number])
    assert wait_until(lambda: all(now <= then for now, then in zip(left(), before, strict=True))), (before, left())


def logged(work: Callable[[], PulledWeights]) -> tuple[PulledWeights, list[str]]:
    """Return the result, and the reasons of the warnings."""
    with structlog.testing.capture_logs() as logs:
        result = work()
    return result, [str(each["reason"]) for each in logs if each["log_level"] == "warning"]


def test_bits_that_flip_on_the_way_are_refused_by_name_100_times_of_100(
    make_trainer: Callable[..., Trainer], make_mirror: Callable[..., WeightMirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    random, tensors, mirror = np.random.default_rng(0), weights(), make_mirror()
    trainer = make_trainer(2)
    trainer.publish(0, tensors, RUN)
    names = [name for name in sorted(tensors) if tensors[name].data.nbytes]
    flips: dict[int, list[tuple[int, int]]] = {}

    def damaged(settings: GroupSettings, group: Any, rank: int, parts: Sequence[Bytes]) -> None:
        copies = [part.copy() for part in parts]
        for index, bit in flips.get(rank, ()):
            copies[index][bit // 8] ^= 1 << bit % 8
        send_slices(settings, group, rank, copies)

    monkeypatch.setattr(process_group, "send_slices", damaged)
    monkeypatch.setattr(receiver, "MAX_GROUP_FAILURES", 1000)
    refused = 0
    for _ in range(100):
        rank = int(random.integers(2))
        parts = [
            part for part in sorted(trainer.slices(tensors)[rank], key=lambda part: part.layout.name) if part.num_bytes
        ]
        index = int(random.integers(len(parts)))
        flips = {rank: [(index, int(random.integers(8 * parts[index].num_bytes)))]}
        mirror.reset()
        result, reasons = logged(lambda: pull(mirror, trainer.source, 0, tensors))
        assert result.way == "full"
        assert_equal(result.weight_set, tensors)
        (reason,) = reasons
        assert parts[index].layout.name in names
        refused += reason == (
            "actor at local: process group: version 0: 1 tensors have another digest than in the manifest, the first is "
            f"{parts[index].layout.name}"
        )
    assert refused == 100


@pytest.mark.parametrize(
    ("stops", "reason"),
    [
        ("before it comes", "rank 1 did not come: timed out"),
        ("when it has come", r"rank 1: .*Timed out waiting 1000ms for recv"),
        ("dies", "rank 1: .*(closed by peer|reset by peer|has ended)"),
    ],
)
def test_a_rank_that_sends_nothing_ends_the_group_in_time_and_the_next_pull_has_a_new_one(
    stops: str,
    reason: str,
    make_trainer: Callable[..., Trainer],
    make_mirror: Callable[..., WeightMirror],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer, mirror, versions = make_trainer(2, QUICK), make_mirror(QUICK), history(2)
    silent = threading.Event()

    def hang(settings: GroupSettings, group: Any, rank: int, parts: Sequence[Bytes]) -> None:
        if rank == 1 and not silent.is_set():
            silent.set()
            if stops != "before it comes":
                connection = socket.create_connection((group.host, group.port))
                connection.sendall(HELLO.pack(group.name.encode(), rank))
                member = process_group._Member(settings, connection, process_group.TRAINER)
                time.sleep(0.0 if stops == "dies" else 2 * settings.timeout)
                member.close()
            return
        send_slices(settings, group, rank, parts)

    monkeypatch.setattr(process_group, "send_slices", hang)
    trainer.publish(0, versions[0], RUN)
    start = time.monotonic()
    result, reasons = logged(lambda: pull(mirror, trainer.source, 0, versions[0]))
    assert time.monotonic() - start < 10 * QUICK.timeout
    assert (result.way, len(reasons)) == ("full", 1)
    assert re.match(f"actor at local: process group: {reason}", reasons[0]), reasons
    assert_equal(result.weight_set, versions[0])
    trainer.publish(1, versions[1], RUN)
    assert pull(mirror, trainer.source, 1, versions[1]).way == "process group"


def test_ranks_that_cannot_connect_leave_half_of_the_time_for_chunks(
    make_trainer: Callable[..., Trainer], make_mirror: Callable[..., WeightMirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(process_group, "send_slices", refused)
    trainer, mirror, tensors = make_trainer(2), make_mirror(), weights()
    trainer.publish(0, tensors, RUN)
    result, reasons = logged(lambda: mirror.pull([LocalPeer(trainer.source)], RUN, 0, digest(tensors), timeout=4.0))
    assert result.way == "full"
    assert reasons == ["actor at local: process group: rank 0, 1 did not come: timed out"]
    assert 1.9 < result.seconds < 4.0


def test_a_rank_that_falls_silent_late_leaves_half_of_the_time_for_chunks(
    make_trainer: Callable[..., Trainer], make_mirror: Callable[..., WeightMirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = threading.Event()

    def fall_silent(settings: GroupSettings, group: Any, rank: int, parts: Sequence[Bytes]) -> None:
        connection = socket.create_connection((group.host, group.port))
        connection.sendall(HELLO.pack(group.name.encode(), rank))
        member = process_group._Member(settings, connection, process_group.TRAINER)
        for tag, (piece, _) in enumerate(process_group._pieces(iter(parts)), 1):
            # The first message comes when most of the group's time is over.
            if ends.wait(1.5) or tag == 2:
                break
            member.send(piece, tag)()
        ends.wait()
        member.close()

    monkeypatch.setattr(process_group, "send_slices", fall_silent)
    monkeypatch.setattr(process_group, "PIECE_BYTES", 2**17)
    trainer, mirror, tensors = make_trainer(1), make_mirror(), weights()
    trainer.publish(0, tensors, RUN)
    result, reasons = logged(lambda: mirror.pull([LocalPeer(trainer.source)], RUN, 0, digest(tensors), timeout=4.0))
    ends.set()
    assert (result.way, len(reasons)) == ("full", 1)
    assert "rank 0: " in reasons[0]
    assert 1.9 < result.seconds < 3.0


def test_connections_of_other_processes_cost_no_time_and_do_not_end_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "MAX_WAITING", 4)
    meeting, data, target = Meeting(GROUP, "127.0.0.1"), tensor((1000,)).data, np.zeros(2000, np.uint8)
    address = meeting._listener.getsockname()
    others = [socket.create_connection(address) for _ in range(9)]
    others[0].sendall(b"GET / HTTP/1.1\r\nHost: a name that is longer than 36 bytes\r\n\r\n")
    others[1].close()
    group = process_group.WeightGroup("gloo", meeting.group.port, meeting.group.name, "127.0.0.1")
    start = time.monotonic()
    sender = threading.Thread(target=send_slices, args=(GROUP, group, 0, [data]))
    sender.start()
    received = meeting.receive([RankSlices((0,), (0,), (2000,))], [target], lambda _: None, start + 2 * GROUP.timeout)
    sender.join()
    assert time.monotonic() - start < GROUP.timeout / 2
    assert (received, target.tobytes()) == (2000, data.tobytes())
    for each in others:
        each.close()
    meeting.close()


def test_connections_that_stay_silent_do_not_delay_the_end() -> None:
    meeting = Meeting(GroupSettings(timeout=0.5), "127.0.0.1")
    others = [socket.create_connection(meeting._listener.getsockname()) for _ in range(8)]
    start = time.monotonic()
    with pytest.raises(GroupFailed, match="rank 0 did not come: timed out"):
        meeting.receive([RankSlices((0,), (0,), (8,))], [np.zeros(8, np.uint8)], lambda _: None, start + 60)
    assert time.monotonic() - start < 3
    for each in others:
        assert each.recv(1) == b""
        each.close()
    meeting.close()


def test_after_failures_in_a_row_a_receiver_asks_for_no_group(
    make_trainer: Callable[..., Trainer], make_mirror: Callable[..., WeightMirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, mirror, tensors = make_trainer(1), make_mirror(GroupSettings(timeout=0.05)), weights()
    trainer.publish(0, tensors, RUN)
    fails = True

    def unreachable(settings: GroupSettings, group: Any, rank: int, parts: Sequence[Bytes]) -> None:
        if not fails:
            send_slices(settings, group, rank, parts)

    monkeypatch.setattr(process_group, "send_slices", unreachable)
    asked = []
    for number in range(6):
        # One success begins the count anew.
        fails = number != 1
        mirror._group = GROUP if number == 1 else GroupSettings(timeout=0.05)
        peer = LocalPeer(trainer.source)
        mirror.reset()
        assert mirror.pull([peer], RUN, 0, digest(tensors), timeout=20).way == ("full" if fails else "process group")
        asked.append(sum(request.group is not None for request in peer.requests))
    assert asked == [1, 1, 1, 1, 1, 0]


def test_a_receiver_that_has_gone_ends_only_its_own_transfer(
    make_trainer: Callable[..., Trainer], make_mirror: Callable[..., WeightMirror]
) -> None:
    trainer, versions = make_trainer(2, QUICK), history(3)
    trainer.publish(0, versions[0], RUN)
    before = left()
    meeting = Meeting(QUICK, "127.0.0.1")
    request = process_group.WeightGroup("gloo", meeting.group.port, meeting.group.name, "127.0.0.1")
    stream = trainer.source.stream(receiver_request(0, digest(versions[0]), request))
    assert isinstance(next(stream), Manifest)
    meeting.close()
    # The trainer publishes, and another receiver gets the version, at once.
    start = time.monotonic()
    trainer.publish(1, versions[1], RUN)
    assert time.monotonic() - start < QUICK.timeout
    other = make_mirror(GROUP)
    assert pull(other, trainer.source, 1, versions[1]).way == "process group"
    stream.close()
    assert wait_until(lambda: left()[0] <= before[0]), (before, left())


def receiver_request(version: int, wanted: bytes, group: process_group.WeightGroup) -> Any:
    from quartet.weight_transfer.messages import WeightsRequest

    return WeightsRequest(RUN, version, wanted, group=group)


def test_with_too_many_transfers_the_next_receiver_gets_chunks(
    make_trainer: Callable[..., Trainer], make_mirror: Callable[..., WeightMirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, tensors = threading.Event(), weights()
    monkeypatch.setattr(process_group, "MAX_SENDS", 2)
    trainer = make_trainer(2)
    trainer.publish(0, tensors, RUN)
    group = process_group.WeightGroup("gloo", 9, "0" * NAME_BYTES, "127.0.0.1")
    with monkeypatch.context() as patch:
        patch.setattr(process_group, "send_slices", lambda *_: ends.wait())
        streams = [trainer.source.stream(receiver_request(0, digest(tensors), group)) for _ in range(4)]
        ranks = [next(stream).ranks for stream in streams]  # type: ignore[union-attr]
        assert [len(each) for each in ranks] == [2, 2, 0, 0]
        assert len([each for each in threading.enumerate() if each.name == "weight sender"]) <= 4
        result, reasons = logged(lambda: pull(make_mirror(), trainer.source, 0, tensors))
        assert (result.way, reasons) == ("full", [])
        assert_equal(result.weight_set, tensors)
    ends.set()
    assert wait_until(lambda: pull(make_mirror(), trainer.source, 0, tensors).way == "process group")
    for stream in streams:
        stream.close()


def test_a_source_without_groups_or_with_another_backend_sends_chunks(make_mirror: Callable[..., WeightMirror]) -> None:
    tensors = weights()
    for senders in (None, process_group.GroupSenders(GroupSettings("nccl"))):
        source = WeightSource(num_threads=1, senders=senders)
        source.publish(0, tensors.items(), run=RUN)
        assert pull(make_mirror(), source, 0, tensors).way == "full"
        source.close()


@pytest.mark.parametrize(
    "ranks",
    [
        (RankSlices((0,), (0,), (1,)),),
        (RankSlices((9,), (0,), (1,)),),
        (RankSlices((0, 0), (0, 0), (2**20 + 200, 2**20 + 200)),),
        (RankSlices((0,), (2**63,), (2**63,)),),
        # Every byte once, but also a slice without bytes, of a tensor without any.
        (RankSlices(tuple(range(5)), (0,) * 5, (2**20 + 200, 0, 256, 42000, 4)),),
    ],
)
def test_slices_that_are_not_the_tensors_are_refused(
    ranks: tuple[RankSlices, ...], make_trainer: Callable[..., Trainer], make_mirror: Callable[..., WeightMirror]
) -> None:
    from dataclasses import replace

    def change(stream: Iterator[Any]) -> Iterator[Any]:
        for message in stream:
            yield replace(message, ranks=ranks) if isinstance(message, Manifest) else message

    trainer, tensors = make_trainer(2, QUICK), weights()
    trainer.publish(0, tensors, RUN)
    with pytest.raises(QuartetError, match=r"actor at local: GetWeights: .*(expected slices)"):
        pull(make_mirror(QUICK), LocalPeer(trainer.source, fault=change), 0, tensors)  # type: ignore[arg-type]


def test_slices_without_a_group_are_refused(
    make_trainer: Callable[..., Trainer], make_mirror: Callable[..., WeightMirror]
) -> None:
    from dataclasses import replace

    def change(stream: Iterator[Any]) -> Iterator[Any]:
        for message in stream:
            yield replace(message, ranks=(RankSlices((0,), (0,), (1,)),)) if isinstance(message, Manifest) else message

    trainer, tensors = make_trainer(1), weights()
    trainer.publish(0, tensors, RUN)
    with pytest.raises(QuartetError, match="expected no slices of ranks without a group"):
        pull(make_mirror(None), LocalPeer(trainer.source, fault=change), 0, tensors)  # type: ignore[arg-type]
