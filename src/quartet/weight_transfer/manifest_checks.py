"""Checks of what a source of weights says about them and of the chunks that it sends, before any are used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quartet.weight_transfer.messages import MAX_LINKS, Chunk, Manifest, Message, TensorLayout, WeightsRequest
from quartet.weight_transfer.store import Position, check_names
from quartet.weight_transfer.tensors import combined_digest


class WrongWeights(Exception):
    """A source sent other weights than expected."""


def checked_manifest(
    manifest: Message | None, request: WeightsRequest, layouts: Sequence[TensorLayout], max_bytes: int
) -> Manifest:
    """Return the first message of a stream after all checks that need no data. Raises WrongWeights, InvalidRequest.

    ``layouts``: those of the weights that the receiver holds. ``max_bytes``: maximum size of the weights.
    """
    if not isinstance(manifest, Manifest):
        raise WrongWeights("expected a manifest first")
    if manifest.run not in ("", request.run) or (manifest.version, manifest.digest) != (
        request.version,
        request.digest,
    ):
        raise WrongWeights(
            f"expected version {request.version} ({request.digest.hex()}) of run {request.run!r}, got version "
            f"{manifest.version} ({manifest.digest.hex()}) of run {manifest.run!r}"
        )
    check_names(layout.name for layout in manifest.layouts)
    names = (layout.name for layout in manifest.layouts)
    if combined_digest(dict(zip(names, manifest.digests, strict=True))) != manifest.digest:
        raise WrongWeights("the digests of the tensors do not give the digest of the version")
    if manifest.num_bytes > max_bytes:
        raise WrongWeights(f"expected weights of at most {max_bytes} bytes, got {manifest.num_bytes}")
    if manifest.base_version is not None:
        if manifest.base_version != request.have_version or manifest.layouts != layouts:
            raise WrongWeights(
                f"expected a delta against version {request.have_version} with its tensors, "
                f"got one against version {manifest.base_version}"
            )
        if manifest.data_bytes > manifest.num_bytes or not 1 <= manifest.num_links <= MAX_LINKS:
            raise WrongWeights(
                f"expected a delta of at most {manifest.num_bytes} bytes and {MAX_LINKS} links, "
                f"got {manifest.data_bytes} and {manifest.num_links}"
            )
    return manifest


def check_slices(manifest: Manifest) -> None:
    """Raise WrongWeights unless the slices of the ranks are every byte of every tensor, once."""
    found: list[list[tuple[int, int]]] = [[] for _ in manifest.layouts]
    for rank in manifest.ranks:
        for tensor, begin, size in zip(rank.tensors, rank.begins, rank.sizes, strict=True):
            if tensor >= len(found):
                raise WrongWeights(f"expected slices of {len(found)} tensors, got one of tensor {tensor}")
            if not size:
                # It would have no message, and those after it would count for the tensor before.
                raise WrongWeights(f"{manifest.layouts[tensor].name}: expected slices of at least one byte")
            found[tensor].append((begin, begin + size))
    for layout, ranges in zip(manifest.layouts, found, strict=True):
        done = 0
        for begin, end in sorted(ranges):
            if begin != done or end <= begin:
                break
            done = end
        if done != layout.num_bytes or sum(end - begin for begin, end in ranges) != done:
            raise WrongWeights(f"{layout.name}: expected slices that are its {layout.num_bytes} bytes once")


def data_chunks(stream: Iterator[Message]) -> Iterator[Chunk]:
    """Yield the chunks of a stream after its manifest. Raises WrongWeights."""
    for message in stream:
        if isinstance(message, Manifest):
            raise WrongWeights("expected only one manifest")
        yield from message


def collect_delta(
    manifest: Manifest, stream: Iterator[Message], changed: frozenset[int]
) -> tuple[dict[Position, list[Chunk]], int]:
    """Return the chunks of a delta by position, and their bytes."""
    chunks: dict[Position, list[Chunk]] = {}
    received = 0
    for chunk in data_chunks(stream):
        received += len(chunk.data)
        if chunk.tensor not in changed or chunk.index >= manifest.layouts[chunk.tensor].num_chunks:
            raise WrongWeights(f"unexpected chunk {chunk.index} of tensor {chunk.tensor}")
        group = chunks.setdefault((chunk.tensor, chunk.index), [])
        group.append(chunk)
        if len(group) > manifest.num_links or received > manifest.data_bytes:
            raise WrongWeights(
                f"expected at most {manifest.num_links} chunks per range and {manifest.data_bytes} bytes, got more"
            )
    if received != manifest.data_bytes:
        raise WrongWeights(f"the stream ended after {received} of {manifest.data_bytes} bytes")
    return chunks, received
