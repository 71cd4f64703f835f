"""ReferenceService: converts requests and responses, and runs the reference on its compute thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from quartet import codec
from quartet.contract.arrays import FloatArray
from quartet.contract.status import Role
from quartet.rpc.base_servicers import ModelServicer
from quartet.rpc.commands import CommandHandler
from quartet.services.reference.reference import Reference
from quartet.v1 import reference_pb2_grpc


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
        return codec.reference_log_probs_response_to_proto(log_probs, step)

    def handlers(self) -> dict[str, CommandHandler]:
        """See ``ModelServicer.handlers``."""
        return {"reference_log_probs": lambda request: self._log_probs(request)()}

    def _log_probs(self, request: Any) -> Callable[[], FloatArray]:
        batch, temperature, version = codec.reference_log_probs_from_proto(request)
        return lambda: self.core.log_probs(batch, temperature, version)
