"""Rendezvous of the ranks of a group in torch's store, and the reports that they exchange there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from secrets import token_hex

from torch._C._distributed_c10d import PrefixStore, TCPStore

from quartet.errors import ServiceUnavailable
from quartet.models.workers.progress import RankReport

POLL_SECONDS = 0.05
RESPONSE_SECONDS = 30.0
"""Time limit of one operation of the store."""


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Address of the store.

    ``serves``: this process serves the store. With torchrun, its agent does. ``listener``: descriptor of the listening socket, if
    it is open in this process.
    """

    host: str
    port: int
    serves: bool = False
    listener: int | None = None

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class ReportExchange:
    """Reports of all ranks in the store, each with a number that grows as long as the rank lives. Use it from one thread."""

    def __init__(self, store: PrefixStore, rank: int) -> None:
        self._store, self._rank = store, rank
        self._beat = 0

    def exchange(self, report: RankReport, ranks: Sequence[int]) -> list[tuple[int, RankReport]]:
        """Publish this rank's report and return the newest number and report of each of ``ranks``. May wait.

        Raises RuntimeError if the store does not respond.
        """
        self._beat += 1
        self._store.set(f"report/{self._rank}", json.dumps([self._beat, report.to_dict()]))
        values = self._store.multi_get([f"report/{rank}" for rank in ranks]) if ranks else []
        return [(beat, RankReport(**fields)) for beat, fields in map(json.loads, values)]


def rendezvous(
    address: StoreAddress, rank: int, size: int, report: Callable[[], RankReport], timeout: float
) -> tuple[PrefixStore, ReportExchange]:
    """Wait until all ranks have come. Return the store of torch's process group, and the exchange of reports.

    torchrun's agent may keep the keys of earlier rounds in its store. So rank 0 names a new round and repeats its invitation, and
    the others join the round whose rank 0 still does. Raises ServiceUnavailable after ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    store = _connect(address, timeout)
    take_part = _join_round if rank else _wait_for_ranks
    name = take_part(store, address, rank, size, deadline)
    own = _connect(StoreAddress(address.host, address.port), timeout)
    own.set_timeout(timedelta(seconds=RESPONSE_SECONDS))
    exchange = ReportExchange(PrefixStore(name, own), rank)
    exchange.exchange(report(), [])
    return PrefixStore(name, store), exchange


def _connect(address: StoreAddress, timeout: float) -> TCPStore:
    try:
        return TCPStore(
            address.host,
            address.port,
            is_master=address.serves,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=address.listener,
        )
    except RuntimeError as error:
        cause = str(error).partition("\n")[0]
        raise ServiceUnavailable(
            f"store of the ranks at {address}: {cause}; rank 0 or torchrun must listen there"
        ) from None


def _wait_for_ranks(store: TCPStore, address: StoreAddress, rank: int, size: int, deadline: float) -> str:
    """Invite the other ranks to a new round until all have joined. Return its name."""
    name, invitations = token_hex(8), 0
    while missing := [other for other in range(size) if other != rank and not store.check([f"{name}/joined/{other}"])]:
        invitations += 1
        store.set("round", f"{name} {invitations}")
        if time.monotonic() > deadline:
            ranks = ", ".join(map(str, missing))
            raise ServiceUnavailable(
                f"rank {ranks} of {size} has not come to {address} within timeouts.load_seconds; start all ranks, with the same "
                "config"
            )
        time.sleep(POLL_SECONDS)
    store.set(f"{name}/complete", "1")
    return name


def _join_round(store: TCPStore, address: StoreAddress, rank: int, size: int, deadline: float) -> str:
    """Join the round whose rank 0 still invites, and wait until all ranks have joined. Return its name."""
    joined = known = ""
    while not (joined and store.check([f"{joined}/complete"])):
        if time.monotonic() > deadline:
            raise ServiceUnavailable(
                f"rank {rank} of {size}: not all ranks have come to {address} within timeouts.load_seconds; start all of them, "
                "with the same config"
            )
        if store.check(["round"]):
            invitation = store.get("round").decode()
            name, earlier = invitation.partition(" ")[0], known.partition(" ")[0]
            if name == earlier and invitation != known and name != joined:
                joined = name
                store.set(f"{name}/joined/{rank}", "1")
            known = invitation
        time.sleep(POLL_SECONDS)
    return joined
