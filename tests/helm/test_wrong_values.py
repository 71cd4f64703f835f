"""`helm template` with a wrong value gives one message: the value, what is expected and, if that is not obvious, what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import helm_python
import pytest
import yaml

from tests.every_case import every_case
from tests.helm.rendering import (
    CHART,
    NAMESPACE,
    RELEASE,
    Values,
    changed,
    chart,
    checks_for,
    checks_only,
    manifests,
    objects,
    of_kind,
    refusal,
)

DIGEST = f"sha256:{'0' * 64}"

WRONG: dict[str, tuple[str, Values, str, str]] = {
    "two actors": ("cpu-kind", {"components__actor__replicas": 2}, "components.actor.replicas: 2", "expected 1: only"),
    "memory in gigabytes": (
        "cpu-kind",
        {"components__actor__resources": {"limits": {"memory": "8 GB"}}},
        "components.actor.resources.limits.memory: ",
        '"8 GB"; expected a number with a unit of Kubernetes, such as 500m, 2Gi',
    ),
    "GPUs as a resource": (
        "cpu-kind",
        {"components__actor__resources": {"limits": {"gpu": 1}}},
        "components.actor.resources.limits: ",
        "for GPUs, set gpus of the component",
    ),
    "a size in gigabytes": (
        "cpu-kind",
        {"storage__claim__size": "500GB"},
        "storage.claim.size: ",
        '"500GB"; expected a positive number with a unit of Kubernetes',
    ),
    "the size of a folder": ("cpu-kind", {"storage__runs__size": "1T B"}, "storage.runs.size: ", "1.5Ti; correct it"),
    "the size of Redis": (
        "cpu-kind",
        {"redis__persistence__size": "big"},
        "redis.persistence.size: ",
        '"big"; expected',
    ),
    "a size of /dev/shm": (
        "cpu-kind",
        {"components__critic__sharedMemory": "8gb"},
        "components.critic.sharedMemory: ",
        '"8gb"; expected',
    ),
    "the unit of Redis": ("cpu-kind", {"redis__maxmemory": "6Gi"}, "redis.maxmemory: ", "such as 512mb or 6gb"),
    "a short digest": ("cpu-kind", {"image__digest": "abc"}, "image.digest: ", "sha256: and 64 hexadecimal digits"),
    "a name in capitals": ("cpu-kind", {"fullnameOverride": "My_Run"}, "fullnameOverride: ", "lower case letters"),
    "an address without prefix": (
        "two-node-actor",
        {"redis__external__cidrs": ["10.0.0.1"]},
        "redis.external.cidrs: ",
        '"10.0.0.1"; expected an address and the length of its prefix',
    ),
    "an interval without unit": (
        "cpu-kind",
        {"monitoring__serviceMonitor__interval": "10"},
        "monitoring.serviceMonitor.interval: ",
        "such as 10s",
    ),
    "a URL for a host": (
        "cpu-kind",
        {"ingress": {"enabled": True, "host": "https://a.example"}},
        "ingress.host: ",
        "without scheme, port and wildcard",
    ),
    "a key of a Secret with a space": (
        "cpu-kind",
        {"gateway": {"tokens": {"operatorKey": "a b"}}},
        "gateway.tokens.operatorKey: ",
        "a key of a Secret",
    ),
    "a target in words": (
        "cpu-kind",
        {"components__reward": {"autoscaling": {"kind": "hpa", "hpa": {"metric": "work", "target": "two"}}}},
        "components.reward.autoscaling.hpa.target: ",
        '"two"; expected a positive number',
    ),
    "a topology with a space": (
        "cpu-kind",
        {"scheduling": {"colocation": {"mode": "preferred", "topologyKey": "my zone"}}},
        "scheduling.colocation.topologyKey: ",
        "the key of a label",
    ),
    "a spread over a topology with a space": (
        "cpu-kind",
        {
            "defaults__topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "a b", "whenUnsatisfiable": "DoNotSchedule"}
            ]
        },
        "defaults.topologySpreadConstraints.topologyKey: ",
        "the key of a label",
    ),
    "a key of an annotation with a space": (
        "cpu-kind",
        {"components__actor__annotations": {"a b": "c"}},
        "components.actor.annotations: ",
        "the key of an annotation",
    ),
    "a key of a label with two slashes": (
        "cpu-kind",
        {"components__actor__labels": {"a/b/c": "d"}},
        "components.actor.labels: ",
        "the key of a label",
    ),
    "a label of a node with a space": (
        "cpu-kind",
        {"defaults__nodeSelector": {"disk": "fast ssd"}},
        "defaults.nodeSelector.disk: ",
        "at most 63 letters",
    ),
    "a volume with a dot": (
        "cpu-kind",
        {"components__actor__extraVolumes": [{"name": "my.volume", "emptyDir": {}}]},
        "components.actor.extraVolumes.name: ",
        "lower case letters, digits and -",
    ),
    "an address of too many colons": (
        "two-node-actor",
        {"redis__external__cidrs": ["1:::2/64"]},
        "redis.external.cidrs: ",
        "expected an address",
    ),
    "an address with a leading zero": (
        "cpu-kind",
        {"components__reward__extraEgress": [{"to": [{"ipBlock": {"cidr": "10.01.0.0/16"}}]}]},
        "components.reward.extraEgress.to.ipBlock.cidr: ",
        "expected an address",
    ),
    "a toleration of any value": (
        "cpu-kind",
        {"defaults__tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]},
        "defaults.tolerations: operator Exists",
        "remove value, or set operator Equal",
    ),
    "a toleration of nothing": (
        "cpu-kind",
        {"defaults__tolerations": [{"effect": "NoSchedule"}]},
        "defaults.tolerations: no key",
        "operator Exists for all taints",
    ),
    "generators without effect": (
        "cpu-kind",
        {"components__generator": {"replicas": 4}},
        "components.generator.replicas: 4",
        "set enabled true",
    ),
    "turns without an environment": (
        "cpu-kind",
        {"config__rollout__max_turns": 4},
        "config.environment.class_name: missing",
        "name its class, or set max_turns 0",
    ),
    "a name with a space": ("cpu-kind", {"config__run__name": "my run"}, "config.run.name: ", "such as my-run-1"),
    "an empty size": (
        "cpu-kind",
        {"storage__claim__size": ""},
        "storage.claim.size: ",
        '""; expected a positive number',
    ),
    "an empty size of Redis": (
        "cpu-kind",
        {"redis__persistence__size": ""},
        "redis.persistence.size: ",
        '""; expected',
    ),
    "an empty size of /tmp": (
        "cpu-kind",
        {"defaults__temporarySpace": ""},
        "defaults.temporarySpace: ",
        '""; expected',
    ),
    "no memory for Redis": ("cpu-kind", {"redis__maxmemory": "0"}, "redis.maxmemory: ", "expected a positive number"),
    "a size of zero": ("cpu-kind", {"storage__claim__size": "0"}, "storage.claim.size: ", "expected a positive number"),
    "a folder above the volume": (
        "cpu-kind",
        {"storage__models": {"existingClaim": "a", "subPath": "../x"}},
        "storage.models.subPath: ",
        "without ..",
    ),
    "a class with a space": (
        "cpu-kind",
        {"storage__claim__storageClassName": "My Class"},
        "storage.claim.storageClassName: ",
        "kubectl get storageclass",
    ),
    "a URL for a registry": (
        "cpu-kind",
        {"imageRegistry": "https://mirror.example"},
        "imageRegistry: ",
        "a host without a scheme, such as registry.example.com",
    ),
    "a registry with a space": (
        "cpu-kind",
        {"image__registry": "Mirror Example"},
        "image.registry: ",
        "a host without",
    ),
    "a tag with a space": ("cpu-kind", {"image__tag": "a b"}, "image.tag: ", "such as 0.1.0"),
    "a repository in capitals": ("cpu-kind", {"image__repository": "ML/Quartet"}, "image.repository: ", "lower case"),
    "an empty repository": (
        "cpu-kind",
        {"redis__image": {"repository": ""}},
        "redis.image.repository: ",
        '""; expected',
    ),
    "a host in the repository": (
        "cpu-kind",
        {"imageRegistry": "mirror.example", "image__repository": "registry.example/ml/quartet"},
        'image.repository: "registry.example/ml/quartet", and the registry mirror.example',
        "set image.registry to the host",
    ),
    "a queue with a space": (
        "cpu-kind",
        {"scheduling": {"gang": {"kind": "kueue", "queue": "a b"}}},
        "scheduling.gang.queue: ",
        "at most 63 lower case letters",
    ),
    "a class of priority with a space": (
        "cpu-kind",
        {"components__actor__priorityClassName": "Not Valid"},
        "components.actor.priorityClassName: ",
        "the name of an object of Kubernetes",
    ),
    "a device without a domain": (
        "cpu-kind",
        {"components__actor__gpuResource": "gpu"},
        "components.actor.gpuResource: ",
        "such as nvidia.com/gpu",
    ),
    "an address that does not exist": (
        "two-node-actor",
        {"redis__external__cidrs": ["999.1.1.1/99"]},
        "redis.external.cidrs: ",
        "expected an address and the length of its prefix",
    ),
    "an address of DNS that does not exist": (
        "cpu-kind",
        {"networkPolicy": {"dns": {"cidrs": ["10.0.0.1/33"]}}},
        "networkPolicy.dns.cidrs: ",
        "expected an address",
    ),
}


def check_message(base: str, changes: Values, where: str, expected: str) -> None:
    """Check that the example ``base`` with these changes is refused with one message, which has both texts."""
    message = refusal(changed(base, **changes))
    assert where in message
    assert expected in message
    assert len(message.strip().splitlines()) == 1, message


@every_case("name", WRONG)
def test_a_wrong_value_gives_one_message_with_its_path_and_what_is_expected(name: str) -> None:
    check_message(*WRONG[name])


@every_case("release", ["my.run", "7b", "1e3", "123"])
def test_a_release_name_that_services_cannot_have_is_refused(release: str) -> None:
    with pytest.raises(helm_python.HelmError, match=f'release name "{release}": .* or set fullnameOverride'):
        checks_for(changed("cpu-kind")).render(changed("cpu-kind"), name=release, namespace=NAMESPACE)


@every_case("release", ["my.run", "1e3"])
def test_the_release_label_is_a_text_even_if_it_looks_like_a_number(release: str) -> None:
    rendered = chart().render(changed("cpu-kind", fullnameOverride="my-run"), name=release, namespace=NAMESPACE)
    assert {each["metadata"]["labels"]["app.kubernetes.io/instance"] for each in objects(rendered)} == {release}


def test_texts_that_look_like_numbers_stay_texts() -> None:
    values = changed(
        "cpu-kind",
        storage__models={"existingClaim": "123", "subPath": "2024"},
        serviceAccount={"name": "123"},
        scheduling={"schedulerName": "123", "gang": {"kind": "kueue", "queue": "true"}},
        components__actor={"priorityClassName": "1000", "runtimeClassName": "true"},
        nameOverride="true",
        fullnameOverride="true",
    )
    actor = of_kind(manifests(values), "Deployment")["true-actor"]["spec"]["template"]
    pod = actor["spec"]
    assert (pod["priorityClassName"], pod["runtimeClassName"]) == ("1000", "true")
    assert (pod["schedulerName"], pod["serviceAccountName"]) == ("123", "123")
    assert actor["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "true"
    assert actor["metadata"]["labels"]["app.kubernetes.io/name"] == "true"
    claims = {
        volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume
    }
    assert "123" in claims
    mounts = {mount["mountPath"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts["/quartet/models"]["subPath"] == "2024"


@every_case(
    "values, key",
    [
        ({"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "a"}}}]}, "secretKeyRef"),
        ({"env": [{"name": "A", "valueFrom": {"fieldRef": {}}}]}, "fieldRef"),
        ({"affinity": {"nodeAffinity": {"required": {}}}}, "nodeAffinity"),
        (
            {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"labelSelector": {}}]}}},
            "podAffinity",
        ),
    ],
)
def test_fields_that_kubernetes_does_not_know_are_refused_by_the_schema(values: dict[str, Any], key: str) -> None:
    assert f"/components/actor/{'env/0/valueFrom/' if 'env' in values else 'affinity/'}{key}" in refusal(
        changed("cpu-kind", components__actor=values)
    )


def test_a_long_name_of_a_leader_worker_set_is_refused() -> None:
    message = refusal(changed("two-node-actor", fullnameOverride="a" * 39, workerGroups__leaderWorkerSet=True))
    assert "expected at most 50; set fullnameOverride to a shorter name" in message
    assert manifests(changed("two-node-actor", fullnameOverride="a" * 39, workerGroups__leaderWorkerSet=False))


@every_case(
    "values",
    [
        {
            "components__actor": {"resources": {"requests": {"cpu": 1, "memory": "1G"}}},
            "components__reference__resources": {"requests": {"cpu": 0.5}, "limits": {"cpu": 1.5}},
            "components__critic__resources": {"requests": {"cpu": "1500m"}, "limits": {"cpu": 2, "rdma/hca": 8}},
            "components__gateway__resources": {"limits": {"cpu": "1", "memory": "1Gi"}},
            "storage__claim__size": 8589934592,
            "redis__maxmemory": "1000",
            "fullnameOverride": "a-1",
            "imageRegistry": "registry.example.com:5000/mirror/",
            "networkPolicy": {"dns": {"cidrs": ["169.254.20.10/32", "fd00::a/128", "0.0.0.0/0"]}},
            "config__actor__model": "Qwen/Qwen2.5-7B-Instruct",
            "checks": {"paths": False},
        },
        {
            "components__actor": {"gpus": 4, "resources": {"requests": {"nvidia.com/gpu": 4}}},
            "storage__claim": {"size": "0.5Ti", "volumeName": "filled", "storageClassName": "-"},
            "redis__resources": {"limits": {"memory": "256Mi"}},
            "image": {"repository": "registry.example:5000/ml/quartet", "variant": "cpu"},
            "config__actor__model": "runs/before/policy",
            "config__data__prompts": "/quartet/data/a.jsonl",
            "config__reward__model": "/shared/reward",
            "defaults__extraVolumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}],
            "defaults__extraVolumeMounts": [{"name": "shared", "mountPath": "/shared"}],
        },
        {
            # Values of the first release stay when a second one shares its claim.
            "storage__claim": {"existingClaim": "quartet-storage", "size": "700Gi", "storageClassName": "shared"},
            "image": {"digest": DIGEST},
            # The run needs no critic, so its model is not read.
            "config__algorithm": {"estimator": "rloo"},
            "config__critic__model": "a/b",
        },
        {
            "storage__claim__size": "1Ei",
            # An image with another name may have the engine.
            "config__rollout__engine": "vllm",
            "components__generator": {"enabled": True, "gpus": 0, "image": {"repository": "ml/with-vllm"}},
        },
    ],
)
def test_values_at_the_limit_are_accepted(values: dict[str, Any]) -> None:
    assert manifests(changed("cpu-kind", **values))


TEXTS = yaml.safe_load((CHART / "files/texts.yaml").read_text(encoding="utf-8"))
WRONG_TEXT = "%"
MAPS = {"components": "actor", "security.tls.existingSecrets": "actor"}  # pragma: allowlist secret
"""Maps of the table without a kind for their keys, with a key for each."""


def wrong_texts(expected: Any, seen: set[int], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path in the message and values with one wrong text, for each text of the table.

    Of a part that is in several places, the first place has all texts, and the others have the first one. ``seen``: ids of parts.
    """
    if isinstance(expected, str):
        yield path, WRONG_TEXT
        return
    items = list(expected.items())[: 1 if id(expected) in seen else None]
    seen.add(id(expected))
    for key, below in items:
        if key == "{key}":
            yield path, {WRONG_TEXT: "1"}
        elif key == "*" and path not in MAPS and "{key}" not in expected:
            yield from ((where, [value]) for where, value in wrong_texts(below, seen, path))
        else:
            name = MAPS.get(path, "name") if key == "*" else key
            for where, value in wrong_texts(below, seen, f"{path}.{name}".removeprefix(".")):
                yield where, {name: value}


def test_each_text_of_the_table_is_checked_and_named() -> None:
    wrong = list(wrong_texts(TEXTS["texts"], set()))
    assert len(wrong) > 100
    for path, values in wrong:
        where = f'{path}: "{WRONG_TEXT}"; expected '
        with pytest.raises(helm_python.HelmError) as error:
            checks_only().render(values, name=RELEASE, namespace=NAMESPACE)
        assert where in str(error.value), (path, values)


def test_keys_of_the_texts_are_in_the_schema_and_every_kind_is_used() -> None:
    keys, kinds = set(), set()

    def walk(expected: Any) -> None:
        if isinstance(expected, str):
            kinds.add(expected)
        else:
            keys.update(expected)
            for below in expected.values():
                walk(below)

    walk(TEXTS["texts"])
    known = set(re.findall(r'"(\w+)": ?\{', (CHART / "values.schema.json").read_text(encoding="utf-8")))
    fields_of_kubernetes = {"claimName", "secretName"}
    assert keys - known - fields_of_kubernetes == {"*", "{key}"}
    assert kinds == TEXTS["kinds"].keys()
