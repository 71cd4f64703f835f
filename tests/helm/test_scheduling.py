"""Placement of pods by value: co-location, topology spread, gangs; and platforms that assign users, registries, DNS servers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import yaml

from tests.helm.rendering import (
    EXAMPLES,
    ROOT,
    Manifest,
    Values,
    changed,
    example,
    manifests,
    of_kind,
    pod_templates,
    refusal,
)
from tests.helm.test_components import pods

KUEUE = {"gang": {"kind": "kueue", "queue": "training"}}
VOLCANO = {"gang": {"kind": "volcano", "queue": "gpus"}}
QUEUE = "kueue.x-k8s.io/queue-name"


def templates(values: Values) -> dict[str, Manifest]:
    """Return the pod templates by component. Of a LeaderWorkerSet, that of the workers."""
    result = {}
    for _, template in pod_templates(manifests(values)):
        result[template["metadata"]["labels"]["app.kubernetes.io/component"]] = template
    return result


def terms(spec: Manifest, kind: str, affinity: str = "podAffinity") -> list[Any]:
    """Return the terms of an affinity of a pod."""
    result: list[Any] = (
        spec.get("affinity", {}).get(affinity, {}).get(f"{kind}DuringSchedulingIgnoredDuringExecution", [])
    )
    return result


def test_pods_with_models_are_placed_near_each_other() -> None:
    rack = {"mode": "required", "topologyKey": "example.com/rack"}
    result = templates(changed("vllm-generators", scheduling={"colocation": rack}))
    for component in ("actor", "critic", "reward", "reference", "generator"):
        (term,) = terms(result[component]["spec"], "required")
        assert term["topologyKey"] == "example.com/rack"
        selector, labels = term["labelSelector"], result[component]["metadata"]["labels"]
        # A pod must match its own term, or the first one of a run could never be placed.
        assert selector["matchLabels"].items() <= labels.items()
        assert labels["app.kubernetes.io/component"] in selector["matchExpressions"][0]["values"]
    for component in ("orchestrator", "gateway", "redis"):
        assert "affinity" not in result[component]["spec"]


def test_a_preference_is_added_to_the_affinity_of_a_component() -> None:
    before = pods(example("two-node-actor"))["actor"]
    spec = pods(changed("two-node-actor", scheduling={"colocation": {"mode": "preferred"}}))["actor"]
    assert terms(spec, "preferred")[:-1] == terms(before, "preferred") != []
    assert terms(spec, "preferred")[-1]["podAffinityTerm"]["topologyKey"] == "topology.kubernetes.io/zone"
    assert spec["affinity"]["podAntiAffinity"] == before["affinity"]["podAntiAffinity"]


MACHINE = {"mode": "required", "topologyKey": "kubernetes.io/hostname"}


def test_pods_that_share_a_volume_for_one_node_follow_the_pods_with_models() -> None:
    """A pod without a model that comes first would bind the volume to a node without GPUs."""
    values = changed("single-node-4-gpus", scheduling={"colocation": MACHINE}, loader={"enabled": True})
    result = templates(values)
    models = {"actor", "critic", "reward", "reference"}
    for component in (*models, "orchestrator", "gateway", "download", "loader"):
        (term,) = terms(result[component]["spec"], "required")
        assert term["topologyKey"] == "kubernetes.io/hostname"
        assert set(term["labelSelector"]["matchExpressions"][0]["values"]) == models, component
    assert "affinity" not in result["redis"]["spec"]
    preferred = changed("single-node-4-gpus", scheduling={"colocation": {"mode": "preferred"}})
    assert len(terms(templates(preferred)["gateway"]["spec"], "preferred")) == 1


@pytest.mark.parametrize(
    "storage", [{"claim": {"accessModes": ["ReadWriteMany"]}}, {"claim": {"existingClaim": "shared"}}]
)
def test_pods_without_models_are_placed_anywhere_with_a_shared_volume(storage: Values) -> None:
    values = changed(
        "single-node-4-gpus", scheduling={"colocation": MACHINE}, loader={"enabled": True}, storage=storage
    )
    result = templates(values)
    for component in ("orchestrator", "gateway", "download", "loader"):
        assert "affinity" not in result[component]["spec"], component


def test_pods_are_placed_anywhere_by_default() -> None:
    assert terms(pods(example("single-node-4-gpus"))["actor"], "required") == []
    assert terms(pods(example("single-node-4-gpus"))["actor"], "preferred") == []


def test_a_spread_constraint_without_a_selector_selects_the_pods_of_its_component() -> None:
    spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    given = changed("two-node-actor", components__reference__topologySpreadConstraints=[spread])
    template = templates(given)["reference"]
    (constraint,) = template["spec"]["topologySpreadConstraints"]
    assert constraint["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert constraint["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "reference"
    chosen = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    chosen |= {"labelSelector": {"matchLabels": {"a": "b"}}}
    values = changed("single-node-4-gpus", components__reward={"topologySpreadConstraints": [chosen]})
    (constraint,) = templates(values)["reward"]["spec"]["topologySpreadConstraints"]
    assert constraint == chosen


def requests(values: Values) -> list[Manifest]:
    """Return the pods with GPUs: number of GPUs, labels, and preferences for pods and for nodes."""
    result = []
    for item in manifests(values):
        spec = item.get("spec", {})
        groups = {"StatefulSet": "template", "Deployment": "template", "LeaderWorkerSet": "leaderWorkerTemplate"}
        if item["kind"] not in groups:
            continue
        template, count = spec[groups[item["kind"]]], spec.get("replicas", 1)
        if item["kind"] == "LeaderWorkerSet":
            template, count = template["workerTemplate"], template["size"]
        limits = template["spec"]["containers"][0]["resources"].get("limits", {})
        if gpus := int(limits.get("nvidia.com/gpu", 0)):
            labels = template["metadata"]["labels"]
            pod = {"gpus": gpus, "labels": labels, "prefers": terms(template["spec"], "preferred")}
            result += [{**pod, "nodes": terms(template["spec"], "preferred", "nodeAffinity")}] * count
    return result


def matches(labels: dict[str, str], selector: Manifest) -> bool:
    """Return whether a label selector with matchLabels and In expressions selects a pod."""
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels[each["key"]] in each["values"] for each in selector.get("matchExpressions", [])
    )


def waiting(pods: list[Manifest], sizes: Sequence[int], order: random.Random) -> int:
    """Return how many pods find no node, one after the other, if preferences of equal weight decide, and then the emptiest node.

    ``sizes``: number of GPUs of each node, which its label has.
    """
    nodes: list[tuple[int, list[Manifest]]] = [(size, []) for size in sizes]
    missing = 0
    for pod in order.sample(pods, len(pods)):
        free = [node for node in nodes if sum(other["gpus"] for other in node[1]) + pod["gpus"] <= node[0]]
        near = [
            term["podAffinityTerm"]["labelSelector"]
            for term in pod["prefers"]
            if term["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
        ]
        limits = [
            int(each["values"][0])
            for term in pod["nodes"]
            for each in term["preference"]["matchExpressions"]
            if (each["key"], each["operator"]) == ("nvidia.com/gpu.count", "Lt")
        ]

        def score(
            node: tuple[int, list[Manifest]], near: list[Manifest] = near, limits: list[int] = limits
        ) -> tuple[int, int, float]:
            has_peers = any(matches(other["labels"], selector) for other in node[1] for selector in near)
            left = node[0] - sum(other["gpus"] for other in node[1])
            return has_peers + any(node[0] < limit for limit in limits), left, order.random()

        if free:
            max(free, key=score)[1].append(pod)
        else:
            missing += 1
    return missing


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_pods_of_an_example_find_nodes_in_any_order(name: str) -> None:
    """In the smallest cluster of nodes with 8 GPUs that has room for them, and in clusters with smaller nodes."""
    pods = requests(example(name))
    clusters = [[8] * -(-sum(pod["gpus"] for pod in pods) // 8)]
    # Whole nodes for the groups, and the others on nodes of 4 GPUs, or of as many as each needs.
    whole = sum(pod["gpus"] == 8 for pod in pods)
    few = [pod["gpus"] for pod in pods if pod["gpus"] < 8]
    if whole and few:
        clusters.append([8] * whole + [4] * -(-sum(few) // 4))
        if len(set(few)) == 1:
            clusters.append([8] * whole + few)
    for sizes in clusters:
        assert [waiting(pods, sizes, random.Random(seed)) for seed in range(100)] == [0] * 100, sizes


def queues(values: Values) -> dict[str, tuple[str | None, str | None]]:
    """Return the queue of each workload and that of its pods."""
    result = {}
    for item in manifests(values):
        for name, template in pod_templates([item]):
            labels = item["metadata"].get("labels", {}), template["metadata"]["labels"]
            result[name] = (labels[0].get(QUEUE), labels[1].get(QUEUE))
    return result


def test_kueue_admits_each_pod_of_a_deployment_by_itself_so_that_it_can_be_replaced() -> None:
    """In a pod group, Kueue deletes the pod that replaces a drained one, which ended with status 0."""
    result = queues(changed("vllm-generators", scheduling=KUEUE))
    queued = {name for name, queue in result.items() if queue == (None, "training")}
    assert queued == {f"Deployment/quartet-{name}" for name in ("actor", "critic", "reward", "reference", "generator")}
    assert {result[name] for name in result.keys() - queued} == {(None, None)}
    for name in ("vllm-generators", "leader-worker-set", "two-node-actor"):
        for template in templates(changed(name, scheduling=KUEUE)).values():
            metadata = template["metadata"]
            assert "pod-group" not in str((metadata["labels"], metadata.get("annotations")))


@pytest.mark.parametrize(
    ("name", "group"),
    [("leader-worker-set", "LeaderWorkerSet/quartet-actor"), ("two-node-actor", "StatefulSet/quartet-actor")],
)
def test_kueue_admits_the_nodes_of_a_role_together(name: str, group: str) -> None:
    result = queues(changed(name, scheduling=KUEUE))
    assert {queue for workload, queue in result.items() if workload.startswith(group)} == {("training", None)}


def test_a_gang_of_volcano_has_the_smallest_number_of_autoscaled_pods() -> None:
    (group,) = of_kind(manifests(changed("node-8-gpus", scheduling=VOLCANO)), "PodGroup").values()
    # Actor and critic, and one pod each of reward and reference.
    assert group["spec"]["minMember"] == 4


def test_volcano_starts_the_pods_of_a_group_together() -> None:
    values = changed("vllm-generators", scheduling=VOLCANO)
    (group,) = (item for item in manifests(values) if item["kind"] == "PodGroup")
    assert group["apiVersion"] == "scheduling.volcano.sh/v1beta1"
    # One of the four generators is enough to start.
    assert group["spec"] == {"minMember": 5, "queue": "gpus"}
    for name, template in templates(values).items():
        in_group = name in ("actor", "critic", "reward", "reference", "generator")
        annotations = template["metadata"].get("annotations", {})
        assert (annotations.get("scheduling.k8s.io/group-name") == group["metadata"]["name"]) == in_group, name
        assert (template["spec"].get("schedulerName") == "volcano") == in_group, name


def test_kueue_needs_a_queue() -> None:
    assert "scheduling.gang.queue: empty; kind kueue needs" in refusal(
        changed("cpu-kind", scheduling={"gang": {"kind": "kueue"}})
    )


def test_the_scheduler_of_pods_with_models_is_a_value() -> None:
    result = templates(changed("single-node-4-gpus", scheduling={"schedulerName": "bin-packing"}))
    assert result["actor"]["spec"]["schedulerName"] == "bin-packing"
    assert "schedulerName" not in result["gateway"]["spec"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_platform_may_assign_the_users_the_registry_and_the_pull_secrets_of_all_pods(name: str) -> None:
    secrets = [{"name": "registry"}]
    values = changed(name, security__fixedUsers=False, imageRegistry="mirror.example/", imagePullSecrets=secrets)
    for pod, template in pod_templates(manifests(values)):
        contexts = [template["spec"]["securityContext"]]
        contexts += [container["securityContext"] for container in template["spec"]["containers"]]
        for context in contexts:
            assert not context.keys() & {"runAsUser", "runAsGroup", "fsGroup"}, pod
        # Pod Security "restricted" stays.
        assert contexts[0]["runAsNonRoot"] is True
        assert contexts[0]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert template["spec"]["imagePullSecrets"] == secrets, pod
        for kind in ("initContainers", "containers"):
            for container in template["spec"].get(kind, []):
                assert container["image"].startswith("mirror.example/"), pod


def test_dns_servers_are_allowed_by_address() -> None:
    values = changed("cpu-kind", networkPolicy={"dns": {"cidrs": ["169.254.20.10/32"]}})
    policy = of_kind(manifests(values), "NetworkPolicy")["quartet-dns"]["spec"]
    pods_of_dns, node_local = policy["egress"][0]["to"]
    assert pods_of_dns["podSelector"]["matchLabels"] == {"k8s-app": "kube-dns"}
    assert node_local == {"ipBlock": {"cidr": "169.254.20.10/32"}}


def test_openshift_replaces_the_labels_and_the_port_of_dns() -> None:
    page = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
    block = page.partition("### OpenShift")[2].partition("```yaml\n")[2].partition("```")[0]
    values = changed("cpu-kind", **yaml.safe_load(block), ingress={"enabled": True, "host": "a.example"})
    policies = of_kind(manifests(values), "NetworkPolicy")
    (rule,) = policies["quartet-dns"]["spec"]["egress"]
    (peer,) = rule["to"]
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "openshift-dns"}
    assert peer["podSelector"]["matchLabels"] == {"dns.operator.openshift.io/daemonset-dns": "default"}
    assert {(port["protocol"], port["port"]) for port in rule["ports"]} == {("UDP", 5353), ("TCP", 5353)}
    router = {"namespaceSelector": {"matchLabels": {"policy-group.network.openshift.io/ingress": ""}}}
    assert [router] in [rule["from"] for rule in policies["quartet-gateway"]["spec"]["ingress"]]
