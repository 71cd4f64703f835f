"""Values of the Helm chart from a plan, and the host memory in them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from quartet.config.loading import load_config
from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.errors import ConfigError
from quartet.model_files.shape import model_shape
from quartet.planner.gpus import parse_gpus
from quartet.planner.helm_values import GPU_PROCESS_BYTES, HOST_FRACTION, HostMemory, helm_values, host_memory
from quartet.planner.plan import make_plan
from quartet.planner.roofline import Parallel
from quartet.planner.workload import read_description, role_work
from tests.helm.rendering import example, manifests, pod_templates, with_keys
from tests.unit.planner.test_plan import EXAMPLES, run

GIB = 2**30


@cache
def values_of(name: str, gpus: str, nodes: int = 1) -> tuple[Config, dict[str, Any]]:
    """Return the config of an example, and the values for these GPUs."""
    config = load_config(EXAMPLES / f"{name}.yaml")
    plan = make_plan(config, parse_gpus(gpus, nodes), separate_pods=True)
    return config, yaml.safe_load(helm_values(config, plan, "quartet plan"))


@pytest.mark.parametrize(
    ("name", "gpus", "nodes"),
    [("qwen2.5-0.5b", "RTX4090-24GB", 1), ("qwen2.5-7b", "8xH100-80GB", 1), ("llama-3.1-70b", "8xH100-80GB", 4)],
)
def test_the_values_of_a_plan_give_pods_that_have_its_gpus(name: str, gpus: str, nodes: int) -> None:
    config, planned = values_of(name, gpus, nodes)
    given = config.model_dump(mode="json", exclude_unset=True)
    given["rollout"].pop("generators", None)
    values = with_keys(example("single-node-4-gpus"), config=_merged(given, planned["config"]))
    values["components"] = _merged(values["components"], planned["components"])
    values["defaults"].pop("resourcesPreset")
    # The examples name the models of this repository.
    values["checks"] = {"paths": False}
    if config.reward.source == "function":
        values["components"]["reward"] = {
            "gpus": 0,
            "resources": {"limits": {"memory": "1Gi"}},
        }
    used = 0
    for _, template in pod_templates(manifests(values)):
        (container,) = template["spec"]["containers"]
        if container["name"] in planned["components"]:
            expected = planned["components"][container["name"]]
            assert container["resources"]["limits"]["memory"] == expected["resources"]["limits"]["memory"]
            used += (
                container["resources"]["limits"]["nvidia.com/gpu"]
                * expected.get("nodes", 1)
                * expected.get("replicas", 1)
            )
    count = int(gpus.partition("x")[0]) if "x" in gpus else 1
    assert 0 < used <= count * nodes


def test_roles_that_share_a_gpu_share_a_pod() -> None:
    _, planned = values_of("qwen2.5-0.5b", "RTX4090-24GB")
    assert planned["components"]["actor"]["roles"] == ["actor", "reward", "reference"]
    assert planned["components"]["reward"] == planned["components"]["reference"] == {"enabled": False}


def test_roles_of_several_gpus_have_separate_pods() -> None:
    config, planned = values_of("qwen2.5-7b", "8xH100-80GB")
    shared = make_plan(config, parse_gpus("8xH100-80GB"))
    with pytest.raises(ConfigError, match="share GPUs, which pods of several GPUs, and generators, cannot"):
        helm_values(config, shared, "quartet plan")
    for component in planned["components"].values():
        assert component.get("gpus", 1) == 1 or "roles" not in component


def test_generators_have_the_image_of_their_engine() -> None:
    _, planned = values_of("qwen2.5-7b", "8xH100-80GB")
    assert planned["components"]["generator"]["image"] == {"variant": "vllm"}


def test_too_few_gpus_for_pods_are_an_error() -> None:
    config = load_config(EXAMPLES / "qwen2.5-7b.yaml")
    with pytest.raises(ConfigError, match="too few devices for pods, which cannot share GPUs"):
        make_plan(config, parse_gpus("H100-80GB"), separate_pods=True)


def test_without_gpus_each_role_has_a_pod_with_the_memory_of_its_device(tmp_path: Path) -> None:
    output = tmp_path / "values.yaml"
    arguments = ("--set", "actor.dtype=float32", "--set", "reward.dtype=float32", "--set", "rollout.prompts_per_step=1")
    try:
        run(str(EXAMPLES / "qwen2.5-0.5b.yaml"), "--gpus", "cpu", "--helm-values", str(output), *arguments)
    except ConfigError as error:
        if "does not fit" not in str(error):
            raise
        pytest.skip("this machine has too little memory for the plan")
    components = yaml.safe_load(output.read_text())["components"]
    assert {name: each["gpus"] for name, each in components.items()} == {"actor": 0, "reward": 0, "reference": 0}
    # Weights, gradients and moments of 494 million parameters in float32, and a copy of weights and moments.
    assert int(components["actor"]["resources"]["limits"]["memory"].removesuffix("Gi")) > 0.49 * (16 + 12)


def test_the_file_of_the_values_must_be_new(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^--helm-values {tmp_path}: exists already; expected a new file"):
        run(str(EXAMPLES / "qwen2.5-0.5b.yaml"), "--gpus", "RTX4090-24GB", "--helm-values", str(tmp_path))


def test_an_actor_needs_host_memory_for_a_copy_of_weights_and_optimizer() -> None:
    config = load_config(EXAMPLES / "qwen2.5-7b.yaml")
    shape = model_shape(read_description("actor.model", config.actor.model), "actor")
    memory = host_memory(role_work(config, "actor.model", Role.ACTOR, shape), on_gpu=True)
    # Weights in bfloat16, and master weights and two moments in float32.
    assert memory.state == pytest.approx((2 + 4 + 8) * shape.parameters)
    assert memory.pod_bytes(1) == pytest.approx((GPU_PROCESS_BYTES + memory.state) / HOST_FRACTION)
    frozen = host_memory(role_work(config, "reference.model", Role.REFERENCE, shape), on_gpu=True)
    assert frozen.pod_bytes(1) == pytest.approx((GPU_PROCESS_BYTES + 2 * shape.parameters) / HOST_FRACTION)


def test_the_pods_of_a_group_divide_the_state_unless_each_has_a_copy() -> None:
    memory = HostMemory(process=1.0, load=10.0, state=70.0, moments=40.0, version=10.0)
    assert memory.pod_bytes(8, 2) * HOST_FRACTION == pytest.approx(8 + 35)
    assert memory.pod_bytes(8, 2, Parallel(2, 8)) * HOST_FRACTION == pytest.approx(8 + 70)
    assert memory.pod_bytes(8, 2, published=2) * HOST_FRACTION == pytest.approx(8 + 35 + 10)
    assert memory.pod_bytes(8, 2, Parallel(2, 8), published=2) * HOST_FRACTION == pytest.approx(8 + 70 + 20)
    assert memory.pod_bytes(8, 2, offload=True) * HOST_FRACTION == pytest.approx(8 + 35 + 20)
    # Each rank of a tensor parallel group reads the whole model.
    assert memory.pod_bytes(8, 2, Parallel(1, 8, 2)) * HOST_FRACTION == pytest.approx(8 + 80)


def _merged(tree: dict[str, Any], layer: dict[str, Any]) -> dict[str, Any]:
    result = dict(tree)
    for key, value in layer.items():
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(value, dict) and isinstance(old, dict) else value
    return result
