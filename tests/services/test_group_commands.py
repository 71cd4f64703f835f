"""Commands of a worker group on rank 0: which error a call gets if another rank is lost."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quartet.codec.updates import command_to_bytes
from quartet.errors import InvalidRequest, OutOfMemory, QuartetError, ServiceFailed
from quartet.models.workers.progress import Progress
from quartet.services.ranks import watch
from quartet.services.ranks.commands import STOP, GroupCommands
from quartet.services.ranks.watch import Failure, GroupFailures
from quartet.v1 import update_pb2
from tests.waiting import wait_until

REQUEST = update_pb2.UpdateRequest()


class Group:
    """A group whose commands are recorded."""

    size = 2

    def __init__(self) -> None:
        self.progress = Progress()
        self.sent: list[int] = []

    def send(self, kind: int, succeeded: bool, data: bytes) -> None:
        self.sent.append(kind)


def group_commands(
    ended: str = "", lost: str = "", hung: str = "", children: bool = True, error: str = "", kind: str = ""
) -> tuple[Any, Group]:
    """Return commands whose child has ``ended``, after a call has failed.

    ``lost``, ``hung``, ``error`` and its ``kind``: of the watchdog.
    """
    group = Group()
    process = SimpleNamespace(
        children={1: 77} if children else {},
        failure=lambda: ended if len(group.sent) else "",
        ended=1,
        error=(error, kind),
    )
    watchdog = SimpleNamespace(
        failure=lambda: hung if len(group.sent) else "",
        lost=lambda: Failure(lost, kind),
        error={1: Failure(error, kind)}.get,
    )
    failures = GroupFailures(process)  # type: ignore[arg-type]
    failures.watch(group.progress, watchdog)  # type: ignore[arg-type]
    return GroupCommands(group, failures), group  # type: ignore[arg-type]


def fail() -> None:
    raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize(
    ("causes", "expected"),
    [
        ({"ended": "rank 1 of 2 (process 77): killed by SIGKILL"}, "rank 1 of 2 (process 77): killed by SIGKILL"),
        ({"hung": "rank 1 of 2: no progress"}, "rank 1 of 2: no progress"),
        ({"lost": "rank 1 of 2: no sign of life", "children": False}, "rank 1 of 2: no sign of life"),
    ],
)
def test_a_call_that_loses_a_rank_names_it(causes: dict[str, Any], expected: str) -> None:
    group, sent = group_commands(**causes)
    with pytest.raises(ServiceFailed, match="^" + expected.replace("(", r"\(").replace(")", r"\)") + "$"):
        group.run("update", REQUEST, fail)
    assert group.failure == expected
    with pytest.raises(ServiceFailed, match="rank 1 of 2"):
        group.run("update", REQUEST, lambda: None)
    group.stop()
    assert len(sent.sent) == 1


ENDED = "rank 1 of 2 (process 77): ended with status 1"


@pytest.mark.parametrize(
    ("error", "kind", "expected"),
    [
        ("KeyError: 5", "", ServiceFailed),
        ("KeyError: OutOfMemory: 5", "", ServiceFailed),
        ("lower micro_batch_tokens", "OutOfMemory", OutOfMemory),
        ("the file is damaged", "ModelError", ServiceFailed),
    ],
)
def test_calls_get_the_error_that_has_ended_a_rank(error: str, kind: str, expected: type[QuartetError]) -> None:
    group, _ = group_commands(ended=ENDED, error=error, kind=kind)
    for work in (fail, lambda: None):
        with pytest.raises(QuartetError) as raised:
            group.run("update", REQUEST, work)
        assert (type(raised.value), str(raised.value)) == (expected, f"{ENDED}: {error}")
    assert group.failure == f"{ENDED}: {error}"


def test_calls_get_out_of_memory_of_a_rank_on_another_machine() -> None:
    group, _ = group_commands(lost="rank 1 of 2: lower micro_batch_tokens", kind="OutOfMemory", children=False)
    for work in (fail, lambda: None):
        with pytest.raises(OutOfMemory, match="rank 1 of 2: lower"):
            group.run("update", REQUEST, work)


def test_out_of_memory_of_rank_0_stays_the_error_of_later_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "END_SECONDS", 0.05)
    group, _ = group_commands()

    def exhaust() -> None:
        raise torch.OutOfMemoryError("20 GiB")

    with pytest.raises(torch.OutOfMemoryError):
        group.run("update", REQUEST, exhaust)
    with pytest.raises(OutOfMemory, match=r"^update: OutOfMemory on rank 0 of 2: out of GPU memory; lower "):
        group.run("update", REQUEST, lambda: None)


def test_another_error_of_rank_0_is_raised_and_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "END_SECONDS", 0.05)
    group, _ = group_commands()
    with pytest.raises(RuntimeError, match="Connection closed"):
        group.run("update", REQUEST, fail)
    assert group.failure == "update: RuntimeError on rank 0 of 2: Connection closed by peer"


def test_an_error_that_all_ranks_have_leaves_the_group_alive() -> None:
    group, sent = group_commands()

    def refuse() -> None:
        raise InvalidRequest("wrong")

    with pytest.raises(InvalidRequest):
        group.run("update", REQUEST, refuse)
    assert group.failure == ""
    assert sent.progress.report().command == ""


def test_the_collective_of_a_rank_is_read_from_its_stack() -> None:
    progress, held = Progress(), threading.Lock()
    held.acquire()

    def all_gather() -> None:
        held.acquire()

    def compute() -> None:
        progress.begin("update")
        all_gather()

    all_gather.__code__ = all_gather.__code__.replace(co_filename="/lib/torch/distributed/distributed_c10d.py")

    thread = threading.Thread(target=compute)
    thread.start()
    wait_until(lambda: progress.report().collective == "all_gather")
    held.release()
    thread.join()
    assert progress.report().collective == ""


def test_a_rank_gives_memory_back_after_every_command() -> None:
    group, sent = group_commands()
    number, data = command_to_bytes("update", REQUEST)
    received = iter([(number, True, data), (number, True, data), (STOP, True, b"")])
    sent.receive = lambda: next(received)  # type: ignore[attr-defined]
    calls: list[str] = []
    group.follow({"update": lambda _: calls.append("update")}, lambda: calls.append("idle"))
    assert calls == ["update", "idle", "update", "idle"]
