"""The fields of an episode's hash in Redis: recorded turns, and replies of the environment, as bytes."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from quartet.codec.environment import environment_reply_from_proto
from quartet.codec.messages import from_message, to_message
from quartet.codec.trajectories import MAX_DETAIL_CHARACTERS, segment_from_proto
from quartet.contract.trajectory import EnvironmentReply
from quartet.contract.turn_record import RecordedTurn
from quartet.errors import InvalidRequest
from quartet.v1 import environment_pb2, turn_record_pb2

MAX_RECORD_BYTES = 16 * 2**20
"""Maximum size of a recorded turn or reply. A turn of 1,048,576 tokens with log-probs has half of it."""


def turn_to_bytes(turn: RecordedTurn) -> bytes:
    """Serialise a turn. Raises InvalidRequest if it is too large."""
    message = to_message(turn_record_pb2.RecordedTurn, turn)
    if not message.segment.log_probs.data:
        message.segment.ClearField("log_probs")
    return _limited(message.SerializeToString(), f"recorded turn {turn.index}")


def turn_from_bytes(data: bytes) -> RecordedTurn:
    """Parse the result of ``turn_to_bytes``. Raises InvalidRequest."""
    message = turn_record_pb2.RecordedTurn()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise InvalidRequest("recorded turn: not a quartet.v1.RecordedTurn message") from None
    segment = segment_from_proto(message.segment, "recorded turn.segment")
    return from_message(RecordedTurn, message, "recorded turn", segment=segment)


def reply_to_bytes(reply: EnvironmentReply) -> bytes:
    """Serialise a reply of an environment. Raises InvalidRequest if it is too large."""
    message = to_message(environment_pb2.EnvironmentReply, reply, detail=reply.detail[:MAX_DETAIL_CHARACTERS])
    return _limited(message.SerializeToString(), "recorded reply")


def reply_from_bytes(data: bytes) -> EnvironmentReply:
    """Parse the result of ``reply_to_bytes``. Raises InvalidRequest."""
    message = environment_pb2.EnvironmentReply()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise InvalidRequest("recorded reply: not a quartet.v1.EnvironmentReply message") from None
    return environment_reply_from_proto(message)


def _limited(data: bytes, name: str) -> bytes:
    if len(data) > MAX_RECORD_BYTES:
        raise InvalidRequest(f"{name}: {len(data):,} bytes, expected at most {MAX_RECORD_BYTES:,}; shorten the turns")
    return data
