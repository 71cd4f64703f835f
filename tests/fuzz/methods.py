"""Every RPC method of Quartet, read from the descriptors, so that new methods are fuzzed automatically."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

import quartet.v1


@dataclass(frozen=True)
class Method:
    """An RPC method. ``streams``: its response is a stream of messages."""

    service: str
    name: str
    request: type[Message]
    streams: bool

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"


def all_methods() -> dict[str, Method]:
    """Return the methods of quartet.v1 and of the health service, by path."""
    modules = [
        importlib.import_module(f"quartet.v1.{module.name}")
        for module in pkgutil.iter_modules(quartet.v1.__path__)
        if module.name.endswith("_pb2")
    ]
    results = {}
    for module in (*modules, health_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                assert not method.client_streaming, f"{method.full_name}: fuzzing sends one request per call"
                request = GetMessageClass(method.input_type)
                result = Method(service.full_name, method.name, request, bool(method.server_streaming))
                results[result.path] = result
    return results
