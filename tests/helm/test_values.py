"""The chart refuses unknown values, naming the path of each, and values that contradict each other."""

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
    "config__algoritm": ("/config", "algoritm"),
}
WRONG = {
    "components__actor__replicas": (2, "/components/actor/replicas"),
    "components__actor__gpus": ("all", "/components/actor/gpus"),
    "components__critic__roles": (["critic", "judge"], "/components/critic/roles/1"),
    "components__reward__autoscaling__kind": ("vpa", "/components/reward/autoscaling/kind"),
    "components__actor__tolerations": ([{"key": "a", "operater": "Exists"}], "/components/actor/tolerations/0"),
    "components__actor__extraVolumes": (
        [{"name": "host", "hostPath": {"path": "/"}}],
        "/components/actor/extraVolumes/0",
    ),
    "components__actor__drainSeconds": (-1, "/components/actor/drainSeconds"),
    "image__digest": ("sha256:abc", "/image/digest"),
    "redis__maxmemory": ("6 GB", "/redis/maxmemory"),
    "storage__runs__accessModes": (["RWX"], "/storage/runs/accessModes/0"),
    "security__tls__source": ("self", "/security/tls/source"),
    "config__run__name": ("my run", "/config/run/name"),
}


def refusal(values: dict[str, Any]) -> str:
    """Return what Helm says of values that it must refuse."""
    with pytest.raises(helm_python.HelmError) as error:
        texts(values)
    return str(error.value)


@every_case("path", TYPOS)
def test_a_typo_is_refused_with_its_path(path: str) -> None:
    place, word = TYPOS[path]
    said = refusal(changed("cpu-kind", **{path: {}}))
    assert place in said
    assert word in said


@pytest.mark.parametrize("path", WRONG)
def test_a_wrong_value_is_refused_with_its_path(path: str) -> None:
    value, place = WRONG[path]
    assert place in refusal(changed("cpu-kind", **{path: value}))


def test_without_a_run_there_is_nothing_to_install() -> None:
    said = refusal({})
    assert "/config" in said
    assert "actor" in said


def test_the_schema_knows_every_value_and_leaves_no_object_open_but_those_of_others() -> None:
    open_objects = {
        path
        for path, node in _nodes(SCHEMA)
        if node.get("type") == "object" and node.get("additionalProperties", True) is True
    }
    # What is inside these, Kubernetes itself checks.
    kubernetes = {path for path in open_objects if path.startswith(("/definitions/affinity", "/definitions/extra"))}
    kubernetes |= {
        path for path in open_objects if path.startswith(("/definitions/environment", "/definitions/topology"))
    }
    assert open_objects - kubernetes == {"/properties/global"}


def test_every_value_is_in_the_readme() -> None:
    readme = (CHART / "README.md").read_text(encoding="utf-8")
    # `a.b` and, after it in the same cell, `.c` for `a.c`; or `a`, with its keys named beside it.
    words = {part for code in re.findall(r"`([^`\n]+)`", readme) for part in re.split(r"[.: ]+", code)}
    for path, node in _nodes(SCHEMA["properties"]):
        # The config has a separate page; NAME and PROCESS stand for components and processes.
        told_elsewhere = path.startswith("/config") or path.endswith(("/components", "/existingSecrets", "/issuerRef"))
        for key in () if told_elsewhere else node.get("properties", {}):
            assert key in words, f"{path}: {key}"
    for key in [*SCHEMA["definitions"]["multiNode"]["properties"], *SCHEMA["definitions"]["claim"]["properties"]]:
        assert key in words


def test_every_default_is_taken() -> None:
    values = deepcopy(chart().values)
    values["config"] = example("cpu-kind")["config"]
    assert manifests(values)


def test_a_role_that_is_missing_is_named() -> None:
    assert "no enabled component has the role reward" in refusal(
        changed("single-node-4-gpus", components__reward={"enabled": False})
    )


def test_a_role_that_is_twice_there_is_named() -> None:
    said = refusal(changed("single-node-4-gpus", components__critic__roles=["critic", "reward"]))
    assert "components.reward.roles: reward is also in components.critic" in said


def test_a_pod_that_holds_the_critic_is_not_multiplied() -> None:
    assert "components.critic.replicas: 2" in refusal(changed("cpu-kind", components__critic__replicas=2))


