"""State of the rollout buffer of a run, which is its Redis."""

from __future__ import annotations

import threading

from quartet.buffer.connection import Redis, connect, translate_errors
from quartet.buffer.experience_store import ExperienceStore
from quartet.buffer.rollout_stream import RolloutStream
from quartet.config.url_redaction import is_redacted, redact_url
from quartet.errors import QuartetError, ServiceUnavailable
from quartet.gateway.readers.run_catalog import RunCatalog
from quartet.gateway.schemas import Buffer

TIMEOUT_SECONDS = 1.0
"""Time to wait for a connection, and for each response."""


class BufferMonitor:
    """Read-only view of the rollout buffers of runs. Thread-safe."""

    def __init__(self, catalog: RunCatalog, own_run: str | None, own_url: str | None = None) -> None:
        """``own_run`` is the run that this gateway was started with, ``own_url`` the address of its Redis if known."""
        self._catalog, self._own_run, self._own_url = catalog, own_run, own_url
        self._clients: dict[str, Redis] = {}
        self._lock = threading.Lock()

    def url(self, name: str) -> str | None:
        """Return the address of a run's Redis. None for the embedded Redis of a run other than this gateway's."""
        return (self._own_url if name == self._own_run else None) or self._catalog.config(name).buffer.url

    def buffer(self, name: str) -> Buffer:
        """Return the contents of a run's buffer. Raises NotFound."""
        url = self.url(name)
        if url is None or is_redacted(url):
            return Buffer(reachable=False, rollouts=None, experience_steps=[], memory_bytes=None)
        try:
            client = self._client(url)
            with translate_errors(url):
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
        """Return why a Redis is unreachable, or an empty string if it responds."""
        if is_redacted(url):
            return "its password is not stored; start the gateway with the complete URL in QUARTET_BUFFER_URL"
        try:
            client = self._client(url)
            with translate_errors(url):
                client.ping()
        except ServiceUnavailable:
            return f"{redact_url(url)} does not respond"
        except QuartetError as error:
            return str(error)
        return ""

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()

    def _client(self, url: str) -> Redis:
        with self._lock:
            client = self._clients.get(url)
        # Connect without the lock: an unreachable server must not delay requests for other runs.
        client = client or connect(url, TIMEOUT_SECONDS)
        with self._lock:
            return self._clients.setdefault(url, client)
