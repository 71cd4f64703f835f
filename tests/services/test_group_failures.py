"""Failures of a worker group on rank 0: ranks that end before the group has loaded, and the errors that they report."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quartet.contract.domain_errors import OUT_OF_MEMORY_TEXT
from quartet.errors import ConfigError, InvalidRequest, OutOfMemory, ServiceFailed, ServiceUnavailable
from quartet.models.workers.progress import Progress
from quartet.services.ranks import watch
from quartet.services.ranks.processes import RankProcess
from quartet.services.ranks.watch import Failure, GroupFailures
from tests.waiting import LIMIT

ENDED = "rank 1 of 2 (process 77): ended with status 1"
NCCL_OUT_OF_MEMORY = (
    "NCCL error in: ProcessGroupNCCL.cpp, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\nCuda failure 2 'out of memory'"
)


class Process(RankProcess):
    """Rank 0 of two, whose child has ended if ``end`` is given."""

    def __init__(self, end: str = "", error: str = "", kind: str = "") -> None:
        super().__init__(size=2, children={1: 77}, ended=1, error=(error, kind))
        self._end = end

    def failure(self) -> str:
        return self._end


def watchdog(hung: str = "", error: str = "", kind: str = "") -> Any:
    return SimpleNamespace(failure=lambda: hung, error=lambda rank: Failure(error, kind), publish=lambda: None)


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait a moment only for a rank to end, because nothing else happens then."""
    monkeypatch.setattr(watch, "END_SECONDS", 0.05)


def no_end(error: Exception) -> None:
    pytest.fail(f"the start ends the process: {error}")


def end_of_start(failures: GroupFailures) -> Exception:
    """Return the error that ends a rank 0 that waits in its start."""
    ended, errors = threading.Event(), []

    def end(error: Exception) -> None:
        errors.append(error)
        ended.set()

    with failures.watched_start(end):
        assert ended.wait(LIMIT)
    return errors[0]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("", ServiceFailed), ("OutOfMemory", OutOfMemory), ("ConfigError", ConfigError), ("ModelError", ServiceFailed)],
)
def test_a_rank_that_ends_before_the_ranks_have_met_ends_the_start_with_its_error(
    kind: str, expected: type[Exception]
) -> None:
    error = end_of_start(GroupFailures(Process(ENDED, "devices [1]: lacks", kind)))
    assert (type(error), str(error)) == (expected, f"{ENDED}: devices [1]: lacks")


def test_a_start_that_waits_for_a_rank_that_hangs_ends() -> None:
    failures = GroupFailures(RankProcess(size=2))
    failures.watch(Progress(), watchdog(hung="rank 1 of 2: no progress"))
    assert str(end_of_start(failures)) == "rank 1 of 2: no progress"


def test_the_error_of_a_rank_is_also_taken_from_the_watchdog() -> None:
    failures = GroupFailures(Process(ENDED))
    failures.watch(Progress(), watchdog(error="KeyError: 5"))
    assert failures.poll().text == f"{ENDED}: KeyError: 5"


@pytest.mark.parametrize("error", [RuntimeError("Connection closed by peer"), ServiceUnavailable("rank 1 has failed")])
def test_a_start_that_loses_a_rank_names_it_and_its_error(error: Exception) -> None:
    with (
        pytest.raises(ServiceFailed) as raised,
        GroupFailures(Process(ENDED, "KeyError: 5")).watched_start(no_end),
    ):
        raise error
    assert str(raised.value) == f"{ENDED}: KeyError: 5"


def test_the_start_of_rank_0_raises_its_domain_error() -> None:
    with pytest.raises(InvalidRequest, match=r"^wrong$"), GroupFailures(Process(ENDED)).watched_start(no_end):
        raise InvalidRequest("wrong")


def test_the_start_of_one_process_raises_its_error() -> None:
    with pytest.raises(RuntimeError, match=r"^wrong$"), GroupFailures(RankProcess()).watched_start(no_end):
        raise RuntimeError("wrong")


@pytest.mark.parametrize(
    ("error", "published", "kind"),
    [
        (KeyError(5), "KeyError: 5", ""),
        (torch.OutOfMemoryError("20 GiB"), f"OutOfMemory: {OUT_OF_MEMORY_TEXT}", "OutOfMemory"),
        (RuntimeError(NCCL_OUT_OF_MEMORY), f"OutOfMemory: {OUT_OF_MEMORY_TEXT}", "OutOfMemory"),
    ],
)
def test_a_rank_of_torchrun_publishes_the_error_that_ends_it_and_its_kind(
    error: Exception, published: str, kind: str
) -> None:
    progress = Progress()
    failures = GroupFailures(RankProcess(1, 2))
    failures.watch(progress, watchdog())
    with pytest.raises(type(error)), failures.reported_error():
        raise error
    report = progress.report()
    assert (report.error, report.error_kind) == (published, kind)
