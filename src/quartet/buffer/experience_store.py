"""Sealed experience: what actor and critic train on in one step. Written once by the orchestrator, replayable from here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

from quartet import codec
from quartet.buffer.connection import Redis, translated
from quartet.errors import BufferFailed, FailedPrecondition, InvalidRequest
from quartet.types import Experience


class ExperienceStore:
    """The sealed experience of one run, a key for each step."""

    def __init__(self, client: Redis, url: str, run: str, lost: Callable[[], None] = lambda: None) -> None:
        """``lost`` is called when the server could not be reached for a load."""
        self._client, self._url, self._run, self._lost = client, url, run, lost

    def key(self, step: int) -> str:
        """The Redis key of one step's experience."""
        return f"quartet:{self._run}:experience:{step}"

    def seal(self, experience: Experience) -> None:
        """Stores a step's experience whole, in one command, with its checksum: Redis keeps none of its append-only file."""
        data = codec.experience_to_bytes(experience)
        with translated(self._url):
            self._client.hset(self.key(experience.step), mapping={"experience": data, "sha256": _digest(data)})

    def load(self, step: int) -> Experience:
        """A step's experience. Raises FailedPrecondition when it is not sealed, BufferFailed when it is damaged."""
        with translated(self._url, self._lost):
            data, digest = self._client.hmget(self.key(step), "experience", "sha256")
        if data is None and digest is None:
            raise FailedPrecondition(f"experience of step {step} of run {self._run}: not in the buffer")
        if not isinstance(data, bytes) or digest != _digest(data):
            raise BufferFailed(f"{self.key(step)}: is not what was sealed, by its checksum")
        try:
            experience = codec.experience_from_bytes(data)
        except InvalidRequest as error:
            raise BufferFailed(f"{self.key(step)}: {error}") from None
        if (experience.run, experience.step) != (self._run, step):
            raise BufferFailed(f"{self.key(step)}: holds step {experience.step} of run {experience.run}")
        return experience

    def holds(self, steps: Iterable[int]) -> bool:
        """Whether the experience of every one of these steps is sealed here."""
        keys = [self.key(step) for step in steps]
        with translated(self._url):
            return not keys or int(self._client.exists(*keys)) == len(keys)

    def steps(self) -> list[int]:
        """The steps whose experience is sealed here, sorted."""
        prefix = self.key(0).removesuffix("0").encode()
        with translated(self._url):
            keys = list(self._client.scan_iter(match=f"{prefix.decode()}*", count=1000))
        return sorted({int(key.removeprefix(prefix)) for key in keys})

    def discard(self, steps: Iterable[int]) -> None:
        """Frees these steps' experience."""
        keys = [self.key(step) for step in steps]
        if keys:
            with translated(self._url):
                self._client.delete(*keys)

    def keep_only(self, steps: Iterable[int]) -> None:
        """Frees the experience of every other step: what a checkpoint covers, and what another course of the run left."""
        kept = {self.key(step).encode() for step in steps}
        with translated(self._url):
            for key in self._client.scan_iter(match=f"quartet:{self._run}:experience:*", count=1000):
                if key not in kept:
                    self._client.delete(key)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()
