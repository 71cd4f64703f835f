"""Checks of every process: health, status, unknown methods, and access."""

from __future__ import annotations

import re

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quartet.conformance.check import Check
from quartet.conformance.outcome import Skipped, Violation, expect, name_of
from quartet.conformance.target import Refusal, Target
from quartet.system.secret_files import AUTHORITY
from quartet.v1 import status_pb2, status_pb2_grpc

STATUS = "proto/quartet/v1/status.proto"
SECURITY = "docs/threat-model.md"
STATUS_SECONDS = 5.0
"""Time in which a status must arrive."""


def _health(target: Target, service: str) -> None:
    request = health_pb2.HealthCheckRequest(service=service)
    response = target.call(target.health_stub.Check, request, STATUS_SECONDS)
    serving = health_pb2.HealthCheckResponse.SERVING
    name = name_of(health_pb2.HealthCheckResponse.ServingStatus, response.status)
    expect(response.status == serving, f"the health of {service or 'the server'!r} is {name}; expected SERVING")


def _health_server(target: Target) -> None:
    _health(target, "")


def _health_service(target: Target) -> None:
    _health(target, target.service)


def _health_unknown(target: Target) -> None:
    request = health_pb2.HealthCheckRequest(service="quartet.v1.NoSuchService")
    refusal = target.refusal(target.health_stub.Check, request)
    expect(
        refusal.code is grpc.StatusCode.NOT_FOUND, f"the health of an unknown service is {refusal}; expected NOT_FOUND"
    )


def _status_role(target: Target) -> None:
    target.status()


def _status_vocabulary(target: Target) -> None:
    status = target.status()
    expect(status.vocabulary_size >= 2, f"vocabulary_size is {status.vocabulary_size}; expected 2 or more")
    expect(
        re.fullmatch("[0-9a-f]{64}", status.tokenizer_fingerprint),
        f"tokenizer_fingerprint is {status.tokenizer_fingerprint[:80]!r}; expected a SHA-256 in hexadecimal",
    )


def _status_instance(target: Target) -> None:
    first, second = target.process_status(), target.process_status()
    expect(first.instance_id, "instance_id is empty; expected a random id of the process")
    expect(
        first.instance_id == second.instance_id,
        "instance_id differs between two calls; expected it to change with a restart only",
    )
    expect(first.version, "version is empty; expected the version of the implementation")


def _unknown_method(target: Target) -> None:
    method = target.channel.unary_unary(
        f"/{target.service}/NoSuchMethod", request_serializer=bytes, response_deserializer=bytes
    )
    refusal = target.refusal(method, b"")
    expect(refusal.code is grpc.StatusCode.UNIMPLEMENTED, f"an unknown method is {refusal}; expected UNIMPLEMENTED")


def _tls_required(target: Target) -> None:
    if not target.credentials.encrypted:
        raise Skipped("without certificates; give --certificates")
    with grpc.insecure_channel(target.address) as channel:
        try:
            status_pb2_grpc.StatusServiceStub(channel).GetStatus(
                status_pb2.GetStatusRequest(), timeout=STATUS_SECONDS, metadata=target.credentials.metadata
            )
        except grpc.RpcError:
            return
    raise Violation("a call without TLS succeeded; expected the connection to fail")


def _tls_client_certificate(target: Target) -> None:
    folder = target.credentials.folder
    if folder is None:
        raise Skipped("without certificates; give --certificates")
    authority = (folder / AUTHORITY).read_bytes()
    options = [("grpc.ssl_target_name_override", f"{target.role}.quartet")]
    with grpc.secure_channel(target.address, grpc.ssl_channel_credentials(authority), options) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=STATUS_SECONDS, metadata=target.credentials.metadata
            )
        except grpc.RpcError:
            return
    raise Violation("a caller without a certificate was served; expected the connection to fail")


def _token_required(target: Target) -> None:
    if not target.credentials.metadata:
        raise Skipped("without a token; give --token-file")
    for metadata in ((), (("authorization", "Bearer wrong"),)):
        try:
            target.status_stub.GetStatus(status_pb2.GetStatusRequest(), timeout=STATUS_SECONDS, metadata=metadata)
        except grpc.RpcError as error:
            refusal = Refusal.of(error)
            expect(
                refusal.code is grpc.StatusCode.UNAUTHENTICATED,
                f"a call with a missing or wrong token is {refusal}; expected UNAUTHENTICATED",
            )
        else:
            raise Violation("a call with a missing or wrong token succeeded; expected UNAUTHENTICATED")


def process_checks() -> list[Check]:
    """Return the checks of every process."""
    return [
        Check("health.server", "The health service reports the server as SERVING.", STATUS, _health_server),
        Check("health.service", "The health service reports the role's service as SERVING.", STATUS, _health_service),
        Check(
            "health.unknown",
            "The health service answers NOT_FOUND for a service that does not exist.",
            "grpc.health.v1",
            _health_unknown,
        ),
        Check("status.role", "GetStatus lists the role.", STATUS, _status_role),
        Check(
            "status.vocabulary",
            "The status has the size of the vocabulary and the fingerprint of the tokenizer.",
            STATUS,
            _status_vocabulary,
        ),
        Check(
            "status.instance",
            "The status has the version, and an id that changes only when the process is restarted.",
            STATUS,
            _status_instance,
        ),
        Check("errors.unknown_method", "A method that does not exist is UNIMPLEMENTED.", "gRPC", _unknown_method),
        Check("tls.required", "A server with certificates refuses connections without TLS.", SECURITY, _tls_required),
        Check(
            "tls.client_certificate",
            "A server with certificates refuses callers without a certificate.",
            SECURITY,
            _tls_client_certificate,
        ),
        Check("tls.token", "A server with a token refuses calls without it.", SECURITY, _token_required),
    ]
