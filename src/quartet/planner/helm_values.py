"""Values of the Helm chart for a plan: pods with their GPUs, CPU and memory, and the settings of the run. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.errors import ConfigError
from quartet.model_files.memory import training_state
from quartet.model_files.shape import FLOAT32_BYTES
from quartet.planner.placement import Placement
from quartet.planner.plan import Plan
from quartet.planner.proposal import proposed_settings
from quartet.planner.roofline import Parallel
from quartet.planner.workload import RoleWork

Tree = dict[str, Any]
GIB = 2**30
GPU_CPUS = (2, 8)
"""Request and limit of CPUs for each rank with a GPU."""
CPU_CPUS = (4, 16)
"""The same without a GPU."""
SHARED_MEMORY_BYTES = 8 * GIB
"""workerGroups.sharedMemory of the chart, which counts towards the memory of pods with several ranks."""
CHART_KEYS = ("devices", "nodes", "processes")
"""Settings of a service that the chart derives from the values of its component."""


def helm_values(config: Config, plan: Plan, source: str) -> str:
    """Return the values as YAML, for ``helm install --values``. ``source`` names the command. Raises ConfigError.

    Each role has a pod, and roles that share one GPU share a pod. Pods cannot share GPUs, so roles of several ranks need separate
    ones: make the plan with ``separate_pods``.
    """
    components: Tree = {}
    for group in _pods(plan):
        first = group[0].role
        components[str(first)] = _component(plan, group)
        components |= {str(each.role): {"enabled": False} for each in group[1:]}
        if first is Role.GENERATOR and config.rollout.engine in ("vllm", "tensorrt-llm"):
            # The tags of docker/Dockerfile.generator. The other engines need no separate image.
            components[str(first)]["image"] = {"variant": config.rollout.engine}
    settings = proposed_settings(config, plan)
    services: Tree = {}
    for role, keys in settings.pop("services", {}).items():
        kept = {key: value for key, value in keys.items() if key not in CHART_KEYS}
        if kept:
            services[role] = kept
    # The pods of the generator are counted by its replicas.
    settings.get("rollout", {}).pop("generators", None)
    tree = {"config": settings | ({"services": services} if services else {}), "components": components}
    notes = [
        f"# Values of the Helm chart, by: {source}",
        f"# Expected: {plan.seconds:.1f} s per step on {plan.cluster}.",
        "# Give this file besides your own values: helm install quartet helm/quartet --values my.yaml --values THIS",
    ]
    return "\n".join(notes) + "\n" + yaml.safe_dump(tree, sort_keys=False, default_flow_style=None)


def _pods(plan: Plan) -> list[list[Placement]]:
    """Return the placements by pod. Without GPUs each role has its own."""
    by_devices: dict[Any, list[Placement]] = {}
    for each in plan.placed.placements:
        # The models of a reward ensemble share a process.
        key = each.role if plan.cluster.device.is_cpu else (each.group.first, each.group.size)
        by_devices.setdefault(key, []).append(each)
    for group in by_devices.values():
        roles = list(dict.fromkeys(each.role for each in group))
        if len(roles) > 1 and (group[0].group.size > 1 or Role.GENERATOR in roles):
            raise ConfigError(
                f"--helm-values: {', '.join(roles)} share GPUs, which pods of several GPUs, and generators, cannot; expected "
                "separate GPUs; give more with --gpus or --nodes"
            )
    return list(by_devices.values())


def _component(plan: Plan, group: Sequence[Placement]) -> Tree:
    on_gpu, first = not plan.cluster.device.is_cpu, group[0]
    roles = list(dict.fromkeys(str(each.role) for each in group))
    size, nodes, replicas = first.group.size, 1, 1
    if first.role is Role.GENERATOR:
        replicas, size = size // first.parallel.tensor, first.parallel.tensor
    elif size > plan.cluster.per_node:
        nodes, size = size // plan.cluster.per_node, plan.cluster.per_node
    has_generators = any(each.role is Role.GENERATOR for each in plan.placed.placements)
    published = PUBLISHED_COPIES + plan.load.off_policy if has_generators else 0
    memory = sum(_pod_bytes(each, size, nodes, on_gpu, published) for each in group)
    if first.role is not Role.GENERATOR and size * nodes > 1:
        memory += SHARED_MEMORY_BYTES
    requests, limits = (size * cpus for cpus in (GPU_CPUS if on_gpu else CPU_CPUS))
    quantity = f"{math.ceil(memory / GIB)}Gi"
    component: Tree = {"enabled": True} if first.role is Role.GENERATOR else {}
    if roles != [str(first.role)]:
        component["roles"] = roles
    component |= {"nodes": nodes} if nodes > 1 else {}
    component |= {"replicas": replicas} if replicas > 1 else {}
    component["gpus"] = size if on_gpu else 0
    component["resources"] = {
        "requests": {"cpu": str(requests), "memory": quantity},
        "limits": {"cpu": str(limits), "memory": quantity},
    }
    return component


def _pod_bytes(each: Placement, ranks: int, nodes: int, on_gpu: bool, published: int) -> float:
    device_bytes = 0.0 if on_gpu else sum(each.memory.values())
    if each.role is Role.GENERATOR:
        return generator_host_memory(each.work, on_gpu, device_bytes).pod_bytes(ranks)
    memory = host_memory(each.work, on_gpu, device_bytes)
    versions = published if each.role is Role.ACTOR else 0
    return memory.pod_bytes(ranks, nodes, each.parallel, versions, each.offload)


GPU_PROCESS_BYTES = 4 * 2**30
"""Host memory of a process with CUDA: libraries, kernels, pinned buffers, and messages of calls. An estimate."""
CPU_PROCESS_BYTES = 512 * 2**20
"""Host memory of a process without a GPU: libraries, the tokenizer, and messages of calls. An estimate."""
HOST_FRACTION = 0.85
"""Fraction of a container's memory that the formulas fill. The rest is for fragmentation and files in the page cache."""
PUBLISHED_COPIES = 2
"""Number of versions of the weights in an actor with separate generators, besides one for each step off-policy."""
RECEIVED_COPIES = 2
"""Number of copies of the weights that a generator may have while it takes a version."""
ONE_RANK = Parallel()


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of host memory of a role. ``process``: of each rank. ``load``: of the weights while they are loaded.

    ``state``: of the copy of weights and optimizer that a checkpoint needs, 0 for a frozen model. ``moments``: of the optimizer's
    moments, which are in host memory with ``offload.optimizer``. ``version``: of one version of the weights for generators.
    """

    process: float
    load: float
    state: float = 0.0
    moments: float = 0.0
    version: float = 0.0

    def pod_bytes(
        self, ranks: int, nodes: int = 1, parallel: Parallel = ONE_RANK, published: int = 0, offload: bool = False
    ) -> float:
        """Return the bytes of a pod with ``ranks`` of a group over ``nodes`` pods.

        ``published``: versions for generators. ``offload``: the moments are in host memory. Each rank loads its part of the
        model, or all of it if the group is tensor parallel. Loading ends before the copies for checkpoints are made.
        """
        parts = parallel.replicate / nodes
        loading = self.load * (ranks if parallel.tensor > 1 else parts)
        copies = (self.state + published * self.version) * min(1.0, parts)
        copies += self.moments * parts if offload else 0.0
        return (self.process * ranks + max(loading, copies)) / HOST_FRACTION


def host_memory(work: RoleWork, on_gpu: bool, device_bytes: float = 0.0) -> HostMemory:
    """Return the host memory of a role.

    ``device_bytes``: without a GPU, the bytes that the planner counts for the device, with the loaded model and the moments. They
    are in host memory.
    """
    trained = training_state(
        work.trained, work.trained, work.dtype_bytes, FLOAT32_BYTES if work.is_lora else None, work.moment_bytes
    )
    state, weights = (
        trained.parameters + trained.master_weights + trained.moments,
        float(work.dtype_bytes * work.parameters),
    )
    if work.has_average:
        # The average, and its copy while it is saved. Without a GPU the planner counts the first.
        state += FLOAT32_BYTES * work.trained * (1 + on_gpu)
    if not on_gpu:
        return HostMemory(CPU_PROCESS_BYTES + device_bytes, 0.0, state, version=weights)
    return HostMemory(float(GPU_PROCESS_BYTES), weights, state, trained.moments, weights)


def generator_host_memory(work: RoleWork, on_gpu: bool, device_bytes: float = 0.0) -> HostMemory:
    """Return the host memory of a generator: its engine, one process for each GPU, and the weights that it receives."""
    load = float(work.dtype_bytes * work.parameters)
    if not on_gpu:
        return HostMemory(CPU_PROCESS_BYTES + device_bytes, 0.0, RECEIVED_COPIES * load)
    return HostMemory(float(GPU_PROCESS_BYTES), load, GPU_PROCESS_BYTES + RECEIVED_COPIES * load)
