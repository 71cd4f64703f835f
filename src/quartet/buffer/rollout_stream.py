"""The rollout stream: finished trajectories, from the actor to the orchestrator.

A Redis stream with one consumer group. Delivery is at least once. Trajectory ids are derived from the request, so a repeated
trajectory is recognised. Entries stay until their step is committed, so that they can be read again after a crash.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from quartet.buffer.connection import Redis, dedicated_client, translate_errors
from quartet.codec.trajectories import trajectory_from_bytes, trajectory_to_bytes
from quartet.contract.trajectory import Trajectory
from quartet.errors import BufferFailed, InvalidRequest
from quartet.system.failpoints import failpoint

GROUP = "orchestrator"
CONSUMER = "leader"
BLOCK_SECONDS = 5.0
"""Longest wait of one command of ``listen``. An entry or the end of the context ends it at once."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """One entry of the stream: its Redis id and its trajectory."""

    entry_id: str
    trajectory: Trajectory


class RolloutStream:
    """The stream of one run."""

    def __init__(self, client: Redis, url: str, run: str, lost: Callable[[], None] = lambda: None) -> None:
        """``lost`` is called if an append cannot reach the server."""
        self._client, self._url, self._lost = client, url, lost
        self.key = f"quartet:{run}:rollouts"
        self._leader_epoch = 0

    def reset(self, leader_epoch: int = 0) -> None:
        """Remove all entries and create the consumer group.

        From now on ``read`` and ``delivered`` drop trajectories that were requested under an earlier leader epoch, because an
        interrupted generation may still write some.
        """
        self._leader_epoch = leader_epoch
        with translate_errors(self._url):
            self._client.delete(self.key)
            self._client.xgroup_create(self.key, GROUP, id="0", mkstream=True)

    def append(self, trajectories: Iterable[Trajectory], leader_epoch: int = 0) -> None:
        """Append finished trajectories, in order, in one round trip. ``leader_epoch`` is the one of the request for them."""
        failpoint("actor.appending")
        with translate_errors(self._url, self._lost), self._client.pipeline(transaction=False) as pipeline:
            for trajectory in trajectories:
                pipeline.xadd(
                    self.key,
                    {
                        "id": str(trajectory.id),
                        "trajectory": trajectory_to_bytes(trajectory),
                        "leader_epoch": leader_epoch,
                    },
                )
            pipeline.execute()
        failpoint("actor.appended")

    def read(self, count: int, block: float) -> list[Delivery]:
        """Return up to ``count`` new entries, oldest first. Wait up to ``block`` seconds for the first one.

        Raises BufferFailed if an entry is not a trajectory.
        """
        # Redis checks blocked clients ten times a second, so a wait may take 0.1 s longer. 0 would mean no timeout.
        wait = max(1, int(block * 1000)) if block else None
        with translate_errors(self._url):
            response = self._client.xreadgroup(GROUP, CONSUMER, {self.key: ">"}, count=count, block=wait)
        return self._deliveries(response)

    @contextmanager
    def listen(self, count: int, on_event: Callable[[list[Delivery] | Exception], None]) -> Iterator[None]:
        """Read new entries on a separate thread and connection inside the context. ``on_event`` gets up to ``count`` at a time.

        An error ends the reading; ``on_event`` gets it last. Entries that arrive at the end of the context may count as delivered
        without a call of ``on_event``: ``delivered`` returns them.
        """
        with translate_errors(self._url):
            reader = RolloutStream(dedicated_client(self._url), self._url, self.key)
        reader.key, reader._leader_epoch = self.key, self._leader_epoch
        closing = threading.Event()

        def read() -> None:
            try:
                while not closing.is_set():
                    if deliveries := reader.read(count, BLOCK_SECONDS):
                        on_event(deliveries)
            except Exception as error:
                if not closing.is_set():
                    on_event(error)

        thread = threading.Thread(target=read, name="rollout stream", daemon=True)
        thread.start()
        try:
            yield
        finally:
            closing.set()
            while thread.is_alive():
                # Closes the socket, which ends a blocked read at once. A read that is about to start opens another.
                reader._client.connection_pool.disconnect()
                thread.join(0.01)

    def delivered(self) -> list[Delivery]:
        """Return every entry that was delivered and not acknowledged, including one whose delivery was lost on the way."""
        with translate_errors(self._url):
            response = self._client.xreadgroup(GROUP, CONSUMER, {self.key: "0"})
        return self._deliveries(response)

    def _deliveries(self, response: object) -> list[Delivery]:
        entries = [entry for _, stream_entries in _pairs(response) for entry in stream_entries]
        stale = [entry_id.decode() for entry_id, fields in entries if self._is_stale(fields)]
        self.acknowledge(stale)
        return [self._delivery(entry_id, fields) for entry_id, fields in entries if entry_id.decode() not in stale]

    def _is_stale(self, fields: dict[bytes, bytes]) -> bool:
        epoch = fields.get(b"leader_epoch", b"")
        return epoch.isdigit() and int(epoch) < self._leader_epoch

    def _delivery(self, entry_id: bytes, fields: dict[bytes, bytes]) -> Delivery:
        try:
            trajectory = trajectory_from_bytes(fields[b"trajectory"])
        except (KeyError, InvalidRequest) as error:
            raise BufferFailed(f"{self.key} entry {entry_id.decode()}: not a trajectory ({error})") from None
        return Delivery(entry_id.decode(), trajectory)

    def acknowledge(self, entry_ids: list[str]) -> None:
        """Acknowledge and delete entries. Call it after the step that trained on them is committed."""
        if not entry_ids:
            return
        with translate_errors(self._url), self._client.pipeline(transaction=True) as pipeline:
            pipeline.xack(self.key, GROUP, *entry_ids)
            pipeline.xdel(self.key, *entry_ids)
            pipeline.execute()

    def depth(self) -> int:
        """Return the number of entries in the stream."""
        with translate_errors(self._url):
            return int(self._client.xlen(self.key))


def _pairs(response: object) -> list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]:
    # RESP3 responds with a mapping of lists of entries, RESP2 with a list of pairs.
    if not response:
        return []
    if isinstance(response, dict):
        return [(key, [entry for block in blocks for entry in block]) for key, blocks in response.items()]
    assert isinstance(response, list)
    return [(key, entries) for key, entries in response]
