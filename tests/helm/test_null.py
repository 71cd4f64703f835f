"""Null takes a default of the chart away: refused where it cannot do without, and what it means elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import helm_python
import pytest

from tests.every_case import every_case
from tests.helm.rendering import Values, changed, chart, example, manifests, of_kind, with_keys
from tests.helm.test_components import containers
from tests.helm.test_values import refusal

EMPTY = ("", [], {}, None)
OF_THE_USER = {"resources", "labels", "namespace", "pods"}
"""Maps whose keys are the user's own."""
MAY_BE_NONE = {"defaults__gpus", "monitoring__dashboard__labels"}


def defaults(node: Values, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every default of the chart, by its path."""
    for key, value in node.items():
        yield path + key, value
        if isinstance(value, dict) and key not in OF_THE_USER:
            yield from defaults(value, f"{path}{key}__")


def is_needed(path: str, value: Any) -> bool:
    """Return whether the chart cannot do without a default."""
    keys = path.split("__")
    if keys[0] == "components" and len(keys) > 1:
        # What a component does not say, `defaults` do; but not of these.
        return path.endswith("__backoffLimit") or (len(keys) > 3 and value not in EMPTY and keys[2] != "image")
    return value not in EMPTY and keys[-1] != "pods" and path not in MAY_BE_NONE and keys[:2] != ["config", "run"]


DEFAULTS = dict(defaults(chart().values))
NEEDED = [path for path, value in DEFAULTS.items() if is_needed(path, value)]
EMPTY_ANYWAY = [path for path, value in DEFAULTS.items() if value in EMPTY]


def kept(values: Values) -> list[dict[str, Any]]:
    """Return what is rendered alike each time."""
    return [item for item in manifests(values) if item["kind"] != "Secret"]


@every_case("path", NEEDED)
def test_what_is_needed_cannot_be_taken_away(path: str) -> None:
    *above, last = path.split("__")
    with pytest.raises(helm_python.HelmValuesError) as error:
        chart().validate_schema(changed("cpu-kind", **{path: None}))
    place = "".join(f"/{key}" for key in above)
    assert f"at '{place}': missing propert" in str(error.value)
    assert f"'{last}'" in str(error.value)


def test_what_is_empty_anyway_may_be_null() -> None:
    values = {"config": example("single-node-4-gpus")["config"]}
    assert kept(with_keys(values, **dict.fromkeys(EMPTY_ANYWAY))) == kept(values)


def test_a_component_that_is_null_is_switched_off() -> None:
    off = changed("cpu-kind", components__gateway={"enabled": False})
    assert kept(changed("cpu-kind", components__gateway=None)) == kept(off)


@every_case("name", ["actor", "critic", "reference", "orchestrator"])
def test_a_component_that_the_run_needs_cannot_be_null(name: str) -> None:
    assert f"no enabled component has the role {name}" in refusal(changed("cpu-kind", **{f"components__{name}": None}))


def test_what_a_component_leaves_out_the_defaults_say() -> None:
    values = changed("single-node-4-gpus", image={"registry": "registry.example.com"}, components__actor__gpus=None)
    values["components"]["orchestrator"] = {"image": None, "resources": {"limits": None}}
    result = containers(values)
    assert "nvidia.com/gpu" not in result["actor"]["resources"]["limits"]
    assert result["orchestrator"]["image"] == "registry.example.com/quartet:0.1.0-cuda"
    assert result["orchestrator"]["resources"] == {"requests": {"cpu": "1", "memory": "2Gi"}}


def test_without_labels_of_pods_every_pod_of_the_namespace_is_meant() -> None:
    result = of_kind(manifests(changed("cpu-kind", networkPolicy__dns__pods=None)), "NetworkPolicy")
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}
    assert result["quartet-dns"]["spec"]["egress"][0]["to"] == [peer]
