"""The rollout stream: finished trajectories on their way from the actor to the orchestrator.

A Redis stream with one consumer group. Delivery is at least once; the ids are derived, so a repeat is recognised.
Entries stay until their step is committed, so whoever reads again after a crash finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from quartet import codec
from quartet.buffer.connection import Redis, translate_errors
from quartet.errors import BufferFailed, InvalidRequest
from quartet.failpoints import failpoint
from quartet.types import Trajectory

GROUP = "orchestrator"
CONSUMER = "leader"


@dataclass(frozen=True, slots=True)
class Delivery:
    """One entry of the stream: where it stands, and what it holds."""

    entry_id: str
    trajectory: Trajectory


class RolloutStream:
    """The stream of one run."""

    def __init__(self, client: Redis, url: str, run: str, lost: Callable[[], None] = lambda: None) -> None:
        """``lost`` is called when the server could not be reached for an append."""
        self._client, self._url, self._lost = client, url, lost
        self.key = f"quartet:{run}:rollouts"
        self._leader_epoch = 0

    def reset(self, leader_epoch: int = 0) -> None:
        """Drops every entry and makes the consumer group.

        From now on ``read`` and ``delivered`` drop what was asked for under an earlier epoch: a generation that broke off may
        still write.
        """
        self._leader_epoch = leader_epoch
        with translate_errors(self._url):
            self._client.delete(self.key)
            self._client.xgroup_create(self.key, GROUP, id="0", mkstream=True)

    def append(self, trajectories: Iterable[Trajectory], leader_epoch: int = 0) -> None:
        """Adds finished trajectories, in their order, in one round trip. ``leader_epoch`` is of who asked for them."""
        failpoint("actor.appending")
        with translate_errors(self._url, self._lost), self._client.pipeline(transaction=False) as pipeline:
            for trajectory in trajectories:
                pipeline.xadd(
                    self.key,
                    {
                        "id": str(trajectory.id),
                        "trajectory": codec.trajectory_to_bytes(trajectory),
                        "leader_epoch": leader_epoch,
                    },
                )
            pipeline.execute()
        failpoint("actor.appended")

    def read(self, count: int, block: float) -> list[Delivery]:
        """Up to ``count`` entries not delivered before, oldest first; waits up to ``block`` seconds for the first.

        Raises BufferFailed when an entry is not a trajectory: errors never become data.
        """
        # However short a wait is, Redis looks at it ten times a second only; and it takes 0 for ever.
        wait = max(1, int(block * 1000)) if block else None
        with translate_errors(self._url):
            answer = self._client.xreadgroup(GROUP, CONSUMER, {self.key: ">"}, count=count, block=wait)
        return self._deliveries(answer)

    def delivered(self) -> list[Delivery]:
        """Every entry that was delivered and is not acknowledged: also one whose delivery was lost on its way."""
        with translate_errors(self._url):
            answer = self._client.xreadgroup(GROUP, CONSUMER, {self.key: "0"})
        return self._deliveries(answer)

    def _deliveries(self, answer: object) -> list[Delivery]:
        entries = [entry for _, found in _pairs(answer) for entry in found]
        late = [entry_id.decode() for entry_id, fields in entries if self._is_late(fields)]
        self.acknowledge(late)
        return [self._delivery(entry_id, fields) for entry_id, fields in entries if entry_id.decode() not in late]

    def _is_late(self, fields: dict[bytes, bytes]) -> bool:
        epoch = fields.get(b"leader_epoch", b"")
        return epoch.isdigit() and int(epoch) < self._leader_epoch

    def _delivery(self, entry_id: bytes, fields: dict[bytes, bytes]) -> Delivery:
        try:
            trajectory = codec.trajectory_from_bytes(fields[b"trajectory"])
        except (KeyError, InvalidRequest) as error:
            raise BufferFailed(f"{self.key} entry {entry_id.decode()}: not a trajectory ({error})") from None
        return Delivery(entry_id.decode(), trajectory)

    def acknowledge(self, entry_ids: list[str]) -> None:
        """Marks entries as consumed and frees them. Call after the step that trained on them is committed."""
        if not entry_ids:
            return
        with translate_errors(self._url), self._client.pipeline(transaction=True) as pipeline:
            pipeline.xack(self.key, GROUP, *entry_ids)
            pipeline.xdel(self.key, *entry_ids)
            pipeline.execute()

    def depth(self) -> int:
        """Entries in the stream."""
        with translate_errors(self._url):
            return int(self._client.xlen(self.key))


def _pairs(answer: object) -> list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]:
    # RESP3 answers with a mapping of lists of entries, RESP2 with a list of pairs.
    if not answer:
        return []
    if isinstance(answer, dict):
        return [(key, [entry for block in blocks for entry in block]) for key, blocks in answer.items()]
    assert isinstance(answer, list)
    return [(key, entries) for key, entries in answer]
