"""The NetworkPolicies permit exactly the connections of the design."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from quartet.contract.status import Role
from quartet.rpc.security.allow_list import CALLERS
from tests.helm.rendering import EXAMPLES, Manifest, Values, changed, example, manifests, of_kind, pod_templates, texts
from tests.helm.test_components import TRAFFIC

ROLES = tuple(str(role) for role in Role)
SHARED_SERVICES = ("quartet.v1.StatusService", "grpc.health.v1.Health")
WEIGHTS = "quartet.v1.WeightService"
BUFFER_USERS = ("actor", "critic", "generator", "orchestrator", "gateway")
GRPC, METRICS, HEALTH, GATEWAY, AGENTS, ANY = 50051, 9100, 9101, 8080, 8090, 0

Edge = tuple[str, str, int]


def served_by(role: str) -> set[str]:
    """Return the gRPC services of a role."""
    generation = {"quartet.v1.GenerationService", WEIGHTS} if role in ("actor", "generator") else set()
    return {f"quartet.v1.{role.capitalize()}Service", *generation, *SHARED_SERVICES}


def expected_edges(values: Values, components: dict[str, str]) -> set[Edge]:
    """Return the connections of the design. ``components`` maps each role of the run to its component."""
    edges = {
        (components[caller], components[role], GRPC)
        for role in ROLES
        if role in components
        for method, callers in CALLERS.items()
        if method.partition("/")[0] in served_by(role)
        for caller in callers
        # The operator connects through kubectl. Only generators call each other. A reward calls services outside the release.
        if caller in components and (caller != role or method.startswith(WEIGHTS)) and caller != Role.REWARD
    }
    if values["config"].get("environment", {}).get("kind") == "agent":
        # Agents call the process that generates.
        edges.add((components["environment"], components.get("generator", components["actor"]), AGENTS))
    if values.get("networkPolicy", {}).get("traffic"):
        edges.add(("traffic", "generator", AGENTS))
    port = 6379 if values.get("redis", {}).get("enabled", True) else 6380
    edges |= {(components[role], "redis", port) for role in BUFFER_USERS if role in components}
    has_monitor = values.get("monitoring", {}).get("serviceMonitor", {}).get("enabled")
    for component in set(components.values()):
        is_gateway = component == "gateway"
        edges.add(("test", component, GATEWAY if is_gateway else HEALTH))
        if has_monitor:
            edges.add(("prometheus", component, GATEWAY if is_gateway else METRICS))
    if values.get("ingress", {}).get("enabled"):
        edges.add(("ingress", "gateway", GATEWAY))
    for name, component in values.get("components", {}).items():
        if component.get("nodes", 1) > 1:
            edges.add((name, name, ANY))
    return edges


class Cluster:
    """The pods and NetworkPolicies of a rendered example, evaluated like a network plugin does."""

    def __init__(self, results: list[Manifest], values: Values) -> None:
        self.pods = {
            template["metadata"]["labels"]["app.kubernetes.io/component"]: template
            for _, template in pod_templates(results)
        }
        # test_downloads checks the policy of the download.
        self.policies = [
            policy
            for policy in of_kind(results, "NetworkPolicy").values()
            if policy["metadata"]["labels"].get("app.kubernetes.io/component") != "download"
        ]
        named = {
            "dns": {"kubernetes.io/metadata.name": "kube-system"},
            "prometheus": {"kubernetes.io/metadata.name": "monitoring"},
            "ingress": {"kubernetes.io/metadata.name": "ingress-nginx"},
            "traffic": {"kubernetes.io/metadata.name": "apps"},
        }
        self.others = {frozenset(labels.items()): name for name, labels in named.items()}
        self.cidrs = values.get("redis", {}).get("external", {}).get("cidrs", [])

    def edges(self, direction: str) -> set[Edge]:
        """Return the connections that the rules of one direction ("ingress" or "egress") permit."""
        return {edge for policy in self.policies for edge in self._of(policy, direction)}

    def isolated(self, component: str) -> set[str]:
        """Return the directions in which a pod is limited to the rules."""
        return {
            kind
            for policy in self.policies
            if component in self._selected(policy["spec"]["podSelector"])
            for kind in policy["spec"]["policyTypes"]
        }

    def _of(self, policy: Manifest, direction: str) -> Iterator[Edge]:
        side = "from" if direction == "ingress" else "to"
        for component in self._selected(policy["spec"]["podSelector"]):
            for rule in policy["spec"].get(direction) or []:
                assert rule[side], "an empty list of peers would admit every pod"
                for peer in (name for item in rule[side] for name in self._peers(item)):
                    for port in [item["port"] for item in rule.get("ports", [])] or [ANY]:
                        yield (peer, component, port) if direction == "ingress" else (component, peer, port)

    def _peers(self, peer: dict[str, Any]) -> list[str]:
        if "ipBlock" in peer:
            assert peer["ipBlock"]["cidr"] in self.cidrs
            return ["redis"]
        if "namespaceSelector" in peer:
            return [self.others[frozenset(peer["namespaceSelector"]["matchLabels"].items())]]
        return self._selected(peer["podSelector"])

    def _selected(self, selector: dict[str, Any]) -> list[str]:
        assert set(selector) == {"matchLabels"}, "an empty selector would mean every pod of the namespace"
        expected = selector["matchLabels"].items()
        return [name for name, pod in self.pods.items() if expected <= pod["metadata"]["labels"].items()]


def components_of(cluster: Cluster) -> dict[str, str]:
    """Return the component of each role, from the commands of the containers."""
    components = {}
    for component, template in cluster.pods.items():
        container = template["spec"]["containers"][0]
        if container["command"][-1] == "quartet.services":
            for role in container["args"][: container["args"].index("--config")]:
                components[role] = component
        elif container["command"][-1] == "quartet.gateway":
            components["gateway"] = component
    return components


CASES: dict[str, Values] = {
    **{name: example(name) for name in EXAMPLES},
    "critic-free": changed("single-node-4-gpus", config__algorithm={"estimator": "reinforce_plus_plus"}),
    "adapter": changed("single-node-4-gpus", config__actor={"model": "models/policy", "lora": {"rank": 8}}),
    "reference beside actor": changed(
        "single-node-4-gpus",
        components__actor={"roles": ["actor", "reference"]},
        components__reference={"enabled": False},
    ),
    **{
        f"environment, {name}": changed(
            name, config__rollout__max_turns=3, config__environment={"class_name": "my_game:Game"}
        )
        for name in ("cpu-kind", "vllm-generators")
    },
    **{
        f"agents, {name}": changed(
            name,
            config__rollout__max_turns=3,
            config__environment={"kind": "agent", "agent": {"command": ["node", "agent.js"]}},
        )
        for name in ("cpu-kind", "vllm-generators")
    },
    "traffic": changed("single-node-4-gpus", **TRAFFIC),
    "traffic from nowhere": changed("single-node-4-gpus", **TRAFFIC | {"networkPolicy__traffic": {}}),
    "no gateway": changed("cpu-kind", components__gateway={"enabled": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_policies_permit_exactly_the_connections_of_the_design(case: str) -> None:
    values = CASES[case]
    cluster = Cluster(manifests(values), values)
    expected = expected_edges(values, components_of(cluster))
    names = {*cluster.pods, "redis"}
    outside = {edge for edge in expected if edge[0] not in cluster.pods}
    redis_outside = {edge for edge in expected if edge[1] == "redis" and "redis" not in cluster.pods}
    # A connection between two pods needs an egress rule of one and an ingress rule of the other.
    assert cluster.edges("ingress") == expected - redis_outside
    dns = {(name, "dns", 53) for name in cluster.pods}
    assert cluster.edges("egress") == (expected - outside) | dns
    assert {edge[1] for edge in expected} <= names


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_pod_denies_connections_by_default(name: str) -> None:
    cluster = Cluster(manifests(example(name)), example(name))
    for component in cluster.pods:
        assert cluster.isolated(component) == {"Ingress", "Egress"}
    deny = of_kind(manifests(example(name)), "NetworkPolicy")["quartet-default-deny"]["spec"]
    assert set(deny) == {"podSelector", "policyTypes"}
    assert deny["policyTypes"] == ["Ingress", "Egress"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_permitted_port_is_a_port_of_its_container(name: str) -> None:
    cluster = Cluster(manifests(example(name)), example(name))
    for _, component, port in cluster.edges("ingress"):
        container_ports = {item["containerPort"] for item in cluster.pods[component]["spec"]["containers"][0]["ports"]}
        assert port in container_ports | {ANY}


def test_only_pods_of_one_group_reach_the_rendezvous_and_each_other() -> None:
    cluster = Cluster(manifests(example("leader-worker-set")), example("leader-worker-set"))
    for direction in ("ingress", "egress"):
        assert {edge for edge in cluster.edges(direction) if edge[2] == ANY} == {
            ("actor", "actor", ANY),
            ("critic", "critic", ANY),
        }


def test_generators_pull_weights_from_the_actor_and_from_each_other() -> None:
    cluster = Cluster(manifests(example("vllm-generators")), example("vllm-generators"))
    outgoing = {edge for edge in cluster.edges("egress") if edge[0] == "generator"}
    assert outgoing == {
        ("generator", "actor", GRPC),
        ("generator", "generator", GRPC),
        ("generator", "redis", 6379),
        ("generator", "dns", 53),
    }
    incoming = {edge for edge in cluster.edges("ingress") if edge[1] == "generator"}
    assert {edge[0] for edge in incoming} == {"orchestrator", "gateway", "generator", "prometheus", "test"}


def test_scoring_services_cannot_connect_to_redis_or_outside() -> None:
    cluster = Cluster(manifests(example("single-node-4-gpus")), example("single-node-4-gpus"))
    outgoing = {edge for edge in cluster.edges("egress") if edge[0] in ("reward", "reference")}
    assert outgoing == {("reward", "dns", 53), ("reference", "dns", 53)}


def test_extra_egress_permits_an_external_reward_server() -> None:
    rule = {"to": [{"ipBlock": {"cidr": "10.9.0.0/16"}}], "ports": [{"protocol": "TCP", "port": 443}]}
    result = of_kind(manifests(changed("single-node-4-gpus", components__reward__extraEgress=[rule])), "NetworkPolicy")
    assert rule in result["quartet-reward"]["spec"]["egress"]
    assert rule not in (result["quartet-reference"]["spec"]["egress"] or [])


def test_network_policies_can_be_disabled() -> None:
    assert of_kind(manifests(changed("cpu-kind", networkPolicy={"enabled": False})), "NetworkPolicy") == {}


@pytest.mark.parametrize("cidrs", [[], ["10.20.0.0/24"]])
def test_an_external_redis_is_permitted_at_its_port_and_the_notes_warn_of_open_addresses(cidrs: list[str]) -> None:
    values = changed("two-node-actor", redis__external__cidrs=cidrs)
    policies = of_kind(manifests(values), "NetworkPolicy")
    blocks = [{"ipBlock": {"cidr": cidr}} for cidr in cidrs or ["0.0.0.0/0", "::/0"]]
    rule = {"to": blocks, "ports": [{"protocol": "TCP", "port": 6380}]}
    for name in ("actor", "orchestrator", "gateway"):
        assert rule in policies[f"quartet-{name}"]["spec"]["egress"]
    assert rule not in (policies["quartet-reward"]["spec"]["egress"] or [])
    notes = texts(values)["quartet/templates/NOTES.txt"]
    assert ("may connect to any address on port 6380" in notes) == (not cidrs)


@pytest.mark.parametrize("source", ["chart", "cert-manager"])
def test_the_values_for_openshift_name_the_authority_of_the_gateway(source: str) -> None:
    page = (Path(__file__).parents[2] / "docs/kubernetes.md").read_text(encoding="utf-8")
    section = page.partition("### OpenShift\n")[2].partition("\n## ")[0]
    values = changed("cpu-kind")
    for block in re.findall(r"```yaml\n(.*?)```", section, re.DOTALL):
        values |= yaml.safe_load(block)
    values["security"]["tls"] = {"source": source}
    result = manifests(values)
    annotations = of_kind(result, "Ingress")["quartet-gateway"]["metadata"]["annotations"]
    assert annotations["route.openshift.io/termination"] == "reencrypt"
    authority = annotations["route.openshift.io/destination-ca-certificate-secret"]
    if source == "chart":
        assert "tls.crt" in of_kind(result, "Secret")[authority]["data"]
    else:
        secrets = {item["spec"]["secretName"]: item for item in of_kind(result, "Certificate").values()}
        assert secrets[authority]["spec"]["isCA"]
    labels = of_kind(result, "NetworkPolicy")["quartet-dns"]["spec"]["egress"][0]["to"][0]["podSelector"]["matchLabels"]
    assert labels == {"dns.operator.openshift.io/daemonset-dns": "default"}
