"""A RewardService written from the contract, with faults that no correct service has."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np

from quartet.codec.messages import to_message
from quartet.codec.scoring import score_request_from_proto, scores_to_proto
from quartet.contract.status import ProcessStatus, Role, ServiceStatus
from quartet.contract.trajectory import Outcome, Scores
from quartet.models.weights.tokenizer import tokenizer_fingerprint
from quartet.v1 import reward_pb2, status_pb2, tensor_pb2
from tests.rewards.scorers.faults import HANG_SECONDS
from tests.unit.models import tiny

MARK_ID = 9
STATUSES = {
    "error": grpc.StatusCode.INTERNAL,
    "overloaded": grpc.StatusCode.UNAVAILABLE,
    "cut": grpc.StatusCode.ABORTED,
    "reset": grpc.StatusCode.UNKNOWN,
    "denied once": grpc.StatusCode.PERMISSION_DENIED,
    "unauthenticated once": grpc.StatusCode.UNAUTHENTICATED,
    "unimplemented once": grpc.StatusCode.UNIMPLEMENTED,
}


class FaultyRewardService(grpc.GenericRpcHandler):
    """Score and GetStatus. ``fault`` concerns requests with the mark, or every request for faults of a whole response."""

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self.closing = threading.Event()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a method. It exchanges bytes, so that a response can be malformed."""
        method = str(handler_call_details.method)
        work = self._score if method.endswith("/Score") else self._status if method.endswith("/GetStatus") else None
        return grpc.unary_unary_rpc_method_handler(work) if work else None

    def _status(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        tokenizer = tiny.tokenizer()
        status = ServiceStatus(
            Role.REWARD,
            model="rm",
            parameters=12,
            tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
            vocabulary_size=len(tokenizer),
        )
        return to_message(status_pb2.GetStatusResponse, ProcessStatus((status,), "0")).SerializeToString()

    def _score(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        batch, *_ = score_request_from_proto(reward_pb2.ScoreRequest.FromString(request))
        marked = np.array(
            [MARK_ID in ids[prompt:] for ids, prompt in zip(batch.sequences(), batch.prompt_lengths, strict=True)]
        )
        total = (batch.response_lengths / 4).astype(np.float32)
        if not self._fault or not marked.any():
            return scores_to_proto(Scores(total)).SerializeToString()
        return self._faulty(context, total, marked)

    def _faulty(self, context: grpc.ServicerContext, total: np.ndarray, marked: np.ndarray) -> bytes:
        fault = self._fault
        if fault.endswith(" once"):
            self._fault = ""
        if fault in STATUSES:
            context.abort(STATUSES[fault], "secret text")
        if fault == "hang":
            self.closing.wait(HANG_SECONDS)
        if fault == "refusal":
            outcomes = tuple(Outcome.REFUSED if mark else Outcome.OK for mark in marked)
            hidden = np.where(marked, np.float32(np.nan), total)
            return scores_to_proto(Scores(hidden, outcomes=outcomes)).SerializeToString()
        message = scores_to_proto(Scores(total))
        wrong = {"nan": np.nan, "infinity": np.inf}
        if fault in wrong:
            message.scores.data = np.where(marked, np.float32(wrong[fault]), total).tobytes()
        if fault == "too few":
            message = scores_to_proto(Scores(total[:-1]))
        if fault == "too many":
            message = scores_to_proto(Scores(np.append(total, total[:1])))
        if fault == "boolean":
            message.scores.dtype = tensor_pb2.DATA_TYPE_INT32
        if fault == "string":
            message.scores.dtype = tensor_pb2.DATA_TYPE_UNSPECIFIED
        if fault == "null":
            message.ClearField("scores")
        if fault == "oversized":
            message.scores.data += bytes(400)
        whole = message.SerializeToString()
        if fault == "broken":
            return whole[:-3]
        return b"" if fault == "empty" else whole


@contextmanager
def faulty_service(fault: str) -> Iterator[str]:
    """Serve on a free port of loopback, and yield HOST:PORT."""
    handler = FaultyRewardService(fault)
    server = grpc.server(futures.ThreadPoolExecutor(8), handlers=(handler,), options=[("grpc.so_reuseport", 0)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        handler.closing.set()
        server.stop(0).wait()
