"""The weights that a trainer publishes, version after version."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from quartet.contract.weights import PublishedWeights
from quartet.errors import InvalidRequest
from quartet.weight_transfer.delta import encode
from quartet.weight_transfer.messages import CHUNK_BYTES, Chunk, TensorLayout
from quartet.weight_transfer.store import Buffer, Link, WeightStore, version_of
from quartet.weight_transfer.tensors import ITEM_BYTES, AdapterSettings, HostTensor, tensor_digest

WINDOW_BYTES = 256 * 2**20
"""Bytes of tensors that are hashed, compared and copied together, so that several threads have work."""


@dataclass(slots=True, eq=False)
class _Tensor:
    """A tensor of a publication. ``difference``: the encoded chunks that differ from the publication before, in any order."""

    layout: TensorLayout
    buffer: Buffer
    digest: bytes
    changed: bool = False
    difference: list[Chunk] = field(default_factory=list)


class WeightSource(WeightStore):
    """Weights of the versions that a trainer has published."""

    def __init__(self, capacity: int = 4, num_threads: int | None = None) -> None:
        super().__init__("this weight source", capacity, num_threads)
        self.last: PublishedWeights | None = None
        """The last publication; None before the first."""

    def publish(
        self,
        version: int,
        tensors: Iterable[tuple[str, HostTensor]],
        adapter: AdapterSettings | None = None,
        run: str = "",
    ) -> bytes:
        """Copy the weights of a version, by name in any order, and return their digest, 16 bytes.

        The source takes up to WINDOW_BYTES of ``tensors`` at a time, so they may be made one after the other. ``run``: name of
        the run, empty before the first update. If names, types or shapes differ from the version before, all earlier versions
        are forgotten. Publishing the newest version again with the same weights changes nothing. The caller must not change the
        weights during the call. Raises InvalidRequest for a tensor whose bytes do not fit its shape. After an error, the source
        has no versions.
        """
        start = time.perf_counter()
        with self._writer, self._writes():
            previous = self._versions[-1] if self._versions and self._run in ("", run) else None
            before = {
                layout.name: _Tensor(layout, buffer, previous.digests[index] if previous else b"")
                for index, (layout, buffer) in enumerate(zip(self._layouts, self._buffers, strict=True))
            }
            try:
                after = self._take(tensors, before)
            except BaseException:
                # Some buffers may have the new bytes already.
                with self._state:
                    self._versions, self._links = [], []
                raise
            names = sorted(after)
            layouts = tuple(after[name].layout for name in names)
            digests = [after[name].digest for name in names]
            published = version_of(version, layouts, digests, adapter)
            linked = previous is not None and layouts == self._layouts
            if linked and published == previous:
                self._run = run
                return published.digest
            link = Link(
                {
                    (index, chunk.index): (replace(chunk, tensor=index),)
                    for index, name in enumerate(names)
                    for chunk in sorted(after[name].difference, key=lambda chunk: chunk.index)
                }
            )
            with self._state:
                self._layouts, self._buffers = layouts, [after[name].buffer for name in names]
                self._run = run
                self._append(published, link if linked else None)
            self.last = PublishedWeights(
                version,
                published.digest,
                sum(each.changed for each in after.values()) if linked else len(names),
                sum(layout.num_bytes for layout in layouts),
                link.num_bytes if linked else 0,
                time.perf_counter() - start,
            )
            return published.digest

    def _take(self, tensors: Iterable[tuple[str, HostTensor]], before: Mapping[str, _Tensor]) -> dict[str, _Tensor]:
        """Copy the tensors. Return each with its difference to the tensor ``before``."""
        after: dict[str, _Tensor] = {}
        for window in _windows(tensors):
            layouts = [_checked_layout(name, tensor) for name, tensor in window]
            digests = self._in_parallel(lambda item: tensor_digest(item[1]), window)
            parts = []
            for (name, tensor), layout, digest in zip(window, layouts, digests, strict=True):
                old = before.get(name)
                if old is not None and old.layout != layout:
                    old = None
                if old is None or old.digest != digest:
                    buffer = Buffer(np.empty(layout.num_bytes, np.uint8)) if old is None else self._unread(old.buffer)
                    after[name] = _Tensor(layout, buffer, digest, changed=True)
                    parts += [(old, after[name], tensor, index) for index in range(layout.num_chunks)]
                else:
                    after[name] = _Tensor(layout, old.buffer, digest)
            self._in_parallel(_copy_chunk, parts)
            # The tensors can be freed before the next ones are made.
            window.clear()
            del parts
        return after

    def _unread(self, buffer: Buffer) -> Buffer:
        """Return the memory for the new bytes of a tensor: another one if a stream reads it."""
        with self._state:
            return Buffer(np.empty_like(buffer.data)) if buffer.readers else buffer


def _checked_layout(name: str, tensor: HostTensor) -> TensorLayout:
    layout = TensorLayout.of(name, tensor)
    if tensor.data.dtype != np.uint8 or tensor.data.shape != (layout.num_bytes,):
        raise InvalidRequest(
            f"tensor {name}: {layout.dtype} {list(layout.shape)} needs uint8 [{layout.num_bytes}], "
            f"got {tensor.data.dtype} {list(tensor.data.shape)}"
        )
    return layout


def _windows(tensors: Iterable[tuple[str, HostTensor]]) -> Iterator[list[tuple[str, HostTensor]]]:
    """Yield lists of tensors, each of WINDOW_BYTES or the tensor that goes beyond them. The caller clears each list."""
    window: list[tuple[str, HostTensor]] = []
    size = 0
    for name, tensor in tensors:
        window.append((name, tensor))
        size += tensor.data.nbytes
        if size >= WINDOW_BYTES:
            del tensor
            yield window
            window, size = [], 0
    if window:
        yield window


def _copy_chunk(part: tuple[_Tensor | None, _Tensor, HostTensor, int]) -> None:
    """Encode the difference of one chunk to the tensor before, if there is one, and copy the new bytes."""
    old, new, tensor, index = part
    begin = index * CHUNK_BYTES
    span = slice(begin, begin + new.layout.chunk_bytes(index))
    source, target = tensor.data[span], new.buffer.data[span]
    encoded = (
        encode(old.buffer.data[span], source, ITEM_BYTES[new.layout.dtype]) if old is not None and old.digest else None
    )
    if encoded is not None:
        new.difference.append(Chunk(0, index, *encoded))
    target[:] = source
