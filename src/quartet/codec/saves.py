"""Messages of Save and Restore."""

from __future__ import annotations

from collections.abc import Sequence

from quartet.contract.weights import RestoreRequest, SavedFile, SaveKind, SaveRequest
from quartet.errors import InvalidRequest
from quartet.v1 import update_pb2

_SAVE_KINDS = {
    SaveKind.CHECKPOINT: update_pb2.SAVE_KIND_CHECKPOINT,
    SaveKind.MODEL: update_pb2.SAVE_KIND_MODEL,
    SaveKind.ADAPTER: update_pb2.SAVE_KIND_ADAPTER,
    SaveKind.EMA: update_pb2.SAVE_KIND_EMA,
}
_SAVE_KIND_NAMES = {number: kind for kind, number in _SAVE_KINDS.items()}


def save_request_to_proto(request: SaveRequest) -> update_pb2.SaveRequest:
    """Convert the arguments of a Save call."""
    return update_pb2.SaveRequest(
        run=request.run,
        directory=request.directory,
        kind=_SAVE_KINDS[request.kind],
        leader_epoch=request.leader_epoch,
        step=request.step,
    )


def save_request_from_proto(message: update_pb2.SaveRequest) -> SaveRequest:
    """Convert and validate the arguments of a Save call. Raises InvalidRequest."""
    kind = _SAVE_KIND_NAMES.get(message.kind)
    if kind is None:
        raise InvalidRequest(f"kind {message.kind}: expected SAVE_KIND_CHECKPOINT, _MODEL, _ADAPTER or _EMA")
    step = message.step if message.HasField("step") else None
    return SaveRequest(message.run, message.directory, kind, message.leader_epoch, step)


def save_response_to_proto(files: Sequence[SavedFile], policy_version: int) -> update_pb2.SaveResponse:
    """Convert the saved files and the version of the saved model."""
    messages = [update_pb2.SavedFile(path=file.path, bytes=file.bytes, sha256=file.sha256) for file in files]
    return update_pb2.SaveResponse(files=messages, policy_version=policy_version)


def saved_files_from_proto(message: update_pb2.SaveResponse) -> list[SavedFile]:
    """Return the saved files."""
    return [SavedFile(file.path, file.bytes, file.sha256) for file in message.files]


def restore_request_to_proto(request: RestoreRequest) -> update_pb2.RestoreRequest:
    """Convert the arguments of a Restore call."""
    return update_pb2.RestoreRequest(
        run=request.run, step=request.step, directory=request.directory, leader_epoch=request.leader_epoch
    )


def restore_request_from_proto(message: update_pb2.RestoreRequest) -> RestoreRequest:
    """Convert the arguments of a Restore call."""
    return RestoreRequest(message.run, message.step, message.directory, message.leader_epoch)


def restore_response_to_proto(policy_version: int) -> update_pb2.RestoreResponse:
    """Convert the version of the restored model."""
    return update_pb2.RestoreResponse(policy_version=policy_version)


def restored_version_from_proto(message: update_pb2.RestoreResponse) -> int:
    """Return the number of updates that a restored model has taken."""
    return int(message.policy_version)
