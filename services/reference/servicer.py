"""ReferenceService: converts requests and responses, and runs the reference on its compute thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from quartet.codec.checks import checked_temperature
from quartet.codec.messages import from_message, to_message
from quartet.contract.arrays import FloatArray
from quartet.contract.status import Role
from quartet.contract.trajectory import TokenBatch
from quartet.contract.weights import ReferenceVersion
from quartet.rpc.base_servicers import CommandHandler, ModelServicer
from quartet.services.reference.reference import Reference
from quartet.v1 import reference_pb2, reference_pb2_grpc


class ReferenceServicer(ModelServicer[Reference], reference_pb2_grpc.ReferenceServiceServicer):
    """ReferenceService for a Reference."""

    role = Role.REFERENCE

    def register(self, server: grpc.Server) -> None:
        """Add this servicer to a server."""
        reference_pb2_grpc.add_ReferenceServiceServicer_to_server(self, server)

    def LogProbs(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Compute the log-probs of given responses."""
        work = self._log_probs(request)
        step = request.version.step
        log_probs = self.compute.run(
            "log_probs", context, lambda _: self._commands.run("reference_log_probs", request, work)
        )
        return to_message(reference_pb2.ReferenceServiceLogProbsResponse, log_probs=log_probs, version_step=step)

    def handlers(self) -> dict[str, CommandHandler]:
        return {"reference_log_probs": lambda request: self._log_probs(request)()}

    def _log_probs(self, request: Any) -> Callable[[], FloatArray]:
        batch, temperature = from_message(TokenBatch, request.batch, "batch"), checked_temperature(request)
        has_version = request.HasField("version")
        version = from_message(ReferenceVersion, request.version, "version") if has_version else None
        return lambda: self.core.log_probs(batch, temperature, version)
