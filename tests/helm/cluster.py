"""A Kubernetes API server for Helm's `lookup`: it lists kinds, and serves objects that a test stores."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import helm_python

from tests.helm.rendering import NAMESPACE, Manifest

KINDS: dict[str, dict[str, tuple[str, bool]]] = {
    "v1": {
        "Pod": ("pods", True),
        "Secret": ("secrets", True),
        "Service": ("services", True),
        "PersistentVolumeClaim": ("persistentvolumeclaims", True),
        "ServiceAccount": ("serviceaccounts", True),
    },
    "apps/v1": {"Deployment": ("deployments", True), "StatefulSet": ("statefulsets", True)},
    "batch/v1": {"Job": ("jobs", True)},
    "storage.k8s.io/v1": {"StorageClass": ("storageclasses", False)},
    "scheduling.k8s.io/v1": {"PriorityClass": ("priorityclasses", False)},
    "node.k8s.io/v1": {"RuntimeClass": ("runtimeclasses", False)},
    "networking.k8s.io/v1": {"IngressClass": ("ingressclasses", False)},
}
"""Kinds of every cluster: {API version: {kind: (plural, whether it is namespaced)}}."""
CUSTOM_KINDS: dict[str, dict[str, tuple[str, bool]]] = {
    "cert-manager.io/v1": {"Certificate": ("certificates", True), "Issuer": ("issuers", True)},
    "monitoring.coreos.com/v1": {
        "ServiceMonitor": ("servicemonitors", True),
        "PrometheusRule": ("prometheusrules", True),
    },
    "keda.sh/v1alpha1": {"ScaledObject": ("scaledobjects", True)},
    "leaderworkerset.x-k8s.io/v1": {"LeaderWorkerSet": ("leaderworkersets", True)},
    "scheduling.volcano.sh/v1beta1": {"PodGroup": ("podgroups", True)},
    "kueue.x-k8s.io/v1beta2": {"LocalQueue": ("localqueues", True)},
}


class ApiServer(ThreadingHTTPServer):
    """The server with its kinds and objects. ``forbidden`` contains plurals that the user may not read."""

    # Helm opens a connection for each API version at once. One that does not fit waits for a second.
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _RequestHandler)
        self.kinds = dict(KINDS)
        self.objects: list[Manifest] = []
        self.forbidden: set[str] = set()

    def store(self, objects: Iterable[Manifest]) -> None:
        """Replace all objects. Objects of kinds that the server does not list are omitted."""
        self.objects = [item for item in objects if item["kind"] in self.kinds.get(item["apiVersion"], {})]

    def add(self, kind: str, name: str, **fields: Any) -> Manifest:
        """Add an object, and return it."""
        version = next(version for version, kinds in self.kinds.items() if kind in kinds)
        item = {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **fields}
        self.objects.append(item)
        return item

    def matching(self, version: str, plural: str, name: str) -> list[Manifest]:
        """Return the objects of a kind, all or those with a name."""
        kinds = {kind for kind, (other, _) in self.kinds[version].items() if other == plural}
        return [
            item
            for item in self.objects
            if item["apiVersion"] == version and item["kind"] in kinds and name in ("", item["metadata"]["name"])
        ]


class _RequestHandler(BaseHTTPRequestHandler):
    server: ApiServer

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts == ["api"]:
            self._respond(200, {"kind": "APIVersions", "versions": ["v1"]})
        elif parts == ["apis"]:
            self._respond(200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": self._groups()})
        elif parts[0] not in ("api", "apis"):
            self._respond(200, {"major": "1", "minor": "29", "gitVersion": "v1.29.0"})
        else:
            size = 1 if parts[0] == "api" else 2
            self._respond_for("/".join(parts[1 : 1 + size]), parts[1 + size :])

    def _groups(self) -> list[Manifest]:
        groups = []
        for version in self.server.kinds:
            group, _, name = version.rpartition("/")
            if group:
                preferred = {"groupVersion": version, "version": name}
                groups.append({"name": group, "versions": [preferred], "preferredVersion": preferred})
        return groups

    def _respond_for(self, version: str, path: list[str]) -> None:
        if version not in self.server.kinds:
            self._refuse(404, "NotFound")
        elif not path:
            kinds = [
                {"name": plural, "singularName": kind.lower(), "namespaced": namespaced, "kind": kind, "verbs": ["get"]}
                for kind, (plural, namespaced) in self.server.kinds[version].items()
            ]
            self._respond(200, {"kind": "APIResourceList", "groupVersion": version, "resources": kinds})
        else:
            if path[0] == "namespaces":
                assert path[1] == NAMESPACE
                path = path[2:]
            plural, name = path[0], "".join(path[1:])
            items = self.server.matching(version, plural, name)
            if plural in self.server.forbidden:
                self._refuse(403, "Forbidden")
            elif not name:
                self._respond(200, {"kind": "List", "apiVersion": version, "metadata": {}, "items": items})
            elif items:
                self._respond(200, items[0])
            else:
                self._refuse(404, "NotFound")

    def _refuse(self, status: int, reason: str) -> None:
        content = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": status}
        self._respond(status, {**content, "message": f"{self.path} is {reason.lower()}"})

    def _respond(self, status: int, content: Manifest) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Disable the log."""


@contextmanager
def api_server() -> Iterator[ApiServer]:
    """Run a server."""
    server = ApiServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def connected(api: ApiServer) -> Iterator[helm_python.Config]:
    """Return Helm's connection to the server."""
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{api.server_port}"}}],
        "users": [{"name": "test", "user": {}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    }
    with helm_python.Config(kubeconfig_content=json.dumps(kubeconfig), namespace=NAMESPACE) as config:
        yield config
