"""The reference behind gRPC: convert, delegate, convert."""

from __future__ import annotations

import grpc

from quartet import codec
from quartet.rpc.base_servicers import ModelRole
from quartet.services.reference.reference import Reference
from quartet.types import Role
from quartet.v1 import reference_pb2, reference_pb2_grpc


class ReferenceServicer(ModelRole[Reference], reference_pb2_grpc.ReferenceServiceServicer):
    """ReferenceService over a Reference."""

    role = Role.REFERENCE

    def register(self, server: grpc.Server) -> None:
        """Adds this servicer."""
        reference_pb2_grpc.add_ReferenceServiceServicer_to_server(self, server)

    def LogProbs(
        self, request: reference_pb2.ReferenceServiceLogProbsRequest, context: grpc.ServicerContext
    ) -> reference_pb2.ReferenceServiceLogProbsResponse:
        """Log-probs of given responses."""
        batch, temperature = codec.batch_from_proto(request.batch), codec.positive(request.temperature, "temperature")
        log_probs = self.compute.run("log_probs", context, lambda _: self.core.log_probs(batch, temperature))
        return reference_pb2.ReferenceServiceLogProbsResponse(log_probs=codec.tensor_to_proto(log_probs))
