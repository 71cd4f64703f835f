"""CPU, memory and ephemeral storage of every container: presets, values that replace them, and validity under a quota."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from helm import resource_presets, values_schema
from quartet.planner.helm_values import HOST_FRACTION, HostMemory
from quartet.planner.roofline import Parallel
from tests.helm.rendering import EXAMPLES, Manifest, Values, changed, example, manifests, pod_templates, refusal
from tests.helm.test_components import TURNS, containers

UNITS = {"": 1, "m": 0.001, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
MIB = 2**20
PRESETS: dict[str, Any] = json.loads(resource_presets.presets())


def amount(quantity: str | int) -> float:
    """Return the number that a quantity of Kubernetes stands for."""
    text = str(quantity)
    number = text.rstrip("kMGTPim")
    return float(number) * UNITS[text[len(number) :]]


def all_containers(values: Values) -> Iterator[tuple[str, Manifest]]:
    """Yield every container, also of hooks and init containers, with the name of its object."""
    for name, template in pod_templates(manifests(values)):
        for kind in ("initContainers", "containers"):
            for container in template["spec"].get(kind, []):
                yield f"{name} {container['name']}", container


@pytest.mark.parametrize("values", [*map(example, EXAMPLES), changed("cpu-kind", **TURNS)])
def test_every_container_is_valid_under_a_quota(values: Values) -> None:
    for container, manifest in all_containers(values):
        resources = manifest["resources"]
        for resource in ("cpu", "memory", "ephemeral-storage"):
            assert resource in resources["limits"], f"{container}: failed quota: must specify limits.{resource}"
            assert resource in resources["requests"], f"{container}: failed quota: must specify requests.{resource}"
        for resource, request in resources["requests"].items():
            assert amount(request) <= amount(resources["limits"][resource]), f"{container}: {resource}"


def test_every_container_has_a_limit_of_memory_if_values_remove_the_defaults() -> None:
    none = {"limits": None}
    values = changed("single-node-4-gpus", tests={"resources": none}, loader={"enabled": True, "resources": none})
    values["downloads"]["resources"] = none
    for container, manifest in all_containers(values):
        assert "memory" in manifest["resources"]["limits"], container


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_files_of_a_container_fit_its_ephemeral_storage(name: str) -> None:
    for pod, template in pod_templates(manifests(example(name))):
        volumes = [volume.get("emptyDir") for volume in template["spec"]["volumes"]]
        on_disk = [volume for volume in volumes if volume is not None and volume.get("medium") != "Memory"]
        (container,) = template["spec"]["containers"]
        limit = amount(container["resources"]["limits"]["ephemeral-storage"])
        assert sum(amount(volume["sizeLimit"]) for volume in on_disk) < limit, pod


@pytest.mark.parametrize("size", resource_presets.MODELS)
def test_a_preset_gives_the_memory_of_the_planner(size: str) -> None:
    values = changed("single-node-4-gpus", defaults__resourcesPreset=size)
    # A model with a GPU and one without of each kind, trained and frozen; the sizes take turns.
    first = list(PRESETS).index(size) % 2
    roles = ("actor", "critic", "reference", "reward")
    values["components"] = {role: {"gpus": (index + first) % 2} for index, role in enumerate(roles)}
    result = containers(values)
    for role, component in values["components"].items():
        entry = PRESETS[size]["gpu" if component["gpus"] else "cpu"]["roles"][role]
        expected = rounded(memory_of(entry).pod_bytes(1))
        assert amount(result[role]["resources"]["limits"]["memory"]) == expected * MIB, role
        assert result[role]["resources"]["requests"]["memory"] == result[role]["resources"]["limits"]["memory"]


def memory_of(entry: dict[str, int]) -> HostMemory:
    """Return the memory of a role of a preset, whose parts include what a container keeps free."""
    return HostMemory(**{name: HOST_FRACTION * size for name, size in entry.items()})


def rounded(mebibytes: float) -> int:
    """Return MiB as the chart rounds them: to GiB, or to 64 MiB below 4 GiB."""
    step = 1024 if math.ceil(mebibytes) > 4096 else 64
    return step * math.ceil(mebibytes / step)


@pytest.mark.parametrize(
    ("parallel", "offload"), [({}, False), ({"replicate": 2}, False), ({"tensor": 2}, False), ({"replicate": 2}, True)]
)
def test_the_nodes_of_a_group_divide_the_memory_as_in_the_planner(parallel: dict[str, int], offload: bool) -> None:
    service: dict[str, Any] = {"parallel": parallel}
    if offload:
        service["offload"] = {"optimizer": True}
    values = changed("two-node-actor", config__services={"actor": service}, components__actor__sharedMemory="64Gi")
    memory = memory_of(PRESETS["14b"]["gpu"]["roles"]["actor"])
    sizes = Parallel(parallel.get("replicate", 1), 1, parallel.get("tensor", 1))
    expected = rounded(memory.pod_bytes(8, 2, sizes, offload=offload)) * MIB + 64 * 2**30
    assert amount(containers(values)["actor"]["resources"]["limits"]["memory"]) == expected


@pytest.mark.parametrize("steps", [0, 2])
def test_an_actor_with_generators_has_memory_for_the_versions_that_it_publishes(steps: int) -> None:
    memory = memory_of(PRESETS["3b"]["gpu"]["roles"]["actor"])
    values = changed("vllm-generators", config__rollout__max_off_policy_steps=steps)
    result = containers(values)["actor"]["resources"]["limits"]["memory"]
    assert amount(result) == rounded(memory.pod_bytes(1, published=2 + steps)) * MIB + 8 * 2**30


def test_the_ranks_of_a_pod_multiply_its_cpus() -> None:
    result = containers(example("node-8-gpus"))
    assert result["actor"]["resources"]["requests"]["cpu"] == "4000m"
    assert result["actor"]["resources"]["limits"]["cpu"] == "16000m"
    assert result["reward"]["resources"]["limits"]["cpu"] == "8000m"


def test_a_pod_with_two_roles_has_the_memory_of_both() -> None:
    roles = PRESETS["tiny"]["cpu"]["roles"]
    both = sum(memory_of(roles[role]).pod_bytes(1) for role in ("critic", "reward"))
    result = containers(example("cpu-kind"))["critic"]["resources"]["limits"]["memory"]
    assert amount(result) == rounded(both) * MIB


@pytest.mark.parametrize(
    ("reward", "models"),
    [
        ({"source": "function", "function": "m:f", "tokenizer": "models/policy"}, 0),
        ({"source": "ensemble", "parts": [{"name": "a", "model": "models/a"}, {"name": "b", "model": "models/b"}]}, 2),
    ],
)
def test_the_memory_of_a_reward_follows_its_models(reward: dict[str, Any], models: int) -> None:
    values = changed("single-node-4-gpus")
    values["config"]["reward"] = reward
    entry = PRESETS["3b"]["gpu"]["roles"]["reward"]
    memory = memory_of(entry | {"load": models * entry["load"]}).pod_bytes(1)
    assert amount(containers(values)["reward"]["resources"]["limits"]["memory"]) == rounded(memory) * MIB


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"limits": {"memory": "96Gi"}}, ("96Gi", "96Gi", "2000m", "8000m")),
        ({"requests": {"memory": "96Gi"}}, ("96Gi", "96Gi", "2000m", "8000m")),
        ({"requests": {"cpu": "4"}, "limits": {"memory": "96Gi"}}, ("96Gi", "96Gi", "4", None)),
        ({"requests": {"memory": "9Gi"}, "limits": {"memory": "96Gi", "cpu": "3"}}, ("9Gi", "96Gi", "3", "3")),
    ],
)
def test_each_given_resource_replaces_that_of_the_preset(
    given: dict[str, Any], expected: tuple[str | None, ...]
) -> None:
    resources = containers(changed("single-node-4-gpus", components__critic={"resources": given}))["critic"][
        "resources"
    ]
    requests, limits = resources["requests"], resources["limits"]
    assert (requests["memory"], limits["memory"], requests["cpu"], limits.get("cpu")) == expected


def test_a_model_service_without_memory_is_refused() -> None:
    message = refusal(changed("single-node-4-gpus", defaults__resourcesPreset=""))
    assert "components.actor.resources: no memory, and no resourcesPreset; set defaults.resourcesPreset" in message
    assert "quartet plan CONFIG --gpus GPUS --helm-values FILE" in message


@pytest.mark.parametrize(
    ("maxmemory", "requested", "limit"),
    [("6gb", 6144 + 64, 12_288 + 64), ("256mb", 256 + 64, 512 + 64), ("1000000000", 954 + 64, 1908 + 64)],
)
def test_the_memory_of_redis_follows_from_maxmemory(maxmemory: str, requested: int, limit: int) -> None:
    resources = containers(changed("cpu-kind", redis__maxmemory=maxmemory, redis__persistence={"size": "20Gi"}))[
        "redis"
    ]["resources"]
    assert amount(resources["requests"]["memory"]) == requested * MIB
    assert amount(resources["limits"]["memory"]) == limit * MIB


def test_the_committed_presets_are_those_of_the_planner() -> None:
    assert values_schema.RESOURCES.read_text(encoding="utf-8") == resource_presets.presets()
