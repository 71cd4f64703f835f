"""What is saved: its kind, and the files."""

from __future__ import annotations

from quartet.errors import InvalidRequest
from quartet.types import SavedFile, SaveKind
from quartet.v1 import update_pb2

_SAVE_KINDS = {
    SaveKind.CHECKPOINT: update_pb2.SAVE_KIND_CHECKPOINT,
    SaveKind.MODEL: update_pb2.SAVE_KIND_MODEL,
    SaveKind.ADAPTER: update_pb2.SAVE_KIND_ADAPTER,
}
_SAVE_KIND_NAMES = {number: kind for kind, number in _SAVE_KINDS.items()}


def save_kind_to_proto(kind: SaveKind) -> update_pb2.SaveKind.ValueType:
    """What to save, to its enum."""
    return _SAVE_KINDS[kind]


def save_kind_from_proto(kind: update_pb2.SaveKind.ValueType) -> SaveKind:
    """What to save, from its enum. Raises InvalidRequest."""
    found = _SAVE_KIND_NAMES.get(kind)
    if found is None:
        raise InvalidRequest(f"kind {kind}: expected SAVE_KIND_CHECKPOINT, _MODEL or _ADAPTER")
    return found


def saved_file_to_proto(file: SavedFile) -> update_pb2.SavedFile:
    """One saved file to its message."""
    return update_pb2.SavedFile(path=file.path, bytes=file.bytes, sha256=file.sha256)


def saved_file_from_proto(message: update_pb2.SavedFile) -> SavedFile:
    """One saved file from its message."""
    return SavedFile(message.path, message.bytes, message.sha256)
