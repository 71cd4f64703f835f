"""Null removes a default of the chart. Required defaults refuse null; others define its meaning."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import helm_python
import pytest

from tests.every_case import every_case
from tests.helm.rendering import Values, changed, chart, example, manifests, of_kind, refusal, with_keys
from tests.helm.test_components import containers

EMPTY = ("", [], {}, None)
USER_MAPS = {"resources", "labels", "namespace", "pods"}
"""Maps whose keys the user chooses."""
OPTIONAL = {"defaults__gpus", "monitoring__dashboard__labels"}


def defaults(node: Values, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every default of the chart with its path."""
    for key, value in node.items():
        yield path + key, value
        if isinstance(value, dict) and key not in USER_MAPS:
            yield from defaults(value, f"{path}{key}__")


def is_required(path: str, value: Any) -> bool:
    """Return whether the chart requires a default."""
    keys = path.split("__")
    if keys[0] == "components" and len(keys) > 1:
        # `defaults` supply most keys of a component; these are the others.
        return path.endswith("__backoffLimit") or (len(keys) > 3 and value not in EMPTY and keys[2] != "image")
    return value not in EMPTY and keys[-1] != "pods" and path not in OPTIONAL and keys[:2] != ["config", "run"]


DEFAULTS = dict(defaults(chart().values))
REQUIRED = [path for path, value in DEFAULTS.items() if is_required(path, value)]
EMPTY_DEFAULTS = [path for path, value in DEFAULTS.items() if value in EMPTY]


def without_secrets(values: Values) -> list[dict[str, Any]]:
    """Return all objects except Secrets, whose content is random."""
    return [item for item in manifests(values) if item["kind"] != "Secret"]


@every_case("depth", sorted({path.count("__") for path in REQUIRED}))
def test_a_required_default_refuses_null(depth: int) -> None:
    paths = [path for path in REQUIRED if path.count("__") == depth]
    with pytest.raises(helm_python.HelmValuesError) as error:
        chart().validate_schema(changed("cpu-kind", **dict.fromkeys(paths)))
    reported = {
        f"{parent}/{name}"
        for parent, names in re.findall(r"at '(\S*)': missing propert(?:y|ies) (.*)", str(error.value))
        for name in re.findall(r"'(\w+)'", names)
    }
    assert {"/" + path.replace("__", "/") for path in paths} - reported == set()


def test_null_for_an_empty_default_changes_nothing() -> None:
    values = {"config": example("single-node-4-gpus")["config"], "defaults": {"resourcesPreset": "3b"}}
    nulls = {path: None for path in EMPTY_DEFAULTS if path != "defaults__resourcesPreset"}
    assert without_secrets(with_keys(values, **nulls)) == without_secrets(values)


def test_a_null_component_is_disabled() -> None:
    disabled = changed("cpu-kind", components__gateway={"enabled": False})
    assert without_secrets(changed("cpu-kind", components__gateway=None)) == without_secrets(disabled)


@every_case("name", ["actor", "critic", "reference", "orchestrator"])
def test_a_required_component_cannot_be_null(name: str) -> None:
    assert f"no enabled component has the role {name}" in refusal(changed("cpu-kind", **{f"components__{name}": None}))


def test_a_null_in_a_component_uses_the_defaults() -> None:
    values = changed("single-node-4-gpus", image={"registry": "registry.example.com"}, components__actor__gpus=None)
    values["components"]["orchestrator"] = {"image": None, "resources": {"limits": None}}
    result = containers(values)
    assert "nvidia.com/gpu" not in result["actor"]["resources"]["limits"]
    assert result["orchestrator"]["image"] == "registry.example.com/quartet:0.1.0-cuda"
    assert result["orchestrator"]["resources"] == {
        "requests": {"cpu": "1", "memory": "2Gi", "ephemeral-storage": "1Gi"},
        "limits": {"memory": "2Gi", "ephemeral-storage": "2Gi"},
    }


def test_without_pod_labels_every_pod_of_the_namespace_is_permitted() -> None:
    result = of_kind(manifests(changed("cpu-kind", networkPolicy__dns__pods=None)), "NetworkPolicy")
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}
    assert result["quartet-dns"]["spec"]["egress"][0]["to"] == [peer]
