"""ReferenceService: converts requests and responses, and runs the reference on its compute thread."""

from __future__ import annotations

from typing import Any

import grpc

from quartet import codec
from quartet.rpc.base_servicers import ModelServicer
from quartet.services.reference.reference import Reference
from quartet.types import Role
from quartet.v1 import reference_pb2_grpc


class ReferenceServicer(ModelServicer[Reference], reference_pb2_grpc.ReferenceServiceServicer):
    """ReferenceService for a Reference."""

    role = Role.REFERENCE

    def register(self, server: grpc.Server) -> None:
        """Add this servicer to a server."""
        reference_pb2_grpc.add_ReferenceServiceServicer_to_server(self, server)

    def LogProbs(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Compute the log-probs of given responses."""
        batch, temperature = codec.reference_log_probs_from_proto(request)
        log_probs = self.compute.run("log_probs", context, lambda _: self.core.log_probs(batch, temperature))
        return codec.reference_log_probs_response_to_proto(log_probs)
