"""Messages of GetStatus."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

from quartet.codec.checks import checked_digest
from quartet.codec.generation import weight_transfer_from_proto, weight_transfer_to_proto
from quartet.contract.generation import EngineProperties
from quartet.contract.status import ProcessStatus, Role, ServiceStatus
from quartet.contract.weights import WeightPublication
from quartet.errors import InvalidRequest
from quartet.v1 import status_pb2

_ROLES = {
    Role.ACTOR: status_pb2.ROLE_ACTOR,
    Role.CRITIC: status_pb2.ROLE_CRITIC,
    Role.REWARD: status_pb2.ROLE_REWARD,
    Role.REFERENCE: status_pb2.ROLE_REFERENCE,
    Role.ORCHESTRATOR: status_pb2.ROLE_ORCHESTRATOR,
    Role.GENERATOR: status_pb2.ROLE_GENERATOR,
    Role.ENVIRONMENT: status_pb2.ROLE_ENVIRONMENT,
}
_ENGINE_VALUES = {name: get_args(get_type_hints(EngineProperties)[name]) for name in ("log_probs", "weights", "digest")}
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
        engine=_engine_to_proto(status.engine) if status.engine else None,
        published_weights=[
            status_pb2.PublishedWeights(policy_version=version, weights_digest=digest)
            for version, digest in sorted(status.published_weights.items())
        ],
        last_transfer=weight_transfer_to_proto(status.last_transfer) if status.last_transfer else None,
        last_publication=_publication_to_proto(status.last_publication) if status.last_publication else None,
        open_sessions=status.open_sessions,
        model_files=status.model_files,
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
        engine=_engine_from_proto(message.engine) if message.HasField("engine") else None,
        published_weights={item.policy_version: item.weights_digest for item in message.published_weights},
        last_transfer=weight_transfer_from_proto(message.last_transfer) if message.HasField("last_transfer") else None,
        last_publication=(
            _publication_from_proto(message.last_publication) if message.HasField("last_publication") else None
        ),
        open_sessions=message.open_sessions,
        model_files=dict(message.model_files),
    )


def _engine_to_proto(engine: EngineProperties) -> status_pb2.EngineProperties:
    return status_pb2.EngineProperties(
        name=engine.name,
        seeded=engine.seeded,
        batch_invariant=engine.batch_invariant,
        log_probs=engine.log_probs,
        weights=engine.weights,
        digest=engine.digest,
        in_flight_updates=engine.in_flight_updates,
        trial=engine.trial,
        trial_digest=engine.trial_digest,
    )


def _engine_from_proto(message: status_pb2.EngineProperties) -> EngineProperties:
    """Convert the properties of an engine. Raises InvalidRequest for an unknown value."""
    for name, allowed in _ENGINE_VALUES.items():
        if (value := getattr(message, name)) not in allowed:
            raise InvalidRequest(f"status.engine.{name} {value!r}: expected one of {', '.join(allowed)}")
    values: dict[str, Any] = {name: getattr(message, name) for name in _ENGINE_VALUES}
    return EngineProperties(
        name=message.name,
        seeded=message.seeded,
        batch_invariant=message.batch_invariant,
        in_flight_updates=message.in_flight_updates,
        trial=message.trial,
        trial_digest=message.trial_digest,
        **values,
    )


def _publication_to_proto(publication: WeightPublication) -> status_pb2.WeightPublication:
    return status_pb2.WeightPublication(
        policy_version=publication.policy_version,
        weights_digest=publication.weights_digest,
        changed_tensors=publication.changed_tensors,
        total_bytes=publication.total_bytes,
        delta_bytes=publication.delta_bytes,
        seconds=publication.seconds,
    )


def _publication_from_proto(message: status_pb2.WeightPublication) -> WeightPublication:
    return WeightPublication(
        policy_version=message.policy_version,
        weights_digest=checked_digest(message.weights_digest, "last_publication.weights_digest"),
        changed_tensors=message.changed_tensors,
        total_bytes=message.total_bytes,
        delta_bytes=message.delta_bytes,
        seconds=message.seconds,
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
        instance_id=status.instance_id,
    )


def process_status_from_proto(message: status_pb2.GetStatusResponse) -> ProcessStatus:
    """Convert the status of a process. Raises InvalidRequest for an unknown role."""
    return ProcessStatus(
        roles=tuple(status_from_proto(role) for role in message.roles),
        version=message.version,
        metrics_address=message.metrics_address,
        instance_id=message.instance_id,
    )
