"""The chart refuses unknown values with their path, and values that contradict each other."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from typing import Any

import pytest

from tests.every_case import every_case
from tests.helm.rendering import CHART, Values, changed, chart, example, manifests, refusal, schema_problems

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))

# Each value with the path and the text of the problem that the schema reports.
UNKNOWN_KEYS: dict[str, tuple[Any, str, str]] = {
    path.replace("/", "__"): ({}, f"/{path.rpartition('/')[0]}".rstrip("/"), f"'{path.rpartition('/')[2]}'")
    for path in (
        "redis/persistance",
        "imagePullSecret",
        "components/acter",
        "components/actor/replcas",
        "components/actor/image/tga",
        "components/actor/autoscaling",
        "components/gateway/gpus",
        "components/critic/resources/limit",
        "components/critic/probes/startup/failureTreshold",
        "components/reward/autoscaling/keda/server",
        "defaults/nodeselector",
        "security/tls/enable",
        "security/tls/existingSecrets/acter",
        "security/tls/certManager/issuerRef/nmae",
        "storage/runs/claim",
        "networkPolicy/prometheus/namespaces",
        "monitoring/serviceMonitor/intervall",
        "gateway/tokens/secret",
        "workerGroups/leaderWorkerSets",
        "config/algoritm",
        "config/run/stesp",
        "config/algorithm/kl_coeficient",
        "config/guards/kl_runaway/abov",
    )
}
WRONG_TYPES: dict[str, tuple[Any, str, str]] = {
    "components__actor__gpus": ("2", "/components/actor/gpus", "got string, want integer"),
    "components__reference__gpus": ("all", "/components/reference/gpus", "got string, want integer"),
    "components__actor__nodes": (0, "/components/actor/nodes", "minimum: got 0, want 1"),
    "components__actor__env": ({"A": "b"}, "/components/actor/env", "got object, want array"),
    "components__actor__labels": ({"a": 1}, "/components/actor/labels/a", "got number, want string"),
    "components__actor__extraVolumes": (
        [{"name": "h", "hostPath": {"path": "/"}}],
        "/components/actor/extraVolumes/0",
        "'hostPath' not allowed",
    ),
    "components__actor__tolerations": (
        [{"key": "a", "operater": "Exists"}],
        "/components/actor/tolerations/0",
        "'operater' not allowed",
    ),
    "components__actor__drainSeconds": (-1, "/components/actor/drainSeconds", "minimum: got -1, want 0"),
    "components__critic__roles": (["critic", "judge"], "/components/critic/roles/1", "value must be one of"),
    "components__reward__autoscaling__kind": (
        "vpa",
        "/components/reward/autoscaling/kind",
        "one of 'none', 'hpa', 'keda'",
    ),
    # There is no metric of generators for an HPA.
    "components__generator__autoscaling": ({"kind": "hpa"}, "/components/generator/autoscaling/kind", "value must be"),
    "workerGroups__port": (80, "/workerGroups/port", "minimum: got 80"),
    "defaults__resourcesPreset": ("8b", "/defaults/resourcesPreset", "'0.5b', '1.5b', '3b', '7b'"),
    "scheduling__colocation": ({"mode": "sometimes"}, "/scheduling/colocation/mode", "value must be one of"),
    "scheduling__gang": ({"kind": "sometimes"}, "/scheduling/gang/kind", "value must be one of"),
    "storage__runs__accessModes": (
        ["RWX"],
        "/storage/runs/accessModes/0",
        "one of 'ReadWriteOnce', 'ReadOnlyMany', 'ReadWriteMany'",
    ),
    "security__tls__source": ("self", "/security/tls/source", "value must be one of"),
    "loader__enabled": ("true", "/loader/enabled", "got string, want boolean"),
    "components__generator__nodeDirectory": (
        "run/quartet",
        "/components/generator/nodeDirectory",
        "does not match pattern '^(/.+)?$'",
    ),
    "imagePullSecrets": (["a"], "/imagePullSecrets/0", "want object"),
    "image__pullPolicy": ("always", "/image/pullPolicy", "one of 'Always', 'IfNotPresent', 'Never'"),
    "downloads__sources": (["hf://a/b"], "/downloads/sources", "want object"),
    "config__algorithm__kl_coefficient": ("0.1", "/config/algorithm/kl_coefficient", "got string, want number"),
    "config__algorithm__clip_ratio": ("0.2", "/config/algorithm/clip_ratio", "got string, want null or number"),
    "config__algorithm__estimator": ("ppo", "/config/algorithm/estimator", "does not match pattern '^(gae|reinforce|"),
    "config__algorithm__gamma": (1.5, "/config/algorithm/gamma", "maximum: got 1.5, want 1"),
    "config__algorithm__dual_clip": (1, "/config/algorithm/dual_clip", "exclusiveMinimum: got 1, want 1"),
    "config__run__steps": (0, "/config/run/steps", "minimum: got 0, want 1"),
    "config__actor__learning_rate": (-1, "/config/actor/learning_rate", "exclusiveMinimum: got -1, want 0"),
    "config__critic__optimizer": ({"betas": [0.9]}, "/config/critic/optimizer/betas", "minItems: got 1, want 2"),
    "config__reward": (
        {"source": "ensemble", "parts": [{"name": "a", "wait": 1}]},
        "/config/reward/parts/0",
        "additional properties 'wait'",
    ),
}
MISSING: dict[str, tuple[Any, str, str]] = {
    "config__reward": (None, "/config/reward", "got null, want object"),
    "config__critic": (None, "/config/critic", "got null, want object"),
    "config__actor": ({"lora": {"rank": 8}}, "/config/actor", "missing property 'model'"),
}


@every_case("wrong", [UNKNOWN_KEYS, WRONG_TYPES, MISSING])
def test_the_schema_reports_the_path_of_every_wrong_value_at_once(wrong: dict[str, tuple[Any, str, str]]) -> None:
    problems = schema_problems(changed("cpu-kind", **{path: value for path, (value, _, _) in wrong.items()}))
    assert problems.keys() == {where for _, where, _ in wrong.values()}
    for _, where, text in wrong.values():
        assert text in problems[where]


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
