"""Messages of EnvironmentService: Reset, Step and CloseSession."""

from __future__ import annotations

from dataclasses import dataclass

from quartet.codec.outcomes import details_from_proto, details_to_proto, outcome_from_proto, outcome_to_proto
from quartet.codec.tensors import ints_from_proto, tensor_to_proto
from quartet.contract.arrays import IntArray
from quartet.contract.trajectory import EnvironmentReply
from quartet.errors import ComputationFailed, InvalidRequest
from quartet.v1 import environment_pb2

MAX_SESSION_CHARACTERS = 512
"""Maximum length of the name of a session."""
MAX_TURNS = 1_000_000
"""Maximum number of a turn."""
MAX_FIELDS_CHARACTERS = 16_000_000
"""Maximum length of the fields of a prompt."""


@dataclass(frozen=True, slots=True)
class EnvironmentReset:
    """Arguments of one Reset call. ``fields`` is a JSON object, or empty; ``token_ids`` int32 [tokens] the prompt."""

    session: str
    seed: int
    fields: str
    token_ids: IntArray


@dataclass(frozen=True, slots=True)
class EnvironmentStep:
    """Arguments of one Step call. ``turn`` counts from 1; ``token_ids`` int32 [tokens] are those of the policy's turn."""

    session: str
    turn: int
    token_ids: IntArray


def environment_reset_to_proto(reset: EnvironmentReset) -> environment_pb2.ResetRequest:
    """Convert the arguments of a Reset call."""
    return environment_pb2.ResetRequest(
        session=reset.session, seed=reset.seed, fields=reset.fields, token_ids=tensor_to_proto(reset.token_ids)
    )


def environment_reset_from_proto(message: environment_pb2.ResetRequest) -> EnvironmentReset:
    """Convert and validate the arguments of a Reset call. Raises InvalidRequest."""
    if message.seed >= 2**63:
        raise InvalidRequest(f"seed {message.seed}: expected less than 2**63")
    if len(message.fields) > MAX_FIELDS_CHARACTERS:
        raise InvalidRequest(f"fields: {len(message.fields)} characters, expected at most {MAX_FIELDS_CHARACTERS}")
    return EnvironmentReset(
        _session(message.session), message.seed, message.fields, _tokens(message, "a prompt needs at least one")
    )


def environment_step_to_proto(step: EnvironmentStep) -> environment_pb2.StepRequest:
    """Convert the arguments of a Step call."""
    return environment_pb2.StepRequest(session=step.session, turn=step.turn, token_ids=tensor_to_proto(step.token_ids))


def environment_step_from_proto(message: environment_pb2.StepRequest) -> EnvironmentStep:
    """Convert and validate the arguments of a Step call. Raises InvalidRequest."""
    if not 1 <= message.turn <= MAX_TURNS:
        raise InvalidRequest(f"turn {message.turn}: expected 1 to {MAX_TURNS}")
    return EnvironmentStep(_session(message.session), message.turn, _tokens(message, "a turn has at least one"))


def close_session_to_proto(session: str) -> environment_pb2.CloseSessionRequest:
    """Convert the argument of a CloseSession call."""
    return environment_pb2.CloseSessionRequest(session=session)


def close_session_from_proto(message: environment_pb2.CloseSessionRequest) -> str:
    """Return the session. Raises InvalidRequest."""
    return _session(message.session)


def close_session_response() -> environment_pb2.CloseSessionResponse:
    """Return the response of CloseSession."""
    return environment_pb2.CloseSessionResponse()


def reset_reply_to_proto(reply: EnvironmentReply) -> environment_pb2.ResetResponse:
    """Convert the answer to a reset."""
    return environment_pb2.ResetResponse(reply=_reply_to_proto(reply))


def step_reply_to_proto(reply: EnvironmentReply) -> environment_pb2.StepResponse:
    """Convert the answer to a turn."""
    return environment_pb2.StepResponse(reply=_reply_to_proto(reply))


def environment_reply_from_proto(
    message: environment_pb2.ResetResponse | environment_pb2.StepResponse, vocabulary_size: int | None = None
) -> EnvironmentReply:
    """Convert and validate an answer. Raises InvalidRequest, also for ids outside ``vocabulary_size``."""
    reply = message.reply
    ids = ints_from_proto(reply.observation, "observation")
    if len(ids) and (ids.min() < 0 or (vocabulary_size is not None and ids.max() >= vocabulary_size)):
        allowed = "0 or more" if vocabulary_size is None else f"0..{vocabulary_size - 1}"
        raise InvalidRequest(f"observation: expected ids in {allowed}, got {ids.min()} to {ids.max()}")
    try:
        outcome = outcome_from_proto(reply.outcome, "outcome")
        (detail,) = details_from_proto([reply.detail])
        return EnvironmentReply(ids, reply.reward, reply.done, outcome, detail)
    except ComputationFailed as error:
        raise InvalidRequest(str(error)) from None


def _reply_to_proto(reply: EnvironmentReply) -> environment_pb2.EnvironmentReply:
    (detail,) = details_to_proto([reply.detail])
    return environment_pb2.EnvironmentReply(
        observation=tensor_to_proto(reply.observation),
        reward=reply.reward,
        done=reply.done,
        outcome=outcome_to_proto(reply.outcome),
        detail=detail,
    )


def _session(name: str) -> str:
    if not 0 < len(name) <= MAX_SESSION_CHARACTERS or not name.isprintable():
        raise InvalidRequest(f"session: expected 1 to {MAX_SESSION_CHARACTERS} printable characters, got {len(name)}")
    return name


def _tokens(message: environment_pb2.ResetRequest | environment_pb2.StepRequest, reason: str) -> IntArray:
    ids = ints_from_proto(message.token_ids, "token_ids")
    if not len(ids):
        raise InvalidRequest(f"token_ids: empty; {reason}")
    if ids.min() < 0:
        raise InvalidRequest(f"token_ids: expected 0 or more, got {ids.min()}")
    return ids
