"""What waits in a run's Redis."""

from __future__ import annotations

import threading

from quartet.buffer.connection import Redis, connect, translated
from quartet.buffer.experience_store import ExperienceStore
from quartet.buffer.rollout_stream import RolloutStream
from quartet.config import is_redacted, redact_url
from quartet.errors import QuartetError, ServiceUnavailable
from quartet.gateway.runs.catalog import Runs
from quartet.gateway.schemas import Buffer

PATIENCE = 1.0
"""Seconds to wait for a connection, and for an answer."""


class Buffers:
    """The rollout buffers of runs, read only. Safe to use from several threads."""

    def __init__(self, runs: Runs, own: str | None, own_url: str | None = None) -> None:
        """``own``: the run that this gateway was started with, and the address of its Redis, where that is known."""
        self._runs, self._own, self._own_url = runs, own, own_url
        self._clients: dict[str, Redis] = {}
        self._lock = threading.Lock()

    def url(self, name: str) -> str | None:
        """Where the run's Redis is; None where the run started one of its own that only its own gateway is told of."""
        return (self._own_url if name == self._own else None) or self._runs.config(name).buffer.url

    def look(self, name: str) -> Buffer:
        """What waits there. Raises NotFound."""
        url = self.url(name)
        if url is None or is_redacted(url):
            return Buffer(reachable=False, rollouts=None, experience_steps=[], memory_bytes=None)
        try:
            client = self._client(url)
            with translated(url):
                memory = client.info("memory")
            return Buffer(
                reachable=True,
                rollouts=RolloutStream(client, url, name).depth(),
                experience_steps=ExperienceStore(client, url, name).steps(),
                memory_bytes=int(memory["used_memory"]),
            )
        except QuartetError:
            return Buffer(reachable=False, rollouts=None, experience_steps=[], memory_bytes=None)

    def problem(self, url: str) -> str:
        """Why the Redis there does not answer; empty where it does."""
        if is_redacted(url):
            return "its password is kept nowhere; give the gateway the whole url in QUARTET_BUFFER_URL"
        try:
            client = self._client(url)
            with translated(url):
                client.ping()
        except ServiceUnavailable:
            return f"{redact_url(url)} does not answer"
        except QuartetError as error:
            return str(error)
        return ""

    def close(self) -> None:
        """Closes the connections."""
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()

    def _client(self, url: str) -> Redis:
        with self._lock:
            known = self._clients.get(url)
        # Not under the lock: a server that does not answer would keep those of other runs waiting.
        client = known or connect(url, PATIENCE)
        with self._lock:
            return self._clients.setdefault(url, client)
