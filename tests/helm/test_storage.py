"""Claims, volumes and mounts of models, data and runs, and what the examples need from the cluster."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import helm_python
import pytest

from tests.every_case import every_case
from tests.helm.rendering import (
    CHART,
    EXAMPLES,
    Manifest,
    Values,
    changed,
    chart,
    example,
    manifests,
    of_kind,
    pod_templates,
    texts,
    with_keys,
)
from tests.helm.test_components import files, pods

# The smallest values: a config and the size of the models, and defaults otherwise.
SMALLEST: Values = {"config": example("cpu-kind")["config"], "defaults": {"resourcesPreset": "tiny"}}


def claims(values: Values) -> dict[str, Manifest]:
    """Return the specs of the claims of the chart."""
    result = of_kind(manifests(values), "PersistentVolumeClaim")
    return {name: item["spec"] for name, item in result.items()}


def mounts(spec: Manifest) -> dict[str, tuple[str, str, bool]]:
    """Return the mounts of claims in the first container: {path: (claim, subfolder, whether it is read-only)}."""
    claim_of = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in spec["volumes"]
        if "persistentVolumeClaim" in volume
    }
    return {
        mount["mountPath"]: (claim_of[mount["name"]], mount.get("subPath", ""), mount.get("readOnly", False))
        for mount in spec["containers"][0]["volumeMounts"]
        if mount["name"] in claim_of
    }


def test_by_default_one_claim_for_one_node_has_all_folders() -> None:
    (claim,) = claims(SMALLEST).items()
    assert claim == (
        "quartet-storage",
        {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "500Gi"}}},
    )
    assert mounts(pods(SMALLEST)["orchestrator"]) == {
        "/quartet/models": ("quartet-storage", "models", True),
        "/quartet/data": ("quartet-storage", "data", True),
        "/quartet/runs": ("quartet-storage", "runs", False),
    }
    assert mounts(pods(SMALLEST)["reference"]) == {"/quartet/models": ("quartet-storage", "models", True)}


def test_the_kubelet_may_create_the_folders_of_a_new_volume() -> None:
    # It cannot if the whole volume is read-only.
    for spec in pods(SMALLEST).values():
        for volume in spec["volumes"]:
            assert "readOnly" not in volume.get("persistentVolumeClaim", {})


def test_several_nodes_need_two_values() -> None:
    values = with_keys(SMALLEST, storage__claim={"accessModes": ["ReadWriteMany"], "storageClassName": "nfs"})
    (claim,) = claims(values).values()
    assert claim["accessModes"] == ["ReadWriteMany"]
    assert claim["storageClassName"] == "nfs"


def test_a_folder_with_a_size_has_its_own_claim_with_the_class_and_modes_of_the_common_one() -> None:
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": "nfs"}
    values = with_keys(SMALLEST, storage={"claim": common, "runs": {"size": "2Ti"}, "models": {"size": "1Ti"}})
    values["storage"]["models"] |= {"storageClassName": "disk", "accessModes": ["ReadOnlyMany"], "volumeName": "filled"}
    result = claims(values)
    assert result["quartet-runs"] == {**common, "resources": {"requests": {"storage": "2Ti"}}}
    assert result["quartet-models"] == {
        "storageClassName": "disk",
        "accessModes": ["ReadOnlyMany"],
        "volumeName": "filled",
        "resources": {"requests": {"storage": "1Ti"}},
    }
    assert set(result) == {"quartet-runs", "quartet-models", "quartet-storage"}
    assert mounts(pods(values)["orchestrator"]) == {
        "/quartet/models": ("quartet-models", "", True),
        "/quartet/data": ("quartet-storage", "data", True),
        "/quartet/runs": ("quartet-runs", "", False),
    }


def test_without_a_folder_the_common_claim_is_not_created() -> None:
    names = {name: {"existingClaim": name} for name in ("models", "data", "runs")}
    assert claims(with_keys(SMALLEST, storage=names)) == {}
    assert claims(with_keys(SMALLEST, storage={"claim": {"existingClaim": "own"}})) == {}


@every_case("path, name", [("storage__claim", "quartet-storage"), ("storage__models", "quartet-models")])
def test_a_dash_stands_for_a_volume_without_a_class(path: str, name: str) -> None:
    claim = {"size": "1Gi", "volumeName": "filled", "storageClassName": "-"}
    assert claims(with_keys(SMALLEST, **{path: claim}))[name]["storageClassName"] == ""
    values = with_keys(SMALLEST, redis={"persistence": {"storageClassName": "-"}})
    (template,) = of_kind(manifests(values), "StatefulSet")["quartet-redis"]["spec"]["volumeClaimTemplates"]
    assert template["spec"]["storageClassName"] == ""


CASES: dict[str, Values] = {
    **{name: example(name) for name in EXAMPLES},
    "smallest": SMALLEST,
    "one existing claim": with_keys(SMALLEST, storage={"claim": {"existingClaim": "own"}}),
    "the same claim by three names": with_keys(
        SMALLEST,
        storage={
            "claim": {"existingClaim": "own"},
            "models": {"existingClaim": "own", "subPath": "a"},
            "data": {"existingClaim": "own"},
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_pod_has_one_volume_for_each_claim(case: str) -> None:
    """Some kubelets never start a pod with two volumes of one claim (Kubernetes pull request 122140)."""
    for name, template in pod_templates(manifests(CASES[case])):
        volumes = template["spec"]["volumes"]
        used = Counter(
            volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume
        )
        assert set(used.values()) <= {1}, name
        names = [volume["name"] for volume in volumes]
        assert len(set(names)) == len(names), name
        for container in (*template["spec"]["containers"], *template["spec"].get("initContainers", [])):
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(names) | {"data"}, name


def test_folders_of_one_existing_claim_share_a_volume_that_is_writable_for_a_pod_that_writes() -> None:
    spec = pods(CASES["the same claim by three names"])["orchestrator"]
    assert mounts(spec) == {
        "/quartet/models": ("own", "a", True),
        "/quartet/data": ("own", "", True),
        "/quartet/runs": ("own", "runs", False),
    }
    reference = pods(example("node-8-gpus"))["reference"]
    (volume,) = (item for item in reference["volumes"] if item["name"] == "models")
    # A volume that several nodes only read.
    assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}


@every_case("modes", [["ReadWriteOncePod"], []])
def test_a_claim_of_several_pods_has_modes_for_them(modes: list[str]) -> None:
    with pytest.raises(helm_python.HelmError, match="/storage/claim/accessModes"):
        manifests(with_keys(SMALLEST, storage__claim__accessModes=modes))


def test_the_notes_and_the_readme_name_what_uninstall_keeps() -> None:
    for name in EXAMPLES:
        result = manifests(example(name))
        kept = set(of_kind(result, "PersistentVolumeClaim"))
        for item in of_kind(result, "PersistentVolumeClaim").values():
            assert item["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
        for stateful_set, item in of_kind(result, "StatefulSet").items():
            templates = item["spec"].get("volumeClaimTemplates", [])
            kept |= {f"{template['metadata']['name']}-{stateful_set}-0" for template in templates}
        notes = texts(example(name))["quartet/templates/NOTES.txt"]
        listed = re.search(r"delete persistentvolumeclaim (.+)", notes)
        assert (set(listed[1].split()) if listed else set()) == kept
    readme = (CHART / "README.md").read_text(encoding="utf-8")
    for claim in ("quartet-storage", "data-quartet-redis-0"):
        assert f"`{claim}`" in readme


def test_the_notes_warn_of_a_volume_for_one_node_under_a_group_of_several() -> None:
    values = changed("two-node-actor", storage={})
    assert "actor has pods on 2 nodes, but the claim quartet-storage is ReadWriteOnce" in _notes(values)
    many = with_keys(values, storage__claim__accessModes=["ReadWriteMany"])
    assert "but the claim" not in _notes(many)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_names_every_object_that_it_needs(name: str) -> None:
    text = (CHART / "examples" / f"{name}.yaml").read_text(encoding="utf-8")
    header = " ".join(line.removeprefix("# ") for line in text.partition("\nconfig:")[0].splitlines())
    needs = header.partition("Needs: ")[2]
    assert needs
    for kind, other in required_objects(manifests(example(name))):
        assert re.search(rf"\b{re.escape(other)}\b", needs), f"{kind} {other}"


def required_objects(result: list[Manifest]) -> set[tuple[str, str]]:
    """Return the kind and name of each object that manifests refer to and do not contain."""
    own = {item["metadata"]["name"] for item in result}
    own |= {item["spec"]["secretName"] for item in result if item["kind"] == "Certificate"}
    kinds = {
        "priorityClassName": "PriorityClass",
        "runtimeClassName": "RuntimeClass",
        "storageClassName": "StorageClass",
        "ingressClassName": "IngressClass",
        "claimName": "claim",
        "secretName": "Secret",  # pragma: allowlist secret - a kind of object
    }
    needed = set()
    for item in result:
        if item["kind"] == "LeaderWorkerSet":
            needed.add(("controller", "LeaderWorkerSet"))
        for path, value in _leaves(item):
            key = path[-1]
            if key == "kueue.x-k8s.io/queue-name":
                needed |= {("LocalQueue", value), ("controller", "Kueue")}
            if path[0] != "spec":
                continue
            if key in kinds:
                needed.add((kinds[key], value))
            elif key == "name" and {"imagePullSecrets", "secret", "configMap", "credentials"} & set(
                map(str, path[-3:-1])
            ):
                needed.add(("Secret or ConfigMap", value))
    return {(kind, value) for kind, value in needed if value not in own}


def test_a_missing_need_would_be_noticed() -> None:
    assert {
        ("PriorityClass", "training"),
        ("StorageClass", "shared"),
        ("IngressClass", "nginx"),
        ("claim", "datasets"),
        ("Secret or ConfigMap", "registry-example"),
    } <= required_objects(manifests(example("node-8-gpus")))
    assert ("Secret or ConfigMap", "rewards") in required_objects(manifests(example("two-node-actor")))
    assert {("LocalQueue", "training"), ("controller", "Kueue"), ("controller", "LeaderWorkerSet")} <= required_objects(
        manifests(example("leader-worker-set"))
    )


def test_the_pod_of_helm_test_fits_a_quota_and_a_tainted_machine() -> None:
    resources = pods(example("cpu-kind"))["test"]["containers"][0]["resources"]
    # A quota may require each of them.
    assert {(kind, key) for kind in ("requests", "limits") for key in resources[kind]} == {
        (kind, key) for kind in ("requests", "limits") for key in ("cpu", "memory", "ephemeral-storage")
    }
    own = {"requests": {"cpu": "1"}, "limits": {"cpu": "2", "memory": "1Gi"}}
    values = changed("single-node-4-gpus", tests__resources=own, components__gateway={"enabled": False})
    spec = pods(values)["test"]
    assert spec["containers"][0]["resources"]["limits"].items() >= own["limits"].items()
    assert spec["tolerations"] == values["defaults"]["tolerations"]
    assert "runtimeClassName" not in spec


def test_the_defaults_give_the_fill_pods_resources_that_fit_a_quota() -> None:
    for path in ("downloads", "loader"):
        resources = chart().values[path]["resources"]
        assert all(key in resources[kind] for kind in ("requests", "limits") for key in ("cpu", "memory"))


def _notes(values: Values) -> str:
    return texts(values)["quartet/templates/NOTES.txt"]


def _leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _leaves(value, (*path, index))
    elif path:
        yield path, node


def test_actor_and_generators_of_a_node_share_a_folder_if_the_values_name_one() -> None:
    values = changed("vllm-generators", components__generator__nodeDirectory="/run/quartet")
    folder = {"path": "/run/quartet", "type": "DirectoryOrCreate"}
    sharing = set()
    for name, spec in pods(values).items():
        for volume in spec["volumes"]:
            assert "hostPath" not in volume or volume == {"name": "sockets", "hostPath": folder}
        for mount in spec["containers"][0]["volumeMounts"]:
            if mount["name"] == "sockets":
                assert mount == {"name": "sockets", "mountPath": "/quartet/sockets"}
                sharing.add(name)
    assert sharing == {"actor", "generator"}
    assert "share_directory: /quartet/sockets" in files(values)["deployment.yaml"]
    # By default, and if the actor generates, no pod needs more than Pod Security "restricted" allows.
    for other in (changed("vllm-generators"), with_keys(values, components__generator={"enabled": False})):
        other["config"].get("rollout", {}).pop("engine", None)
        other["components"]["generator"].get("image", {}).pop("variant", None)
        assert "hostPath" not in str(pods(other))
        assert "share_directory" not in files(other)["deployment.yaml"]
