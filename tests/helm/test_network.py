"""The edges that the NetworkPolicies let through are those of the design, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quartet.rpc.security.allow_list import CALLERS
from quartet.types import Role
from tests.helm.rendering import EXAMPLES, Manifest, Values, changed, example, manifests, of_kind, pod_templates, texts

ROLES = tuple(str(role) for role in Role)
OF_EVERYBODY = ("quartet.v1.StatusService", "grpc.health.v1.Health")
BUFFER_USERS = ("actor", "critic", "orchestrator", "gateway")
GRPC, METRICS, HEALTH, GATEWAY, ANY = 50051, 9100, 9101, 8080, 0

Edge = tuple[str, str, int]


def design(values: Values, homes: dict[str, str]) -> set[Edge]:
    """The edges between pods that the design has; ``homes``: the component in which each role of this run is."""
    edges = {
        (homes[caller], homes[role], GRPC)
        for role in ROLES
        if role in homes
        for method, callers in CALLERS.items()
        if method.partition("/")[0] in (f"quartet.v1.{role.capitalize()}Service", *OF_EVERYBODY)
        for caller in callers
        # The operator connects through kubectl, and no component calls itself.
        if caller in homes and caller != role
    }
    port = 6379 if values.get("redis", {}).get("enabled", True) else 6380
    edges |= {(homes[role], "redis", port) for role in BUFFER_USERS if role in homes}
    watched = values.get("monitoring", {}).get("serviceMonitor", {}).get("enabled")
    for component in set(homes.values()):
        front = component == "gateway"
        edges.add(("test", component, GATEWAY if front else HEALTH))
        if watched:
            edges.add(("prometheus", component, GATEWAY if front else METRICS))
    if values.get("ingress", {}).get("enabled"):
        edges.add(("ingress", "gateway", GATEWAY))
    for name, component in values.get("components", {}).items():
        if component.get("multiNode", {}).get("enabled"):
            edges.add((name, name, ANY))
    return edges


class Cluster:
    """The pods of a rendered example and what its policies let through, as a network plugin would see it."""

    def __init__(self, results: list[Manifest], values: Values) -> None:
        self.pods = {
            template["metadata"]["labels"]["app.kubernetes.io/component"]: template
            for _, template in pod_templates(results)
        }
        self.policies = list(of_kind(results, "NetworkPolicy").values())
        named = {
            "dns": {"kubernetes.io/metadata.name": "kube-system"},
            "prometheus": {"kubernetes.io/metadata.name": "monitoring"},
            "ingress": {"kubernetes.io/metadata.name": "ingress-nginx"},
        }
        self.others = {frozenset(labels.items()): name for name, labels in named.items()}
        self.cidrs = values.get("redis", {}).get("external", {}).get("cidrs", [])

    def edges(self, direction: str) -> set[Edge]:
        """Return what the rules of one direction, "ingress" or "egress", let through."""
        return {edge for policy in self.policies for edge in self._of(policy, direction)}

    def isolated(self, component: str) -> set[str]:
        """The directions in which a pod is let do nothing but what a rule says."""
        return {
            kind
            for policy in self.policies
            if component in self._selected(policy["spec"]["podSelector"])
            for kind in policy["spec"]["policyTypes"]
        }

    def _of(self, policy: Manifest, direction: str) -> Iterator[Edge]:
        far = "from" if direction == "ingress" else "to"
        for component in self._selected(policy["spec"]["podSelector"]):
            for rule in policy["spec"].get(direction) or []:
                assert rule[far], "an empty list of peers would admit every pod"
                for peer in (name for item in rule[far] for name in self._service_clients(item)):
                    for port in [item["port"] for item in rule.get("ports", [])] or [ANY]:
                        yield (peer, component, port) if direction == "ingress" else (component, peer, port)

    def _service_clients(self, peer: dict[str, Any]) -> list[str]:
        if "ipBlock" in peer:
            assert peer["ipBlock"]["cidr"] in self.cidrs
            return ["redis"]
        if "namespaceSelector" in peer:
            return [self.others[frozenset(peer["namespaceSelector"]["matchLabels"].items())]]
        return self._selected(peer["podSelector"])

    def _selected(self, selector: dict[str, Any]) -> list[str]:
        assert set(selector) == {"matchLabels"}, "an empty selector would mean every pod of the namespace"
        wanted = selector["matchLabels"].items()
        return [name for name, pod in self.pods.items() if wanted <= pod["metadata"]["labels"].items()]


def homes_of(cluster: Cluster) -> dict[str, str]:
    """The component in which each role is, by what its container is told to run."""
    homes = {}
    for component, template in cluster.pods.items():
        container = template["spec"]["containers"][0]
        if container["command"][-1] == "quartet.services":
            for role in container["args"][: container["args"].index("--config")]:
                homes[role] = component
        elif container["command"][-1] == "quartet.gateway":
            homes["gateway"] = component
    return homes


CASES: dict[str, Values] = {
    **{name: example(name) for name in EXAMPLES},
    "critic-free": changed("single-node-4-gpus", config__algorithm={"estimator": "reinforce_plus_plus"}),
    "adapter": changed("single-node-4-gpus", config__actor={"model": "models/policy", "lora": {"rank": 8}}),
    "reference beside actor": changed(
        "single-node-4-gpus",
        components__actor={"roles": ["actor", "reference"]},
        components__reference={"enabled": False},
    ),
    "no gateway": changed("cpu-kind", components__gateway={"enabled": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_edges_are_those_of_the_design(case: str) -> None:
    values = CASES[case]
    cluster = Cluster(manifests(values), values)
    wanted = design(values, homes_of(cluster))
    names = {*cluster.pods, "redis"}
    outside = {edge for edge in wanted if edge[0] not in cluster.pods}
    redis_outside = {edge for edge in wanted if edge[1] == "redis" and "redis" not in cluster.pods}
    # Each edge between two pods of ours has to be let out here and let in there.
    assert cluster.edges("ingress") == wanted - redis_outside
    dns = {(name, "dns", 53) for name in cluster.pods}
    assert cluster.edges("egress") == (wanted - outside) | dns
    assert {edge[1] for edge in wanted} <= names


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_pod_is_denied_what_no_rule_lets_through(name: str) -> None:
    cluster = Cluster(manifests(example(name)), example(name))
    for component in cluster.pods:
        assert cluster.isolated(component) == {"Ingress", "Egress"}
    deny = of_kind(manifests(example(name)), "NetworkPolicy")["quartet-default-deny"]["spec"]
    assert set(deny) == {"podSelector", "policyTypes"}
    assert deny["policyTypes"] == ["Ingress", "Egress"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_edge_ends_at_a_port_that_is_open_there(name: str) -> None:
    cluster = Cluster(manifests(example(name)), example(name))
    for _, component, port in cluster.edges("ingress"):
        open_there = {item["containerPort"] for item in cluster.pods[component]["spec"]["containers"][0]["ports"]}
        assert port in open_there | {ANY}


def test_who_only_scores_cannot_reach_redis_nor_the_outside() -> None:
    cluster = Cluster(manifests(example("single-node-4-gpus")), example("single-node-4-gpus"))
    leaving = {edge for edge in cluster.edges("egress") if edge[0] in ("reward", "reference")}
    assert leaving == {("reward", "dns", 53), ("reference", "dns", 53)}


def test_a_reward_server_elsewhere_can_be_let_through() -> None:
    rule = {"to": [{"ipBlock": {"cidr": "10.9.0.0/16"}}], "ports": [{"protocol": "TCP", "port": 443}]}
    result = of_kind(manifests(changed("single-node-4-gpus", components__reward__extraEgress=[rule])), "NetworkPolicy")
    assert rule in result["quartet-reward"]["spec"]["egress"]
    assert rule not in (result["quartet-reference"]["spec"]["egress"] or [])


def test_no_policy_is_left_where_they_are_switched_off() -> None:
    assert of_kind(manifests(changed("cpu-kind", networkPolicy={"enabled": False})), "NetworkPolicy") == {}


@pytest.mark.parametrize("cidrs", [[], ["10.20.0.0/24"]])
def test_a_redis_outside_is_reached_at_its_port_and_the_notes_say_where_it_may_be(cidrs: list[str]) -> None:
    values = changed("two-node-actor", redis__external__cidrs=cidrs)
    policies = of_kind(manifests(values), "NetworkPolicy")
    blocks = [{"ipBlock": {"cidr": cidr}} for cidr in cidrs or ["0.0.0.0/0", "::/0"]]
    rule = {"to": blocks, "ports": [{"protocol": "TCP", "port": 6380}]}
    for name in ("actor", "orchestrator", "gateway"):
        assert rule in policies[f"quartet-{name}"]["spec"]["egress"]
    assert rule not in (policies["quartet-reward"]["spec"]["egress"] or [])
    notes = texts(values)["quartet/templates/NOTES.txt"]
    assert ("may connect to any address on port 6380" in notes) == (not cidrs)
