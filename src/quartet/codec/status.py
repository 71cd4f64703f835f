"""Messages of GetStatus."""

from __future__ import annotations

from quartet.errors import InvalidRequest
from quartet.types import ProcessStatus, Role, ServiceStatus
from quartet.v1 import status_pb2

_ROLES = {
    Role.ACTOR: status_pb2.ROLE_ACTOR,
    Role.CRITIC: status_pb2.ROLE_CRITIC,
    Role.REWARD: status_pb2.ROLE_REWARD,
    Role.REFERENCE: status_pb2.ROLE_REFERENCE,
    Role.ORCHESTRATOR: status_pb2.ROLE_ORCHESTRATOR,
}
_ROLE_NAMES = {number: role for role, number in _ROLES.items()}


def status_to_proto(status: ServiceStatus) -> status_pb2.RoleStatus:
    """Convert the status of one role."""
    return status_pb2.RoleStatus(
        role=_ROLES[status.role],
        model=status.model,
        device=status.device,
        dtype=status.dtype,
        parameters=status.parameters,
        policy_version=status.policy_version,
        tokenizer_fingerprint=status.tokenizer_fingerprint,
        vocabulary_size=status.vocabulary_size,
        run=status.run,
        step=status.step,
        threads=status.threads,
        busy_seconds=status.busy_seconds,
        max_sequence_tokens=status.max_sequence_tokens,
        answers_as_reference=status.answers_as_reference,
        broken=status.broken,
        leader_epoch=status.leader_epoch,
        buffer_unreachable=status.buffer_unreachable,
        work_pending=status.work_pending,
        tokens=status.tokens,
        micro_batch_tokens=status.micro_batch_tokens,
        micro_batch_tokens_held=status.micro_batch_tokens_held,
        gradient_checkpointing=status.gradient_checkpointing,
        token_bytes=status.token_bytes,
        free_bytes=status.free_bytes,
    )


def status_from_proto(message: status_pb2.RoleStatus) -> ServiceStatus:
    """Convert the status of one role. Raises InvalidRequest for an unknown role."""
    role = _ROLE_NAMES.get(message.role)
    if role is None:
        raise InvalidRequest(f"status.role {message.role}: unknown")
    return ServiceStatus(
        role=role,
        model=message.model,
        device=message.device,
        dtype=message.dtype,
        parameters=message.parameters,
        policy_version=message.policy_version,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        vocabulary_size=message.vocabulary_size,
        run=message.run,
        step=message.step,
        threads=message.threads,
        busy_seconds=dict(message.busy_seconds),
        max_sequence_tokens=message.max_sequence_tokens,
        answers_as_reference=message.answers_as_reference,
        broken=message.broken,
        leader_epoch=message.leader_epoch,
        buffer_unreachable=message.buffer_unreachable,
        work_pending=message.work_pending,
        tokens=dict(message.tokens),
        micro_batch_tokens=message.micro_batch_tokens,
        micro_batch_tokens_held=message.micro_batch_tokens_held,
        gradient_checkpointing=message.gradient_checkpointing,
        token_bytes=message.token_bytes,
        free_bytes=message.free_bytes,
    )


def get_status_request() -> status_pb2.GetStatusRequest:
    """Return the request for the status of a process."""
    return status_pb2.GetStatusRequest()


def process_status_to_proto(status: ProcessStatus) -> status_pb2.GetStatusResponse:
    """Convert the status of a process."""
    return status_pb2.GetStatusResponse(
        roles=[status_to_proto(role) for role in status.roles],
        version=status.version,
        metrics_address=status.metrics_address,
    )


def process_status_from_proto(message: status_pb2.GetStatusResponse) -> ProcessStatus:
    """Convert the status of a process. Raises InvalidRequest for an unknown role."""
    return ProcessStatus(
        roles=tuple(status_from_proto(role) for role in message.roles),
        version=message.version,
        metrics_address=message.metrics_address,
    )
