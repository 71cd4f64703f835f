"""WeightService: streams the weights of a store. The actor and the generators host it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import grpc

from quartet.codec.messages import from_message
from quartet.codec.weights import weights_to_proto
from quartet.errors import Cancelled, ServiceBusy
from quartet.rpc.limits import MAX_WEIGHT_STREAMS
from quartet.v1 import weights_pb2_grpc
from quartet.weight_transfer.messages import WeightsRequest
from quartet.weight_transfer.store import WeightStore


class WeightServicer(weights_pb2_grpc.WeightServiceServicer):
    """WeightService for a WeightStore. Streams run on the thread of their call, beside model work."""

    def __init__(self, store: WeightStore, max_streams: int = MAX_WEIGHT_STREAMS) -> None:
        """``max_streams``: streams at once, including those that wait for a version. More fail with ServiceBusy."""
        self._store = store
        self._max_streams = max_streams
        self._slots = threading.BoundedSemaphore(max_streams)

    def register(self, server: grpc.Server) -> None:
        """Add this servicer to a server."""
        weights_pb2_grpc.add_WeightServiceServicer_to_server(self, server)

    def GetWeights(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        """Yield the manifest, then the chunks of the wanted version."""
        wanted = from_message(WeightsRequest, request)
        if not self._slots.acquire(blocking=False):
            raise ServiceBusy(f"weights: {self._max_streams} streams are open already; try another source, or later")
        try:
            if not context.add_callback(self._store.wake):
                raise Cancelled("weights: the caller is gone")
            with closing(self._store.stream(wanted, lambda: not context.is_active())) as messages:
                for message in messages:
                    yield weights_to_proto(message)
        finally:
            self._slots.release()
