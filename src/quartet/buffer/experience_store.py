"""Sealed experience: the input of a step's update. The orchestrator writes it once; the actor and the critic read it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

from quartet.buffer.connection import Redis, translate_errors
from quartet.codec.experience import EXPERIENCE_CHUNK_BYTES, decode_experience, encode_experience
from quartet.contract.update import Experience
from quartet.errors import BufferFailed, ConfigError, FailedPrecondition, InvalidRequest


class ExperienceStore:
    """The sealed experience of one run: for each step a manifest and the chunks that it names.

    The manifest is written after all chunks, in one command. A step is sealed once its manifest is there: a crash before that
    leaves chunks without a manifest, which ``keep_only`` removes. See proto/quartet/v1/experience.proto for the format and its
    limits.
    """

    def __init__(
        self,
        client: Redis,
        url: str,
        run: str,
        lost: Callable[[], None] = lambda: None,
        chunk_bytes: int = EXPERIENCE_CHUNK_BYTES,
    ) -> None:
        """``lost`` is called if a load cannot reach the server. ``chunk_bytes`` is the largest value that ``seal`` writes."""
        self._client, self._url, self._run, self._lost = client, url, run, lost
        self._chunk_bytes = chunk_bytes

    def key(self, step: int) -> str:
        """Return the Redis key of a step's manifest."""
        return f"quartet:{self._run}:experience:{step}"

    def chunks_key(self, step: int) -> str:
        """Return the Redis key of a step's chunks."""
        return f"{self.key(step)}:chunks"

    def seal(self, experience: Experience) -> None:
        """Store a step's experience. Sealing the same step again replaces it.

        Each chunk is a separate command, so neither Redis's limit on a value nor that on a client's commands (1 GB by default)
        bounds a step. Raises ConfigError if the step has so many sequences that its manifest is too large, BufferFailed if Redis
        is full.
        """
        encoded = encode_experience(experience, self._chunk_bytes)
        if len(encoded.manifest) > self._chunk_bytes:
            raise ConfigError(
                f"experience of step {experience.step}: the manifest of its {len(experience.ids):,} sequences has "
                f"{len(encoded.manifest):,} bytes, expected at most {self._chunk_bytes:,}; lower rollout.prompts_per_step or "
                "rollout.samples_per_prompt"
            )
        key, chunks_key = self.key(experience.step), self.chunks_key(experience.step)
        digest = hashlib.sha256(encoded.manifest).hexdigest()
        with translate_errors(self._url):
            for name, chunk in encoded.chunks.items():
                self._client.hset(chunks_key, name, chunk)
            self._client.hset(key, mapping={"manifest": encoded.manifest, "sha256": digest})
            names = {name.encode() for name in encoded.chunks}
            replaced = [name for name in self._client.hkeys(chunks_key) if name not in names]
            if replaced:
                self._client.hdel(chunks_key, *replaced)

    def load(self, step: int, for_policy: bool = True) -> Experience:
        """Return a step's experience, ``for_policy`` with the experts of tokens if there are any.

        Raises FailedPrecondition if it is not sealed, BufferFailed if it is damaged.
        """
        key = self.key(step)
        with translate_errors(self._url, self._lost):
            manifest, digest = self._client.hmget(key, "manifest", "sha256")
        if manifest is None and digest is None:
            raise FailedPrecondition(f"experience of step {step} of run {self._run}: not in the buffer")
        if not isinstance(manifest, bytes) or digest != hashlib.sha256(manifest).hexdigest().encode():
            raise BufferFailed(f"{key}: the manifest does not match its SHA-256")
        try:
            experience = decode_experience(manifest, lambda name: self._read_chunk(step, name), for_policy)
        except InvalidRequest as error:
            raise BufferFailed(f"{key}: {error}") from None
        if (experience.run, experience.step) != (self._run, step):
            raise BufferFailed(f"{key}: holds step {experience.step} of run {experience.run}")
        return experience

    def _read_chunk(self, step: int, name: str) -> bytes | None:
        with translate_errors(self._url, self._lost):
            [chunk] = self._client.hmget(self.chunks_key(step), name)
        assert chunk is None or isinstance(chunk, bytes)
        return chunk

    def holds(self, steps: Iterable[int]) -> bool:
        """Return whether all of these steps are sealed. A manifest is written after its chunks, so only manifests are checked."""
        keys = [self.key(step) for step in steps]
        with translate_errors(self._url):
            return not keys or int(self._client.exists(*keys)) == len(keys)

    def steps(self) -> list[int]:
        """Return the sealed steps, sorted."""
        numbers = (key.rpartition(":")[2] for key in self._keys())
        return sorted({int(number) for number in numbers if number.isdecimal()})

    def discard(self, steps: Iterable[int]) -> None:
        """Remove the experience of these steps."""
        keys = [key for step in steps for key in (self.key(step), self.chunks_key(step))]
        if keys:
            with translate_errors(self._url):
                self._client.delete(*keys)

    def keep_only(self, steps: Iterable[int]) -> None:
        """Remove the experience of every other step, and the chunks of interrupted seals."""
        kept = {key for step in steps if self.holds([step]) for key in (self.key(step), self.chunks_key(step))}
        for key in self._keys():
            if key not in kept:
                with translate_errors(self._url):
                    self._client.delete(key)

    def _keys(self) -> list[str]:
        with translate_errors(self._url):
            keys = self._client.scan_iter(match=f"quartet:{self._run}:experience:*", count=1000)
            return [key.decode() for key in keys]
