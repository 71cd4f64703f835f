"""Every pod meets Pod Security "restricted", and what Quartet asks for besides. The checks are those of the standard's page."""

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
    """Return what "restricted" finds fault with in a pod."""
    return [*_of_the_pod(template), *_of_its_containers(template["spec"])]


def _of_the_pod(template: Manifest) -> Iterator[str]:
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


def _of_its_containers(spec: Manifest) -> Iterator[str]:
    pod = spec.get("securityContext", {})
    for kind in ("initContainers", "containers", "ephemeralContainers"):
        for container in spec.get(kind, []):
            own = container.get("securityContext", {})
            where = f"{kind} {container['name']}"
            if own.get("allowPrivilegeEscalation") is not False:
                yield f"{where}: allowPrivilegeEscalation"
            if own.get("privileged") or own.get("procMount", "Default") != "Default":
                yield f"{where}: privileged or procMount"
            capabilities = own.get("capabilities", {})
            if "ALL" not in capabilities.get("drop", []) or set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
                yield f"{where}: capabilities"
            both: dict[str, Any] = {**pod, **own}
            if both.get("runAsNonRoot") is not True or both.get("runAsUser", 1) == 0 or pod.get("runAsUser", 1) == 0:
                yield f"{where}: runs as root"
            if both.get("seccompProfile", {}).get("type") not in SECCOMP:
                yield f"{where}: seccompProfile"
            options = both.get("seLinuxOptions", {})
            if options.get("user") or options.get("role") or both.get("windowsOptions", {}).get("hostProcess"):
                yield f"{where}: seLinuxOptions or hostProcess"
            if any(port.get("hostPort") for port in container.get("ports", [])):
                yield f"{where}: hostPort"
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                asked = container.get(probe, {})
                if any(asked.get(way, {}).get("host") for way in ("httpGet", "tcpSocket")):
                    yield f"{where}: {probe} asks another host"


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_pod_is_restricted(name: str) -> None:
    result = dict(pod_templates(manifests(example(name))))
    assert len(result) >= 6
    for where, template in result.items():
        assert violations(template) == [], where


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_pod_has_a_read_only_root_and_nothing_to_say_to_kubernetes(name: str) -> None:
    for where, template in pod_templates(manifests(example(name))):
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False, where
        # Addresses of Services in the environment could be taken for settings.
        assert spec["enableServiceLinks"] is False, where
        assert spec["serviceAccountName"] == "quartet", where
        written = {
            mount["mountPath"]
            for item in spec["containers"]
            for mount in item["volumeMounts"]
            if not mount.get("readOnly")
        }
        assert written <= {"/tmp", "/dev/shm", "/quartet/runs", "/data", "/run/redis"}, where
        for container in spec["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, where
            assert container["resources"]["limits"]["memory"], where


@pytest.mark.parametrize("name", EXAMPLES)
def test_secrets_are_files_for_the_pods_user_alone(name: str) -> None:
    for where, template in pod_templates(manifests(example(name))):
        for volume in template["spec"]["volumes"]:
            source = volume.get("secret") or volume.get("projected")
            assert source is None or source["defaultMode"] == 0o440, where
        for container in template["spec"]["containers"]:
            for variable in container.get("env", []):
                assert variable["name"] in ("HOME", "NCCL_DEBUG"), where


def test_the_account_may_do_nothing() -> None:
    result = manifests(example("cpu-kind"))
    assert of_kind(result, "ServiceAccount")["quartet"]["automountServiceAccountToken"] is False
    assert not {item["kind"] for item in result} & {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}


def test_threads_are_left_to_the_config() -> None:
    for where, template in pod_templates(manifests(example("cpu-kind"))):
        for container in template["spec"]["containers"]:
            assert not [item for item in container.get("env", []) if item["name"].startswith("OMP")], where


CHANGES: dict[str, tuple[list[str], Any]] = {
    "escalation": (["containers", "0", "securityContext", "allowPrivilegeEscalation"], True),
    "capabilities": (["containers", "0", "securityContext", "capabilities"], {"drop": ["ALL"], "add": ["SYS_ADMIN"]}),
    "kept capabilities": (["containers", "0", "securityContext", "capabilities"], {}),
    "root": (["securityContext", "runAsUser"], 0),
    "perhaps root": (["securityContext", "runAsNonRoot"], None),
    "seccomp": (["securityContext", "seccompProfile"], {"type": "Unconfined"}),
    "host path": (["volumes", "0"], {"name": "host", "hostPath": {"path": "/"}}),
    "host network": (["hostNetwork"], True),
    "host port": (["containers", "0", "ports", "0", "hostPort"], 80),
    "privileged": (["containers", "0", "securityContext", "privileged"], True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_check_finds_what_is_not_restricted(change: str) -> None:
    path, value = CHANGES[change]
    template = deepcopy(dict(pod_templates(manifests(changed("cpu-kind"))))["Deployment/quartet-actor"])
    place: Any = template["spec"]
    for key in path[:-1]:
        place = place[int(key)] if isinstance(place, list) else place[key]
    place[int(path[-1]) if isinstance(place, list) else path[-1]] = value
    assert violations(template) != []
