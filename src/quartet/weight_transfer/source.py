"""The weights that a trainer publishes, version after version."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from quartet.errors import InvalidRequest
from quartet.types import WeightPublication
from quartet.weight_transfer.delta import encode
from quartet.weight_transfer.digests import tensor_digest
from quartet.weight_transfer.messages import CHUNK_BYTES, Chunk, TensorLayout
from quartet.weight_transfer.store import Link, Position, WeightStore, version_of
from quartet.weight_transfer.tensors import ITEM_BYTES, AdapterSettings, HostTensor


class WeightSource(WeightStore):
    """Weights of the versions that a trainer has published."""

    def __init__(self, capacity: int = 4, num_threads: int | None = None) -> None:
        """See ``WeightStore``."""
        super().__init__("this weight source", capacity, num_threads)
        self.last: WeightPublication | None = None
        """The last publication; None before the first."""

    def publish(
        self, version: int, tensors: Mapping[str, HostTensor], adapter: AdapterSettings | None = None, run: str = ""
    ) -> bytes:
        """Copy the weights of a version and return their digest, 16 bytes.

        ``run``: name of the run, empty before the first update. If names, types or shapes differ from the version before, all
        earlier versions are forgotten. Publishing the newest version again with the same weights changes nothing. The caller must
        not change the weights during the call. Raises InvalidRequest for a tensor whose bytes do not fit its shape.
        """
        start = time.perf_counter()
        names = sorted(tensors)
        layouts = tuple(TensorLayout.of(name, tensors[name]) for name in names)
        ordered = [tensors[name] for name in names]
        for layout, tensor in zip(layouts, ordered, strict=True):
            if tensor.data.dtype != np.uint8 or tensor.data.shape != (layout.num_bytes,):
                raise InvalidRequest(
                    f"tensor {layout.name}: {layout.dtype} {list(layout.shape)} needs uint8 [{layout.num_bytes}], "
                    f"got {tensor.data.dtype} {list(tensor.data.shape)}"
                )
        with self._writer, self._writes():
            digests = self._in_parallel(tensor_digest, ordered)
            published = version_of(version, layouts, digests, adapter)
            same = self._layouts == layouts and self._run in ("", run)
            previous = self._versions[-1] if same and self._versions else None
            if previous == published:
                self._run = run
                return published.digest
            link: Link | None = None
            changed = set(range(len(layouts)))
            try:
                if previous is None:
                    self._allocate(layouts)
                    self._in_parallel(lambda index: self._copy(index, ordered[index]), range(len(layouts)))
                else:
                    changed = {index for index in changed if previous.digests[index] != digests[index]}
                    link = self._difference(sorted(changed), ordered)
            except BaseException:
                # Some buffers may have the new bytes already.
                self._versions, self._links = [], []
                raise
            with self._state:
                self._run = run
                self._append(published, link)
            self.last = WeightPublication(
                version,
                published.digest,
                len(changed),
                sum(layout.num_bytes for layout in layouts),
                0 if link is None else link.num_bytes,
                time.perf_counter() - start,
            )
            return published.digest

    def _copy(self, index: int, tensor: HostTensor) -> None:
        self._writable(index, keep=False).data[:] = tensor.data

    def _difference(self, changed: list[int], tensors: list[HostTensor]) -> Link:
        """Encode the difference to the buffers, and copy the new bytes."""
        old = {tensor: self._buffers[tensor].data for tensor in changed}
        new = {tensor: self._writable(tensor, keep=False).data for tensor in changed}

        def work(position: Position) -> Chunk | None:
            tensor, index = position
            layout = self._layouts[tensor]
            begin = index * CHUNK_BYTES
            span = slice(begin, begin + layout.chunk_bytes(index))
            source, target = tensors[tensor].data[span], new[tensor][span]
            encoded = encode(old[tensor][span], source, ITEM_BYTES[layout.dtype])
            if encoded is not None or target is not old[tensor]:
                target[:] = source
            return None if encoded is None else Chunk(tensor, index, *encoded)

        positions = [(tensor, index) for tensor in changed for index in range(self._layouts[tensor].num_chunks)]
        chunks = self._in_parallel(work, positions)
        return Link({(chunk.tensor, chunk.index): (chunk,) for chunk in chunks if chunk is not None})
