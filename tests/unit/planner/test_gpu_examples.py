"""examples/gpus: the planner finds a plan for each config, and the placement that the config has fits its devices."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from quartet.config.loading import load_config
from quartet.config.root import Config
from quartet.contract.status import TRAINED_ROLES, Role
from quartet.planner.device_memory import (
    actor_generation_memory,
    add_parts,
    frozen_memory,
    generator_memory,
    trained_memory,
)
from quartet.planner.gpus import Cluster, parse_gpus
from quartet.planner.placement import USABLE_FRACTION, Group, Placed, Placement
from quartet.planner.plan import make_plan
from quartet.planner.roofline import Parallel
from quartet.planner.workload import RoleWork, Workload, read_workload

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples/gpus").glob("*.yaml"))
SHAPES = {
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "Qwen/Qwen2.5-32B-Instruct": "qwen2.5-32b",
    "meta-llama/Llama-3.1-70B-Instruct": "llama-3.1-70b",
    "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2": "llama-3.1-8b",
}
"""Folders of examples/plan/models by the name of the model on the hub."""
SCORE_TOKENS = 16_384


@pytest.fixture(autouse=True)
def _hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name, folder in SHAPES.items():
        cached = tmp_path / f"hub/models--{name.replace('/', '--')}"
        snapshot = cached / "snapshots" / ("a" * 40)
        (cached / "refs").mkdir(parents=True)
        (cached / "refs/main").write_text("a" * 40)
        snapshot.mkdir(parents=True)
        shutil.copy(ROOT / f"examples/plan/models/{folder}/config.json", snapshot)


def cluster_of(path: Path) -> Cluster:
    """Return the devices of the command in the first line of an example."""
    match = re.search(rf": quartet plan {path.relative_to(ROOT)} --gpus (\S+)(?: --nodes (\d+))?\n", path.read_text())
    assert match is not None
    return parse_gpus(match[1], int(match[2] or 1))


def placed_as_configured(config: Config, cluster: Cluster, load: Workload) -> Placed:
    """Return the placement of a config, with the memory that the planner expects."""
    placements = [_placement(config, cluster, load, work) for work in load.roles]
    actor = load.role(Role.ACTOR)
    vllm = config.rollout.vllm
    if vllm is not None:
        assert actor is not None
        tensor, concurrent = vllm.tensor_parallel_size, config.rollout.max_concurrent_sequences
        memory = generator_memory(actor, load, cluster.device, tensor, concurrent)
        # In a deployment on several nodes, each node has as many generators.
        devices = len(config.services.generator.devices) * cluster.nodes
        parallel = Parallel(devices // tensor, 1, tensor)
        placements.append(Placement(Role.GENERATOR, "generators", actor, Group(0, devices), parallel, memory))
    return Placed(tuple(placements), 0, 1, shared=vllm is not None)


def _placement(config: Config, cluster: Cluster, load: Workload, work: RoleWork) -> Placement:
    service = getattr(config.services, work.role)
    ranks = len(service.devices) * service.nodes
    sizes = service.parallel
    parallel = Parallel(sizes.replicate, sizes.shard or ranks // sizes.replicate // sizes.tensor, sizes.tensor)
    assert parallel.devices == ranks
    assert service.nodes == cluster.nodes
    tokens = work.micro_batch_tokens or SCORE_TOKENS
    offload = service.offload.optimizer
    if work.role in TRAINED_ROLES:
        assert work.checkpointing is not None
        memory = trained_memory(work, load, cluster.device, parallel, tokens, work.checkpointing, offload)
        if work.role is Role.ACTOR and config.rollout.engine == "torch":
            generation = actor_generation_memory(
                work, load, cluster.device, parallel, config.rollout.max_concurrent_sequences
            )
            memory = add_parts(memory, generation)
    else:
        memory = frozen_memory(work, load, cluster.device, parallel)
    return Placement(work.role, work.name, work, Group(0, ranks), parallel, memory, tokens, offload=offload)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_planner_finds_a_plan_for_each_example(path: Path) -> None:
    plan = make_plan(load_config(path), cluster_of(path))
    for device in range(plan.cluster.total):
        assert sum(plan.placed.memory(device).values()) <= USABLE_FRACTION * plan.cluster.device.memory


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_placement_of_each_example_fits(path: Path) -> None:
    config, cluster = load_config(path), cluster_of(path)
    placed = placed_as_configured(config, cluster, read_workload(config))
    for device in range(cluster.total):
        memory = placed.memory(device)
        used = {name: round(size / 2**30, 1) for name, size in memory.items() if size}
        assert sum(memory.values()) <= USABLE_FRACTION * cluster.device.memory, used
    assert {each.role for each in placed.placements} >= {Role.ACTOR}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_vllm_may_use_the_memory_that_it_needs(path: Path) -> None:
    config, cluster = load_config(path), cluster_of(path)
    placed = placed_as_configured(config, cluster, read_workload(config))
    for each in placed.placements:
        if each.role is Role.GENERATOR:
            assert config.rollout.vllm is not None
            needed = sum(each.memory.values()) / cluster.device.memory
            assert needed <= config.rollout.vllm.memory_fraction <= needed + 0.1


@pytest.mark.parametrize("name", ["2-nodes-32b", "2-nodes-70b"])
def test_the_deployment_in_the_documentation_fits_the_examples(name: str, tmp_path: Path) -> None:
    section = (ROOT / "docs/scale-out.md").read_text(encoding="utf-8").partition("### Groups on two machines\n")[2]
    layer = tmp_path / "deployment.yaml"
    layer.write_text(section.partition("```yaml\n")[2].partition("```")[0], encoding="utf-8")
    config = load_config(ROOT / f"examples/gpus/{name}.yaml", [], [layer])
    for role in (Role.ACTOR, Role.REFERENCE):
        service = getattr(config.services, role)
        assert service.address.partition(":")[2] == service.listen.partition(":")[2]
        assert (len(service.devices), service.nodes) == (8, 2)
    assert config.rollout.generators == 0 < len(config.services.generators)


def test_a_placement_that_does_not_fit_is_noticed() -> None:
    path = ROOT / "examples/gpus/8-gpus-32b.yaml"
    config = load_config(path, ["services.actor.offload.optimizer=false"])
    placed = placed_as_configured(config, cluster_of(path), read_workload(config))
    assert sum(placed.memory(0).values()) > USABLE_FRACTION * cluster_of(path).device.memory


def test_there_are_examples_for_each_size() -> None:
    clusters = {(cluster.per_node, cluster.nodes) for cluster in map(cluster_of, EXAMPLES)}
    assert clusters == {(2, 1), (4, 1), (8, 1), (8, 2)}
    assert {name for path in EXAMPLES for name in load_config(path).models.values()} == set(SHAPES)
