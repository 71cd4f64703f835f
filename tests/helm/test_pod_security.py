"""Every pod meets the Pod Security Standard "restricted" and further requirements of Quartet.

The checks follow https://kubernetes.io/docs/concepts/security/pod-security-standards/.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

from tests.helm.rendering import EXAMPLES, Manifest, changed, example, manifests, of_kind, pod_templates

VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
SECCOMP = {"RuntimeDefault", "Localhost"}
SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
}


def violations(template: Manifest) -> list[str]:
    """Return the violations of "restricted" in a pod template."""
    return [*_pod_violations(template), *_container_violations(template["spec"])]


def _pod_violations(template: Manifest) -> Iterator[str]:
    spec = template["spec"]
    context = spec.get("securityContext", {})
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(key):
            yield key
    for volume in spec.get("volumes", []):
        kinds = set(volume) - {"name"}
        if not kinds or not kinds <= VOLUMES:
            yield f"volumes {volume['name']}: {kinds}"
    for item in context.get("sysctls", []):
        if item["name"] not in SYSCTLS:
            yield f"sysctl {item['name']}"
    if any(key.startswith("container.apparmor") for key in template.get("metadata", {}).get("annotations", {})):
        yield "AppArmor by annotation"


def _container_violations(spec: Manifest) -> Iterator[str]:
    pod = spec.get("securityContext", {})
    for kind in ("initContainers", "containers", "ephemeralContainers"):
        for container in spec.get(kind, []):
            container_context = container.get("securityContext", {})
            name = f"{kind} {container['name']}"
            if container_context.get("allowPrivilegeEscalation") is not False:
                yield f"{name}: allowPrivilegeEscalation"
            if container_context.get("privileged") or container_context.get("procMount", "Default") != "Default":
                yield f"{name}: privileged or procMount"
            capabilities = container_context.get("capabilities", {})
            if "ALL" not in capabilities.get("drop", []) or set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
                yield f"{name}: capabilities"
            merged: dict[str, Any] = {**pod, **container_context}
            if (
                merged.get("runAsNonRoot") is not True
                or merged.get("runAsUser", 1) == 0
                or pod.get("runAsUser", 1) == 0
            ):
                yield f"{name}: runs as root"
            if merged.get("seccompProfile", {}).get("type") not in SECCOMP:
                yield f"{name}: seccompProfile"
            options = merged.get("seLinuxOptions", {})
            if options.get("user") or options.get("role") or merged.get("windowsOptions", {}).get("hostProcess"):
                yield f"{name}: seLinuxOptions or hostProcess"
            if any(port.get("hostPort") for port in container.get("ports", [])):
                yield f"{name}: hostPort"
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                settings = container.get(probe, {})
                if any(settings.get(handler, {}).get("host") for handler in ("httpGet", "tcpSocket")):
                    yield f"{name}: {probe} uses another host"


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_pod_is_restricted(name: str) -> None:
    result = dict(pod_templates(manifests(example(name))))
    assert len(result) >= 6
    for pod, template in result.items():
        assert violations(template) == [], pod


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_pod_has_a_read_only_root_and_no_service_account_token(name: str) -> None:
    for pod, template in pod_templates(manifests(example(name))):
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False, pod
        # Variables with Service addresses could be mistaken for settings.
        assert spec["enableServiceLinks"] is False, pod
        assert spec["serviceAccountName"] == "quartet", pod
        all_containers = [*spec["containers"], *spec.get("initContainers", [])]
        writable_paths = {
            mount["mountPath"] for item in all_containers for mount in item["volumeMounts"] if not mount.get("readOnly")
        }
        component = template["metadata"]["labels"]["app.kubernetes.io/component"]
        filled = {"/quartet/models", "/quartet/data"} if component in ("download", "loader") else set()
        assert writable_paths <= {"/tmp", "/dev/shm", "/quartet/runs", "/data", "/run/redis"} | filled, pod
        for container in all_containers:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, pod
            assert container["resources"]["limits"]["memory"], pod


@pytest.mark.parametrize("name", EXAMPLES)
def test_secrets_are_files_that_only_the_pod_user_reads(name: str) -> None:
    for pod, template in pod_templates(manifests(example(name))):
        for volume in template["spec"]["volumes"]:
            source = volume.get("secret") or volume.get("projected")
            assert source is None or source["defaultMode"] == 0o440, pod
        for container in (*template["spec"]["containers"], *template["spec"].get("initContainers", [])):
            for variable in container.get("env", []):
                plain = ("HOME", "NCCL_DEBUG", "NODE_RANK", "AWS_REGION", "AWS_SHARED_CREDENTIALS_FILE")
                assert variable["name"] in plain, pod


def test_the_service_account_has_no_permissions() -> None:
    result = manifests(example("cpu-kind"))
    assert of_kind(result, "ServiceAccount")["quartet"]["automountServiceAccountToken"] is False
    assert not {item["kind"] for item in result} & {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}


def test_pods_do_not_set_the_number_of_threads() -> None:
    for pod, template in pod_templates(manifests(example("cpu-kind"))):
        for container in template["spec"]["containers"]:
            assert not [item for item in container.get("env", []) if item["name"].startswith("OMP")], pod


CHANGES: dict[str, tuple[list[str], Any]] = {
    "escalation": (["containers", "0", "securityContext", "allowPrivilegeEscalation"], True),
    "capabilities": (["containers", "0", "securityContext", "capabilities"], {"drop": ["ALL"], "add": ["SYS_ADMIN"]}),
    "kept capabilities": (["containers", "0", "securityContext", "capabilities"], {}),
    "root": (["securityContext", "runAsUser"], 0),
    "possibly root": (["securityContext", "runAsNonRoot"], None),
    "seccomp": (["securityContext", "seccompProfile"], {"type": "Unconfined"}),
    "host path": (["volumes", "0"], {"name": "host", "hostPath": {"path": "/"}}),
    "host network": (["hostNetwork"], True),
    "host port": (["containers", "0", "ports", "0", "hostPort"], 80),
    "privileged": (["containers", "0", "securityContext", "privileged"], True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_violation_is_detected(change: str) -> None:
    path, value = CHANGES[change]
    template = deepcopy(dict(pod_templates(manifests(changed("cpu-kind"))))["Deployment/quartet-actor"])
    parent: Any = template["spec"]
    for key in path[:-1]:
        parent = parent[int(key)] if isinstance(parent, list) else parent[key]
    parent[int(path[-1]) if isinstance(parent, list) else path[-1]] = value
    assert violations(template) != []
