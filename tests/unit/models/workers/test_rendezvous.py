"""Rendezvous of ranks in torch's store, which may have the keys of earlier rounds."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from quartet.errors import ServiceUnavailable
from quartet.models.workers.progress import RankReport
from quartet.models.workers.rendezvous import StoreAddress, rendezvous

TIMEOUT = 30.0


@pytest.fixture
def agent() -> TCPStore:
    """The store of torchrun's agent."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        timeout=timedelta(seconds=TIMEOUT),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def report(rank: int) -> RankReport:
    return RankReport(100 + rank, "box", error="no memory", error_kind="OutOfMemory")


def test_ranks_meet_and_exchange_reports(agent: TCPStore) -> None:
    address = StoreAddress("127.0.0.1", agent.port)
    for _ in range(2):
        with ThreadPoolExecutor(3) as pool:
            joined = list(
                pool.map(lambda rank: rendezvous(address, rank, 3, lambda: report(rank), TIMEOUT), reversed(range(3)))
            )
        for _, exchange in joined:
            exchange.exchange(RankReport(1, "box"), [])
        assert joined[0][1].exchange(report(2), [0, 2]) == [(2, RankReport(1, "box")), (3, report(2))]
        joined[0][0].set("key", "value")
        assert joined[2][0].get("key") == b"value"


def test_a_rank_does_not_join_a_round_whose_rank_0_has_ended(agent: TCPStore) -> None:
    agent.set("round", "0123456789abcdef 40")
    agent.set("0123456789abcdef/complete", "1")
    address = StoreAddress("127.0.0.1", agent.port)
    with pytest.raises(ServiceUnavailable, match="rank 1 of 2: not all ranks have come to 127"):
        rendezvous(address, 1, 2, lambda: report(1), 0.2)


def test_a_rank_that_does_not_come_is_named(agent: TCPStore) -> None:
    address = StoreAddress("127.0.0.1", agent.port)
    with pytest.raises(
        ServiceUnavailable, match=r"rank 1, 2 of 3 has not come to 127.0.0.1:\d+ within timeouts.load_seconds"
    ):
        rendezvous(address, 0, 3, lambda: report(0), 0.2)


def test_a_store_that_does_not_listen_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(ServiceUnavailable, match=f"store of the ranks at 127.0.0.1:{port}: .*must listen there"):
        rendezvous(StoreAddress("127.0.0.1", port), 1, 2, lambda: report(1), 0.2)
