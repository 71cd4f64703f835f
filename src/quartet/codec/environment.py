"""Messages of EnvironmentService: Reset, Step, RestoreSession, CloseSession and RunAgent."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from quartet.codec.checks import within
from quartet.codec.messages import AnyMessage, content, from_message, to_message
from quartet.codec.trajectories import MAX_DETAIL_CHARACTERS, logged_from_json, logged_to_json, printable
from quartet.contract.agent import AgentResult, AgentRun
from quartet.contract.arrays import IntArray
from quartet.contract.trajectory import EnvironmentReply
from quartet.errors import InvalidRequest
from quartet.v1 import environment_pb2

MAX_SESSION_CHARACTERS = 512
"""Maximum length of the name of a session."""
MAX_TURNS = 1_000_000
"""Maximum number of a turn."""
MAX_FIELDS_CHARACTERS = 16_000_000
"""Maximum length of the fields of a prompt."""
MAX_URL_CHARACTERS = 2048
"""Maximum length of the URL of the policy's endpoint."""
MIN_KEY_CHARACTERS, MAX_KEY_CHARACTERS = 16, 512
"""Length of the key of a session at the policy's endpoint."""
MAX_STATE_CHARACTERS = 2**20
"""Maximum length of the state of a session."""


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


@dataclass(frozen=True, slots=True)
class EnvironmentRestore:
    """Arguments of one RestoreSession call: those of the episode's reset, the number of its turns, and the state after them."""

    session: str
    seed: int
    fields: str
    token_ids: IntArray
    turn: int
    state: str


def environment_reset_from_proto(message: environment_pb2.ResetRequest) -> EnvironmentReset:
    """Convert and validate the arguments of a Reset call. Raises InvalidRequest."""
    reset = from_message(EnvironmentReset, message)
    _check_start(reset)
    _check_tokens(reset.token_ids, "a prompt needs at least one")
    return reset


def environment_restore_from_proto(message: environment_pb2.RestoreSessionRequest) -> EnvironmentRestore:
    """Convert and validate the arguments of a RestoreSession call. Raises InvalidRequest."""
    reset = from_message(EnvironmentRestore, message)
    _check_start(reset)
    within(reset, "", 0, MAX_TURNS, "turn")
    _check_state(reset.state)
    if not reset.state:
        raise InvalidRequest("state: empty, expected that of a reply")
    _check_tokens(reset.token_ids, "a prompt needs at least one")
    return reset


def _check_state(state: str) -> None:
    if len(state) > MAX_STATE_CHARACTERS:
        raise InvalidRequest(f"state: {len(state):,} characters, expected at most {MAX_STATE_CHARACTERS:,}")


def environment_step_from_proto(message: environment_pb2.StepRequest) -> EnvironmentStep:
    """Convert and validate the arguments of a Step call. Raises InvalidRequest."""
    step = from_message(EnvironmentStep, message)
    checked_session(step.session)
    within(step, "", 1, MAX_TURNS, "turn")
    _check_tokens(step.token_ids, "a turn has at least one")
    return step


def environment_reply_to_proto(message_type: type[AnyMessage], reply: EnvironmentReply) -> AnyMessage:
    """Convert the answer to a reset, a turn or a restore to a ResetResponse, a StepResponse or a RestoreSessionResponse."""
    detail = reply.detail[:MAX_DETAIL_CHARACTERS]
    return to_message(message_type, reply=content(environment_pb2.EnvironmentReply, reply, detail=detail))


def environment_reply_from_proto(
    message: environment_pb2.EnvironmentReply, vocabulary_size: int | None = None
) -> EnvironmentReply:
    """Convert and validate an answer. Raises InvalidRequest, also for ids outside ``vocabulary_size``."""
    reply = from_message(EnvironmentReply, message, detail=printable(message.detail))
    _check_state(reply.state)
    for name in ("observation", "prompt"):
        ids = getattr(reply, name)
        if (
            ids is not None
            and len(ids)
            and (ids.min() < 0 or (vocabulary_size is not None and ids.max() >= vocabulary_size))
        ):
            allowed = "0 or more" if vocabulary_size is None else f"0..{vocabulary_size - 1}"
            raise InvalidRequest(f"{name}: expected ids in {allowed}, got {ids.min()} to {ids.max()}")
    return reply


def agent_run_from_proto(message: environment_pb2.RunAgentRequest) -> AgentRun:
    """Convert and validate the arguments of a RunAgent call. Raises InvalidRequest, which does not quote the key."""
    run = from_message(AgentRun, message)
    _check_start(run)
    parts = urlsplit(run.base_url) if run.base_url.isprintable() and len(run.base_url) <= MAX_URL_CHARACTERS else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.netloc:
        raise InvalidRequest(
            f"base_url: expected http:// or https:// and a host, at most {MAX_URL_CHARACTERS} characters, got {len(run.base_url)}"
        )
    key = run.api_key
    if not MIN_KEY_CHARACTERS <= len(key) <= MAX_KEY_CHARACTERS or not key.isprintable() or " " in key:
        raise InvalidRequest(
            f"api_key: expected {MIN_KEY_CHARACTERS} to {MAX_KEY_CHARACTERS} printable characters without spaces, got {len(key)}"
        )
    if not 0 < len(run.model) <= MAX_SESSION_CHARACTERS or not run.model.isprintable():
        raise InvalidRequest(
            f"model: expected 1 to {MAX_SESSION_CHARACTERS} printable characters, got {len(run.model)}"
        )
    return run


def agent_result_to_proto(result: AgentResult) -> environment_pb2.RunAgentResponse:
    """Convert the result of an agent that has ended."""
    logged = logged_to_json(result.logged) if result.logged else ""
    detail = result.detail[:MAX_DETAIL_CHARACTERS]
    return to_message(environment_pb2.RunAgentResponse, result, detail=detail, logged=logged)


def agent_result_from_proto(message: environment_pb2.RunAgentResponse) -> AgentResult:
    """Convert and validate the result of an agent. Raises InvalidRequest."""
    logged = logged_from_json(message.logged, "logged") if message.logged else {}
    return from_message(AgentResult, message, detail=printable(message.detail), logged=logged)


def _check_start(call: EnvironmentReset | EnvironmentRestore | AgentRun) -> None:
    checked_session(call.session)
    if call.seed >= 2**63:
        raise InvalidRequest(f"seed {call.seed}: expected less than 2**63")
    if len(call.fields) > MAX_FIELDS_CHARACTERS:
        raise InvalidRequest(f"fields: {len(call.fields)} characters, expected at most {MAX_FIELDS_CHARACTERS}")


def checked_session(name: str) -> str:
    """Return the name of a session. Raises InvalidRequest."""
    if not 0 < len(name) <= MAX_SESSION_CHARACTERS or not name.isprintable():
        raise InvalidRequest(f"session: expected 1 to {MAX_SESSION_CHARACTERS} printable characters, got {len(name)}")
    return name


def _check_tokens(ids: IntArray, reason: str) -> None:
    if not len(ids):
        raise InvalidRequest(f"token_ids: empty; {reason}")
    if ids.min() < 0:
        raise InvalidRequest(f"token_ids: expected 0 or more, got {ids.min()}")