def test_a_pod_that_holds_the_critic_is_not_scaled() -> None:
    values = changed("cpu-kind", components__critic__enabled=False)
    values["components"]["reward"] = {"roles": ["reward", "critic"], "autoscaling": {"kind": "hpa"}}
    assert "components.reward.autoscaling" in refusal(values)


@pytest.mark.parametrize("kind", ["hpa", "keda"])
def test_a_scaling_whose_fewest_are_more_than_its_most_is_refused(kind: str) -> None:
    said = refusal(changed("node-8-gpus", components__reward__autoscaling={"kind": kind, "minReplicas": 5}))
    assert "components.reward.autoscaling.minReplicas: 5, and components.reward.autoscaling.maxReplicas: 4" in said


def test_the_bounds_of_a_scaling_that_is_off_do_not_matter() -> None:
    assert manifests(changed("single-node-4-gpus", components__reward__autoscaling={"minReplicas": 5}))


@pytest.mark.parametrize("threshold", ["", "8", "0.5", "2.50"])
def test_a_threshold_above_nothing_is_taken(threshold: str) -> None:
    assert manifests(changed("node-8-gpus", components__reward__autoscaling__keda__threshold=threshold))


@pytest.mark.parametrize("threshold", ["0", "0.0", "-1", "many", "1.", " 8", "8s"])
def test_a_threshold_that_is_no_positive_number_is_refused(threshold: str) -> None:
    said = refusal(changed("node-8-gpus", components__reward__autoscaling__keda__threshold=threshold))
    assert "/components/reward/autoscaling/keda/threshold" in said


@pytest.mark.parametrize("host", ["quartet", "rlhf.example.org", "a-1.2b.example"])
def test_a_name_is_taken_for_the_ingress(host: str) -> None:
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
def test_what_is_no_name_is_refused_for_the_ingress(host: str) -> None:
    assert "/ingress/host" in refusal(changed("cpu-kind", ingress={"enabled": True, "host": host}))


def certificates(duration: str, renew_before: str) -> Values:
    """Values with certificates of cert-manager's of these times."""
    times = {"duration": duration, "renewBefore": renew_before}
    return changed("cpu-kind", security__tls={"source": "cert-manager", "certManager": times})


@pytest.mark.parametrize("times", [("720h", "240h"), ("60m", "3599s"), ("1h30m", "1h29m")])
def test_a_certificate_that_is_renewed_before_its_end_is_taken(times: tuple[str, str]) -> None:
    assert manifests(certificates(*times))


@pytest.mark.parametrize("times", [("720h", "720h"), ("720h", "43201m"), ("90m", "1h31m")])
def test_a_certificate_that_would_always_be_renewed_is_refused(times: tuple[str, str]) -> None:
    where = "security.tls.certManager"
    assert f"{where}.renewBefore: {times[1]}, and {where}.duration: {times[0]}" in refusal(certificates(*times))


def test_times_of_certificates_that_nobody_makes_do_not_matter() -> None:
    assert manifests(changed("cpu-kind", security__tls__certManager={"duration": "1h", "renewBefore": "2h"}))


def test_plaintext_is_refused_unless_it_is_said_in_words() -> None:
    assert "security.allowPlaintext true" in refusal(changed("cpu-kind", security__tls__enabled=False))


def test_a_password_in_an_address_is_refused() -> None:
    said = refusal(changed("two-node-actor", redis__external__url="rediss://quartet:secret@redis.example:6379/0"))
    assert "redis.external.url: contains a password" in said
    assert "secret@" not in said


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
def test_an_address_that_is_refused_is_not_quoted(url: str) -> None:
    said = refusal(changed("two-node-actor", redis__external__url=url))
    assert "redis.external.url: " in said
    assert "sesame" not in said


@pytest.mark.parametrize(
    "url",
    [
        "redis://redis.example",
        "rediss://quartet@[::1]:6379/0",
        "rediss://quartet@redis.example:6379/0?ssl_ca_certs=/home/a@b/ca.crt&timeout=3",
    ],
)
def test_an_address_without_a_password_is_taken(url: str) -> None:
    assert manifests(changed("two-node-actor", redis__external__url=url))


def test_a_certificate_that_is_missing_is_named() -> None:
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
