"""Connections between the ranks of an actor, by which they generate together."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping

from quartet.config.deployment import TimeoutsConfig
from quartet.contract.status import Role, ServiceStatus
from quartet.models.workers.workers import Workers
from quartet.rpc.clients import GenerationClient
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.security.allow_list import RANK_CALLERS
from quartet.rpc.security.credentials import Credentials
from quartet.rpc.server import Server
from quartet.services.actor.group_generation import GroupGeneration, SeparateGeneration
from quartet.services.actor.servicer import RankServicer


class ServedRank:
    """Generation by a rank above 0, which serves it to rank 0."""

    def __init__(
        self,
        own: SeparateGeneration,
        compute: ComputeThread,
        status: Callable[[], ServiceStatus],
        listen: str,
        credentials: Credentials,
    ) -> None:
        """``own`` generates on ``compute``. ``status``: that of the actor of this rank. ``listen``: see ``Server``."""
        self._server = Server([RankServicer(own, compute, status)], listen, credentials, allowed=RANK_CALLERS)
        self.address, self.generate, self.status = self._server.address, own.generate, own.status

    def close(self) -> None:
        """Stop serving. Calls in progress fail."""
        self._server.stop(0.0)


def rank_host(nodes: int, environment: Mapping[str, str]) -> str:
    """Return the host at which this process listens for rank 0: loopback, or the address on the way to MASTER_ADDR.

    ``nodes``: number of machines of the group.
    """
    if nodes == 1:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((environment["MASTER_ADDR"], int(environment["MASTER_PORT"])))  # Sends nothing.
        return str(probe.getsockname()[0])


def join_ranks(
    own: SeparateGeneration,
    compute: ComputeThread,
    status: Callable[[], ServiceStatus],
    workers: Workers,
    nodes: int,
    timeouts: TimeoutsConfig,
    credentials: Credentials,
) -> GroupGeneration | ServedRank:
    """Return the generation of this rank: rank 0 uses all ranks, the others serve it. All ranks must call it.

    For ``own``, ``compute`` and ``status`` see ``ServedRank``, for ``nodes`` see ``rank_host``. Raises
    ConfigError if a rank on another machine would listen without encryption.
    """
    if workers.rank:
        served = ServedRank(own, compute, status, f"{rank_host(nodes, os.environ)}:0", credentials)
        workers.exchange(served.address)
        return served
    _, *addresses = workers.exchange("")
    return GroupGeneration(own, [GenerationClient(each, timeouts, credentials, Role.ACTOR) for each in addresses])
