"""A Triton server for rewards, written from the inference protocol (GRPCInferenceService), with faults for marked sequences."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.rewards.scorers.faults import HANG_SECONDS

MARK_ID = 9
STATUSES = {
    "error": grpc.StatusCode.INTERNAL,
    "overloaded": grpc.StatusCode.UNAVAILABLE,
    "refusal": grpc.StatusCode.INVALID_ARGUMENT,
    "cut": grpc.StatusCode.ABORTED,
    "reset": grpc.StatusCode.CANCELLED,
}


class FaultyTriton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """ModelInfer of ``reward_model``."""

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self.closing = threading.Event()

    def ModelInfer(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Return the rewards of the tokens."""
        if request.model_name != "reward_model":
            context.abort(grpc.StatusCode.NOT_FOUND, "unknown model")
        raw = dict(zip((tensor.name for tensor in request.inputs), request.raw_input_contents, strict=True))
        shapes = {tensor.name: list(tensor.shape) for tensor in request.inputs}
        lengths = np.frombuffer(raw["sequence_lengths"], np.int64)
        tokens = np.frombuffer(raw["tokens"], np.int64).reshape(shapes["tokens"])
        rows = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
        rewards = np.array([((row >= 20) & (row < 30) | (row == MARK_ID)).sum() / 4 for row in rows], np.float32)
        marked = np.array([MARK_ID in row for row in rows])
        return self._answer(rewards, marked, context)

    def _answer(self, rewards: np.ndarray, marked: np.ndarray, context: grpc.ServicerContext) -> Any:
        fault = self._fault if marked.any() else ""
        if fault in STATUSES:
            context.abort(STATUSES[fault], "secret")
        if fault == "hang":
            self.closing.wait(HANG_SECONDS)
        count, datatype = len(rewards), "FP32"
        values = {"nan": np.nan, "infinity": np.inf}
        if fault in values:
            rewards = np.where(marked, np.float32(values[fault]), rewards)
        content = rewards.tobytes()
        if fault == "too few":
            count, content = count - 1, rewards[1:].tobytes()
        if fault == "too many":
            count, content = count + 1, np.append(rewards, 0).astype(np.float32).tobytes()
        if fault == "boolean":
            datatype, content = "BOOL", bytes([1] * count)
        if fault == "string":
            datatype, content = "BYTES", b"".join(b"\x03\x00\x00\x001.5" for _ in range(count))
        if fault == "broken":
            content = content[:-1]
        if fault == "oversized":
            count, content = 5_000_000, bytes(20_000_000)
        name = "other" if fault == "null" else "rewards"
        output = service_pb2.ModelInferResponse.InferOutputTensor(name=name, datatype=datatype, shape=[count, 1])
        if fault == "empty":
            return service_pb2.ModelInferResponse()
        return service_pb2.ModelInferResponse(outputs=[output], raw_output_contents=[content])


@contextmanager
def faulty_triton(fault: str) -> Iterator[str]:
    """Serve on a free port of loopback, and yield the URL."""
    servicer = FaultyTriton(fault)
    server = grpc.server(futures.ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        servicer.closing.set()
        server.stop(0).wait()
