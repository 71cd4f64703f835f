"""Checks of the cluster: Helm refuses what the cluster would refuse, with a message that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import helm_python
import pytest

from tests.every_case import every_case
from tests.helm.cluster import CUSTOM_KINDS, KINDS, ApiServer, api_server, connected
from tests.helm.rendering import (
    NAMESPACE,
    RELEASE,
    Manifest,
    Values,
    changed,
    chart,
    checks_for,
    example,
    manifests,
    of_kind,
)
from tests.helm.test_components import TRAFFIC

CLASSES = (
    ("PriorityClass", "training", {"value": 1000}),
    ("RuntimeClass", "nvidia", {"handler": "nvidia"}),
    ("IngressClass", "nginx", {}),
    ("StorageClass", "shared", {"provisioner": "nfs.csi.k8s.io"}),
    ("LocalQueue", "training", {}),
)
NAMED_BY_EXAMPLES = {
    "PersistentVolumeClaim": ("models", "datasets", "runs"),
    "Secret": ("registry-example", "model-downloads"),
}
"""Objects of the namespace that the examples name."""
DEFAULT_CLASS = {"storageclass.kubernetes.io/is-default-class": "true"}


@pytest.fixture
def api() -> Iterator[ApiServer]:
    """A cluster with the classes of the examples and all custom resources."""
    with api_server() as server:
        server.kinds = {**KINDS, **CUSTOM_KINDS}
        for kind, name, fields in CLASSES:
            server.add(kind, name, **fields)
        for kind, names in NAMED_BY_EXAMPLES.items():
            for name in names:
                server.add(kind, name)
        server.add("StorageClass", "first", provisioner="example.com/disk")["metadata"]["annotations"] = DEFAULT_CLASS
        yield server


def given(api: ApiServer) -> list[Manifest]:
    """Return the objects that exist before an installation."""
    names = [name for names in NAMED_BY_EXAMPLES.values() for name in names]
    return [
        item for item in api.objects if item["kind"].endswith(("Class", "Queue")) or item["metadata"]["name"] in names
    ]


def assert_accepted(values: Values, api: ApiServer) -> None:
    """Assert that no check refuses the values at `helm install --dry-run=server`."""
    with connected(api) as cluster:
        cluster.install(checks_for(values), RELEASE, values, namespace=NAMESPACE, dry_run="server")


def refusal(values: Values, api: ApiServer) -> str:
    """Return the message with which a check refuses the values."""
    with pytest.raises(helm_python.HelmError) as error:
        assert_accepted(values, api)
    return str(error.value)


def installed(api: ApiServer, values: Values) -> None:
    """Store the objects of a release, with what a cluster adds to them."""
    classes = given(api)
    objects = manifests(values)
    for claim in of_kind(objects, "PersistentVolumeClaim").values():
        claim["spec"].setdefault("storageClassName", "standard")
        claim["spec"].setdefault("volumeName", "pvc-1")
    for service in of_kind(objects, "Service").values():
        service["spec"].setdefault("clusterIP", "10.0.0.1")
    for item in objects:
        item["metadata"].setdefault("annotations", {})["meta.helm.sh/release-name"] = RELEASE
    api.store([*classes, *objects])


@every_case("name", ["node-8-gpus", "leader-worker-set", "single-node-4-gpus"])
def test_a_cluster_with_all_objects_is_accepted(api: ApiServer, name: str) -> None:
    api.objects = given(api)
    assert_accepted(example(name), api)
    installed(api, example(name))
    assert_accepted(example(name), api)


def test_the_whole_chart_has_the_checks(api: ApiServer) -> None:
    api.objects = []
    with connected(api) as cluster, pytest.raises(helm_python.HelmError, match="no default StorageClass"):
        cluster.install(chart(), RELEASE, example("cpu-kind"), namespace=NAMESPACE, dry_run="server")


@every_case(
    "name, kind, text",
    [
        ("node-8-gpus", "Certificate", "security.tls.source: cert-manager needs cert-manager.io/v1/Certificate"),
        ("node-8-gpus", "ServiceMonitor", "monitoring.serviceMonitor.enabled: true needs"),
        ("node-8-gpus", "PrometheusRule", "monitoring.prometheusRule.enabled: true needs"),
        ("node-8-gpus", "ScaledObject", "components.reward.autoscaling.kind: keda needs"),
        ("leader-worker-set", "LeaderWorkerSet", "workerGroups.leaderWorkerSet: true needs"),
        ("leader-worker-set", "LocalQueue", "scheduling.gang.kind: kueue needs"),
    ],
)
def test_a_missing_custom_resource_names_its_value_and_controller(
    api: ApiServer, name: str, kind: str, text: str
) -> None:
    api.kinds = {
        version: {other: entry for other, entry in kinds.items() if other != kind}
        for version, kinds in {**KINDS, **CUSTOM_KINDS}.items()
    }
    message = refusal(example(name), api)
    assert text in message
    assert f"this cluster has no {kind}; install " in message
    assert ", or set " in message


@every_case(
    "name, kind, text",
    [
        (
            "node-8-gpus",
            "PriorityClass",
            "components.actor.priorityClassName: this cluster has no PriorityClass training",
        ),
        (
            "single-node-4-gpus",
            "RuntimeClass",
            "components.actor.runtimeClassName: this cluster has no RuntimeClass nvidia",
        ),
        ("node-8-gpus", "IngressClass", "ingress.className: this cluster has no IngressClass nginx"),
        ("node-8-gpus", "StorageClass", "storage.runs.storageClassName: this cluster has no StorageClass shared"),
    ],
)
def test_a_missing_class_is_named_with_its_value(api: ApiServer, name: str, kind: str, text: str) -> None:
    complete = list(api.objects)
    api.objects = [item for item in complete if item["kind"] != kind or item["metadata"]["name"] == "first"]
    message = refusal(example(name), api)
    assert text in message
    assert "correct" in message
    assert_accepted(with_checks_off(name), api)
    api.objects = complete


def with_checks_off(name: str) -> Values:
    """Return values that look up no objects of the whole cluster."""
    return changed(name, checks={"clusterObjects": False})


def test_a_user_without_permission_for_classes_can_turn_the_check_off(api: ApiServer) -> None:
    api.forbidden = {"priorityclasses", "storageclasses", "runtimeclasses", "ingressclasses"}
    # The message of Helm names the template, and so the value.
    assert "quartet.checks.clusterObjects" in refusal(example("node-8-gpus"), api)
    assert_accepted(with_checks_off("node-8-gpus"), api)
    # The default storage class is looked up, too.
    assert "quartet.checks.clusterObjects" in refusal(example("cpu-kind"), api)
    assert_accepted(with_checks_off("cpu-kind"), api)


def test_volcano_must_be_installed(api: ApiServer) -> None:
    values = changed("cpu-kind", scheduling={"gang": {"kind": "volcano"}})
    assert_accepted(values, api)
    del api.kinds["scheduling.volcano.sh/v1beta1"]
    assert "scheduling.gang.kind: volcano needs scheduling.volcano.sh/v1beta1/PodGroup" in refusal(values, api)


@every_case("version", ["kueue.x-k8s.io/v1beta1", "kueue.x-k8s.io/v1beta2"])
def test_the_queue_of_kueue_must_exist(api: ApiServer, version: str) -> None:
    api.kinds = {**KINDS, version: CUSTOM_KINDS["kueue.x-k8s.io/v1beta2"]}
    values = changed("cpu-kind", scheduling={"gang": {"kind": "kueue", "queue": "training"}})
    api.objects = [item for item in api.objects if item["kind"] != "LocalQueue"]
    message = refusal(values, api)
    assert "scheduling.gang.queue: the namespace rlhf has no LocalQueue training; create it, or correct" in message
    api.add("LocalQueue", "training")
    assert_accepted(values, api)


@every_case("modes", [["ReadWriteOnce"], ["ReadWriteMany"]])
def test_a_new_claim_without_a_class_needs_a_default_class(api: ApiServer, modes: list[str]) -> None:
    values = changed("cpu-kind", storage__claim={"accessModes": modes, "size": "1Gi"})
    api.objects = []
    message = refusal(values, api)
    assert ".storageClassName: empty, but this cluster has no default StorageClass" in message
    assert "kubectl get storageclass" in message
    # An existing claim has its volume.
    installed(api, values)
    assert_accepted(values, api)


@every_case(
    "driver, modes, accepted",
    [
        ("rancher.io/local-path", ["ReadWriteOnce"], True),
        ("rancher.io/local-path", ["ReadWriteMany"], False),
        ("rancher.io/local-path", ["ReadOnlyMany"], False),
        ("ebs.csi.aws.com", ["ReadWriteOnce", "ReadWriteMany"], False),
        ("pd.csi.storage.gke.io", ["ReadOnlyMany"], True),
        ("pd.csi.storage.gke.io", ["ReadWriteMany"], False),
        ("nfs.csi.k8s.io", ["ReadWriteMany"], True),
    ],
)
def test_access_modes_that_the_storage_class_does_not_have_are_refused(
    api: ApiServer, driver: str, modes: list[str], accepted: bool
) -> None:
    api.objects = []
    api.add("StorageClass", "fast", provisioner=driver)
    default = api.add("StorageClass", "standard", provisioner=driver)
    default["metadata"]["annotations"] = DEFAULT_CLASS
    for name in ("fast", ""):
        values = changed("cpu-kind", storage__models={"accessModes": modes, "storageClassName": name, "size": "1Gi"})
        if accepted:
            assert_accepted(values, api)
            continue
        message = refusal(values, api)
        assert (
            f"storage.models.accessModes: {modes[-1]}, but the StorageClass {name or 'standard'} ({driver})" in message
        )
        assert "set storage.models.storageClassName" in message


CLAIM_CHANGES: list[tuple[str, Any, str]] = [
    ("accessModes", ["ReadWriteMany"], "[ReadWriteMany], but the claim quartet-storage exists with [ReadWriteOnce]"),
    ("storageClassName", "shared", "shared, but the claim quartet-storage exists with standard"),
    ("volumeName", "other", "other, but the claim quartet-storage exists with pvc-1"),
    ("size", "7Gi", "7Gi, but the claim quartet-storage exists with 8Gi, and Kubernetes does not shrink it"),
    ("size", "8000M", "8000M, but the claim quartet-storage exists with 8Gi, and Kubernetes does not shrink it"),
    ("size", "9Gi", "its StorageClass standard does not expand volumes"),
]


@every_case("key, value, text", CLAIM_CHANGES)
def test_a_change_of_an_existing_claim_says_what_it_has(api: ApiServer, key: str, value: Any, text: str) -> None:
    installed(api, example("cpu-kind"))
    api.add("StorageClass", "standard", provisioner="example.com/disk")
    values = changed("cpu-kind", **{f"storage__claim__{key}": value})
    if key == "volumeName":
        values["storage"]["claim"]["storageClassName"] = "standard"
    message = refusal(values, api)
    assert f"storage.claim.{key}: " in message
    assert text in message
    assert "set it to " in message


@every_case("size", ["8192Mi", 8 * 2**30, "8.0Gi", "0.0078125Ti"])
def test_the_same_size_in_another_unit_is_accepted(api: ApiServer, size: Any) -> None:
    installed(api, example("cpu-kind"))
    assert_accepted(changed("cpu-kind", storage__claim__size=size), api)


def test_a_claim_grows_if_its_class_expands_volumes(api: ApiServer) -> None:
    installed(api, example("cpu-kind"))
    api.add("StorageClass", "standard", provisioner="example.com/disk", allowVolumeExpansion=True)
    assert_accepted(changed("cpu-kind", storage__claim__size="9Gi"), api)


@every_case(
    "key, value, text",
    [
        ("size", "2Gi", 'redis.persistence.size: "2Gi", but the StatefulSet quartet-redis exists with "1Gi"'),
        ("storageClassName", "shared", 'redis.persistence.storageClassName: "shared", but'),
        ("accessModes", ["ReadWriteOncePod"], 'redis.persistence.accessModes: "ReadWriteOncePod", but'),
    ],
)
def test_a_change_of_the_storage_of_redis_says_how(api: ApiServer, key: str, value: Any, text: str) -> None:
    installed(api, example("cpu-kind"))
    message = refusal(changed("cpu-kind", **{f"redis__persistence__{key}": value}), api)
    assert text in message
    assert "set it to " in message
    assert "delete the StatefulSet quartet-redis" in message
    assert ("--cascade=orphan" in message) == (key == "size")


def test_another_name_override_is_refused_if_the_names_of_objects_stay(api: ApiServer) -> None:
    values = changed("cpu-kind", fullnameOverride="quartet")
    installed(api, values)
    message = refusal({**values, "nameOverride": "other"}, api)
    assert 'nameOverride: "other", but the Deployment quartet-actor exists with the label' in message
    assert 'set it to "quartet"' in message


def test_another_name_override_is_refused_if_it_would_install_a_second_run(api: ApiServer) -> None:
    values = example("cpu-kind")
    installed(api, values)
    for changes in ({"nameOverride": "other"}, {"fullnameOverride": "other"}):
        message = refusal({**values, **changes}, api)
        assert "the release has the Deployment quartet-actor, and would get " in message
        assert "keep the names of the installation" in message
    # Of another release, or of a user who has copied the labels.
    for item in api.objects:
        item["metadata"].get("annotations", {}).pop("meta.helm.sh/release-name", None)
    assert_accepted({**values, "fullnameOverride": "other"}, api)


def replicas_of(values: Values, api: ApiServer) -> object:
    """Return the replicas of the generator in the manifest of an upgrade."""
    with connected(api) as cluster:
        return of_kind(manifests(values, cluster), "Deployment")["quartet-generator"]["spec"].get("replicas")


def test_an_upgrade_keeps_replicas_that_were_scaled_by_hand(api: ApiServer) -> None:
    generators = changed("cpu-kind", components__generator={"enabled": True, "replicas": 2})
    installed(api, generators)
    live = next(item for item in api.objects if item["metadata"]["name"] == "quartet-generator" and "spec" in item)
    helm = {"manager": "helm", "operation": "Apply", "fieldsV1": {"f:spec": {"f:replicas": {}, "f:template": {}}}}
    live["metadata"]["managedFields"] = [helm]
    assert replicas_of(generators, api) == 2
    del helm["fieldsV1"]["f:spec"]["f:replicas"]
    scaled = {"manager": "kubectl", "operation": "Update", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    live["metadata"]["managedFields"].append({**scaled, "subresource": "scale"})
    live["spec"]["replicas"] = 8
    assert replicas_of(generators, api) is None
    # Equal numbers are no conflict. Then both own the field, and the next number is a conflict again.
    eight = changed("cpu-kind", components__generator={"enabled": True, "replicas": 8})
    assert replicas_of(eight, api) == 8
    helm["fieldsV1"]["f:spec"]["f:replicas"] = {}
    assert replicas_of(generators, api) is None
    # Flux and Argo CD apply under names of their own.
    helm["manager"] = "helm-controller"
    assert replicas_of(generators, api) is None
    # A release that Helm 3 installed is merged by the client, which would set the default of 1 without the field.
    live["metadata"]["managedFields"] = [{**helm, "operation": "Update"}, scaled]
    assert replicas_of(generators, api) == 2


@every_case(
    "kind, name, example_name, changes",
    [
        ("StatefulSet", "quartet-redis", "cpu-kind", {}),
        ("Deployment", "quartet-loader", "cpu-kind", {"loader": {"enabled": True}}),
        ("StatefulSet", "quartet-actor", "two-node-actor", {}),
        ("LeaderWorkerSet", "quartet-actor-nodes", "two-node-actor", {"workerGroups__leaderWorkerSet": True}),
    ],
)
def test_scaled_workloads_of_a_fixed_number_of_pods_are_named_before_an_upgrade(
    api: ApiServer, kind: str, name: str, example_name: str, changes: dict[str, Any]
) -> None:
    values = changed(example_name, **changes, checks={"clusterObjects": False})
    installed(api, values)
    live = next(item for item in api.objects if item["kind"] == kind and item["metadata"]["name"] == name)
    template = "f:leaderWorkerTemplate" if kind == "LeaderWorkerSet" else "f:template"
    live["metadata"]["managedFields"] = [
        {"manager": "helm", "operation": "Apply", "fieldsV1": {"f:spec": {template: {}, "f:replicas": {}}}},
        {"manager": "kubectl", "operation": "Update", "fieldsV1": {"f:spec": {"f:replicas": {}}}},
    ]
    assert_accepted(values, api)
    before, live["spec"]["replicas"] = live["spec"]["replicas"], 5
    message = refusal(values, api)
    assert f"the {kind} {name} has 5 replicas, which Helm has not set, and needs {before}" in message
    assert f"kubectl --namespace rlhf scale {kind.lower()} {name} --replicas {before}" in message


NAMED: dict[str, tuple[Values, Values]] = {
    "gateway.tokens.existingSecret": ({}, {"components__gateway": {"enabled": False}}),
    "security.rpcToken.existingSecret": ({}, {"security__rpcToken__enabled": False}),
    "redis.password.existingSecret": ({}, {}),
    "redis.external.existingSecret": (
        {"redis__enabled": False, "redis__external__url": "rediss://quartet@redis:6379/0"},
        {},
    ),
    "traffic.keys.existingSecret": (TRAFFIC, {}),
    "downloads.existingSecret": ({"downloads__sources": {"models/policy": "hf://a/b"}}, {"downloads__sources": {}}),
    "security.tls.existingSecrets.actor": ({"security__tls__source": "existing"}, {"security__tls__source": "chart"}),
    "storage.models.existingClaim": ({}, {}),
    "storage.claim.existingClaim": (
        {},
        {f"storage__{folder}__existingClaim": "other" for folder in ("models", "data", "runs")},
    ),
    "serviceAccount.name": ({}, {}),
}
"""Values that name objects of the namespace: changes with which pods use them, and with which no pod does."""


@every_case("path", NAMED)
def test_a_missing_object_of_the_namespace_is_named_with_its_value_if_a_pod_uses_it(api: ApiServer, path: str) -> None:
    used, unused = NAMED[path]
    named = {path.replace(".", "__"): "mine"}
    if "tls" in path:
        processes = ("actor", "critic", "reference", "orchestrator", "gateway", "redis")
        named = {"security__tls__existingSecrets": {**dict.fromkeys(processes, "there"), "actor": "mine"}}
        api.add("Secret", "there")
    api.add("PersistentVolumeClaim", "other")
    values = changed("cpu-kind", **used, **named)
    kind = "PersistentVolumeClaim" if "Claim" in path else "ServiceAccount" if "Account" in path else "Secret"
    message = refusal(values, api)
    assert f"{path}: the namespace rlhf has no {kind} mine; create it before, or correct the name" in message
    if unused:
        assert_accepted(changed("cpu-kind", **{**used, **named, **unused}), api)
    api.add(kind, "mine")
    assert_accepted(values, api)
    api.objects = [item for item in api.objects if item["metadata"]["name"] not in ("mine", "there", "other")]


def test_a_missing_secret_of_a_registry_is_named(api: ApiServer) -> None:
    message = refusal(changed("cpu-kind", imagePullSecrets=[{"name": "mine"}]), api)
    assert "imagePullSecrets: the namespace rlhf has no Secret mine" in message


def test_a_service_that_becomes_headless_must_be_deleted_first(api: ApiServer) -> None:
    before = changed("two-node-actor", components__reference={"nodes": 2, "gpus": 1})
    installed(api, before)
    message = refusal(changed("two-node-actor", components__reference={"nodes": 1, "gpus": 1}), api)
    assert "kubectl --namespace rlhf delete service quartet-reference" in message


def test_rendering_without_a_cluster_checks_nothing_of_it() -> None:
    # Neither classes nor custom resources exist for `helm template`.
    result: list[Manifest] = manifests(example("node-8-gpus"))
    assert of_kind(result, "ServiceMonitor")
