"""The chart refuses unknown values with their path, and values that contradict each other."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from typing import Any

import helm_python
import pytest

from tests.every_case import every_case
from tests.helm.rendering import CHART, Values, changed, chart, example, manifests, texts

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))

TYPOS = {
    "redis__persistance": ("/redis", "persistance"),
    "imagePullSecret": ("at ''", "imagePullSecret"),
    "components__acter": ("/components", "acter"),
    "components__actor__replcas": ("/components/actor", "replcas"),
    "components__actor__image__tga": ("/components/actor/image", "tga"),
    "components__actor__autoscaling": ("/components/actor", "autoscaling"),
    "components__gateway__gpus": ("/components/gateway", "gpus"),
    "components__critic__resources__limit": ("/components/critic/resources", "limit"),
    "components__critic__probes__startup__failureTreshold": ("/components/critic/probes/startup", "failureTreshold"),
    "components__reward__autoscaling__keda__server": ("/components/reward/autoscaling/keda", "server"),
    "defaults__nodeselector": ("/defaults", "nodeselector"),
    "security__tls__enable": ("/security/tls", "enable"),
    "security__tls__existingSecrets__acter": ("/security/tls/existingSecrets", "acter"),
    "security__tls__certManager__issuerRef__nmae": ("/security/tls/certManager/issuerRef", "nmae"),
    "storage__runs__claim": ("/storage/runs", "claim"),
    "networkPolicy__prometheus__namespaces": ("/networkPolicy/prometheus", "namespaces"),
    "monitoring__serviceMonitor__intervall": ("/monitoring/serviceMonitor", "intervall"),
    "gateway__tokens__secret": ("/gateway/tokens", "secret"),
    "workerGroups__leaderWorkerSets": ("/workerGroups", "leaderWorkerSets"),
    "config__algoritm": ("/config", "algoritm"),
}
INVALID = {
    "components__actor__replicas": (2, "components.actor.replicas: 2; expected 1: only reward, reference"),
    "components__actor__gpus": ("all", "/components/actor/gpus"),
    "components__actor__nodes": (0, "/components/actor/nodes"),
    "workerGroups__port": (80, "/workerGroups/port"),
    "components__critic__roles": (["critic", "judge"], "/components/critic/roles/1"),
    "components__reward__autoscaling__kind": ("vpa", "/components/reward/autoscaling/kind"),
    "components__actor__tolerations": ([{"key": "a", "operater": "Exists"}], "/components/actor/tolerations/0"),
    "components__actor__extraVolumes": (
        [{"name": "host", "hostPath": {"path": "/"}}],
        "/components/actor/extraVolumes/0",
    ),
    "components__actor__drainSeconds": (-1, "/components/actor/drainSeconds"),
    "storage__runs__accessModes": (["RWX"], "/storage/runs/accessModes/0"),
    "security__tls__source": ("self", "/security/tls/source"),
    "config__run__name": ("my run", 'config.run.name: "my run"; expected at most 64 letters'),
}


def refusal(values: dict[str, Any]) -> str:
    """Return the error of Helm for values that it must refuse."""
    with pytest.raises(helm_python.HelmError) as error:
        texts(values)
    return str(error.value)


@every_case("path", TYPOS)
def test_a_typo_is_refused_with_its_path(path: str) -> None:
    path_in_error, word = TYPOS[path]
    message = refusal(changed("cpu-kind", **{path: {}}))
    assert path_in_error in message
    assert word in message


@pytest.mark.parametrize("path", INVALID)
def test_an_invalid_value_is_refused_with_its_path(path: str) -> None:
    value, path_in_error = INVALID[path]
    assert path_in_error in refusal(changed("cpu-kind", **{path: value}))


def test_values_without_a_config_are_refused() -> None:
    message = refusal({})
    assert "/config" in message
    assert "actor" in message


def test_only_kubernetes_objects_accept_unknown_keys() -> None:
    open_objects = {
        path
        for path, node in _nodes(SCHEMA)
        if node.get("type") == "object" and node.get("additionalProperties", True) is True
    }
    # Kubernetes itself checks the content of these objects.
    kubernetes = {path for path in open_objects if path.startswith(("/definitions/affinity", "/definitions/extra"))}
    kubernetes |= {
        path for path in open_objects if path.startswith(("/definitions/environment", "/definitions/topology"))
    }
    # Keyword arguments of the user's own code, which the config cannot know.
    arguments = {
        path for path in open_objects if path.startswith("/properties/config/") and path.endswith("/arguments")
    }
    # What chat templates get, which each template defines.
    data = "/properties/config/properties/data/properties"
    templates = {f"{data}/tools/items", f"{data}/documents/items", f"{data}/chat_template_kwargs"}
    assert open_objects - kubernetes - arguments - templates == {"/properties/global"}


def test_the_readme_documents_every_value() -> None:
    readme = (CHART / "README.md").read_text(encoding="utf-8")
    # A cell contains `a.b` and then `.c` for `a.c`, or `a` and its keys beside it.
    words = {part for code in re.findall(r"`([^`\n]+)`", readme) for part in re.split(r"[.: ]+", code)}
    for path, node in _nodes(SCHEMA["properties"]):
        # The config has a separate page; NAME and PROCESS stand for components and processes.
        documented_elsewhere = path.startswith("/config") or path.endswith(
            ("/components", "/existingSecrets", "/issuerRef")
        )
        for key in () if documented_elsewhere else node.get("properties", {}):
            assert key in words, f"{path}: {key}"
    for key in SCHEMA["definitions"]["claim"]["properties"]:
        assert key in words


def test_the_defaults_are_valid() -> None:
    values = deepcopy(chart().values)
    values["config"] = example("cpu-kind")["config"]
    values["defaults"]["resourcesPreset"] = "tiny"
    assert manifests(values)


def test_a_missing_role_is_named() -> None:
    assert "no enabled component has the role reward" in refusal(
        changed("single-node-4-gpus", components__reward={"enabled": False})
    )


def test_a_duplicate_role_is_named() -> None:
    message = refusal(changed("single-node-4-gpus", components__critic__roles=["critic", "reward"]))
    assert "components.reward.roles: reward is also in components.critic" in message


def test_a_pod_with_the_critic_has_one_replica() -> None:
    assert "components.critic.replicas: 2" in refusal(changed("cpu-kind", components__critic__replicas=2))


def test_a_pod_with_the_critic_cannot_be_autoscaled() -> None:
    values = changed("cpu-kind", components__critic__enabled=False)
    values["components"]["reward"] = {"roles": ["reward", "critic"], "autoscaling": {"kind": "hpa"}}
    assert "components.reward.autoscaling" in refusal(values)


@pytest.mark.parametrize(
    ("component", "text"),
    [
        (
            {"roles": ["critic", "reward"], "gpus": 2},
            "components.critic.roles: critic, reward, with 2 ranks; expected one role",
        ),
        (
            {"roles": ["critic", "reward"], "nodes": 3},
            "components.critic.roles: critic, reward, with 3 ranks; expected one role",
        ),
    ],
)
def test_a_role_of_several_ranks_needs_a_separate_pod(component: Values, text: str) -> None:
    assert text in refusal(changed("cpu-kind", components__critic=component))


def test_a_role_of_several_nodes_has_one_replica() -> None:
    message = refusal(changed("two-node-actor", components__reference={"nodes": 2, "replicas": 2}))
    assert "components.reference.replicas: 2, and nodes: 2; expected one of them to be 1" in message
    message = refusal(changed("node-8-gpus", components__reward__nodes=2))
    assert "components.reward.autoscaling: a role of several nodes cannot be scaled" in message


@pytest.mark.parametrize("kind", ["hpa", "keda"])
def test_min_replicas_above_max_replicas_is_refused(kind: str) -> None:
    message = refusal(changed("node-8-gpus", components__reward__autoscaling={"kind": kind, "minReplicas": 5}))
    assert "components.reward.autoscaling.minReplicas: 5, and components.reward.autoscaling.maxReplicas: 4" in message


def test_bounds_of_disabled_autoscaling_are_ignored() -> None:
    assert manifests(changed("single-node-4-gpus", components__reward__autoscaling={"minReplicas": 5}))


@pytest.mark.parametrize("threshold", ["", "8", "0.5", "2.50"])
def test_a_positive_threshold_is_accepted(threshold: str) -> None:
    assert manifests(changed("node-8-gpus", components__reward__autoscaling__keda__threshold=threshold))


@pytest.mark.parametrize("threshold", ["0", "0.0", "-1", "many", "1.", " 8", "8s"])
def test_an_invalid_threshold_is_refused(threshold: str) -> None:
    message = refusal(changed("node-8-gpus", components__reward__autoscaling__keda__threshold=threshold))
    assert "components.reward.autoscaling.keda.threshold: " in message


@pytest.mark.parametrize("host", ["quartet", "rlhf.example.org", "a-1.2b.example"])
def test_a_host_name_is_accepted_for_the_ingress(host: str) -> None:
    assert manifests(changed("cpu-kind", ingress={"enabled": True, "host": host}))


@pytest.mark.parametrize(
    "host",
    [
        "https://rlhf.example.org",
        "rlhf.example.org:8080",
        "RLHF.example.org",
        "*.example.org",
        "a_b.example",
        "-a.example",
        "a..example",
        "a.example.",
        "10.0.0.1",
        f"{'a' * 64}.example",
        "a." * 126 + "aa",
    ],
)
def test_an_invalid_host_name_is_refused_for_the_ingress(host: str) -> None:
    assert "ingress.host: " in refusal(changed("cpu-kind", ingress={"enabled": True, "host": host}))


def certificates(duration: str, renew_before: str) -> Values:
    """Return values with these times of cert-manager certificates."""
    times = {"duration": duration, "renewBefore": renew_before}
    return changed("cpu-kind", security__tls={"source": "cert-manager", "certManager": times})


@pytest.mark.parametrize("times", [("720h", "240h"), ("60m", "3599s"), ("1h30m", "1h29m")])
def test_a_renewal_time_below_the_duration_is_accepted(times: tuple[str, str]) -> None:
    assert manifests(certificates(*times))


@pytest.mark.parametrize("times", [("720h", "720h"), ("720h", "43201m"), ("90m", "1h31m")])
def test_a_renewal_time_above_the_duration_is_refused(times: tuple[str, str]) -> None:
    prefix = "security.tls.certManager"
    assert f"{prefix}.renewBefore: {times[1]}, and {prefix}.duration: {times[0]}" in refusal(certificates(*times))


def test_certificate_times_without_cert_manager_are_ignored() -> None:
    assert manifests(changed("cpu-kind", security__tls__certManager={"duration": "1h", "renewBefore": "2h"}))


def test_plaintext_requires_allow_plaintext() -> None:
    assert "security.allowPlaintext true" in refusal(changed("cpu-kind", security__tls__enabled=False))


def test_a_password_in_an_address_is_refused() -> None:
    message = refusal(changed("two-node-actor", redis__external__url="rediss://quartet:secret@redis.example:6379/0"))
    assert "redis.external.url: contains a password" in message
    assert "secret@" not in message


@every_case(
    "url",
    [
        "valkey://quartet:sesame@redis.example:6379/0",  # pragma: allowlist secret - an example
        "rediss://quartet:open/sesame@redis.example:6379/0",
        "rediss://redis.example:6379/0?password=sesame",
        "rediss://q@redis.example:6379/0?ssl_password=sesame",
        "rediss://redis.example:6379/0?PASSWORD=sesame",
        "rediss://redis.example:6379/0?db=1&%70assword=sesame",
        "rediss://redis.example:6379/0#password=sesame",
        "rediss://me@mail:sesame@redis.example/0",  # pragma: allowlist secret - an example
        "rediss://quartet:sesame",
        "rediss://quartet:12-sesame/0",
        "rediss://[::1]:sesame/0",
        "rediss://redis.example/sesame",
        "rediss:///sesame",
    ],
)
def test_a_refused_redis_address_is_not_quoted(url: str) -> None:
    message = refusal(changed("two-node-actor", redis__external__url=url))
    assert "redis.external.url: " in message
    assert "sesame" not in message


@pytest.mark.parametrize(
    "url",
    [
        "redis://redis.example",
        "rediss://quartet@[::1]:6379/0",
        "rediss://quartet@redis.example:6379/0?ssl_ca_certs=/home/a@b/ca.crt&timeout=3",
    ],
)
def test_a_redis_address_without_a_password_is_accepted(url: str) -> None:
    assert manifests(changed("two-node-actor", redis__external__url=url))


def test_a_missing_certificate_secret_is_named() -> None:
    values = example("two-node-actor")
    del values["security"]["tls"]["existingSecrets"]["gateway"]
    assert "security.tls.existingSecrets.gateway: missing" in refusal(values)


def _nodes(node: Any, path: str = "") -> Any:
    if isinstance(node, dict):
        if "type" in node or "properties" in node:
            yield path, node
        for key, value in node.items():
            yield from _nodes(value, f"{path}/{key}")
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _nodes(value, f"{path}/{index}")
