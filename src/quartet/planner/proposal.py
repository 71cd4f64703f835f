"""The config that a plan proposes: the user's settings, and those that the plan chooses. Imports no torch."""

from __future__ import annotations

from typing import Any

import yaml

from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.config.url_redaction import redact_url
from quartet.contract.status import TRAINED_ROLES, Role
from quartet.model_files.shape import FLOAT32_BYTES
from quartet.planner.placement import Placement
from quartet.planner.plan import Plan

Tree = dict[str, Any]
PLACEMENT_KEYS = ("devices", "processes", "nodes", "parallel", "offload")
"""Settings of a service that the plan chooses, or leaves at their defaults."""


def service_settings(plan: Plan) -> dict[str, Tree]:
    """Return the settings below ``services`` of each model role: its devices, and how they share the model.

    The devices are those of one machine. A group over several nodes has the same on each.
    """
    cluster, services = plan.cluster, dict[str, Tree]()
    for each in plan.placed.placements:
        if each.role is Role.GENERATOR:
            continue
        keys: Tree = {}
        if cluster.device.is_cpu:
            keys |= {"processes": each.group.size} if each.group.size > 1 else {}
        else:
            keys["devices"] = list(dict.fromkeys(index % cluster.per_node for index in each.group.devices))
        if len(_nodes(plan, each)) > 1:
            keys["nodes"] = len(_nodes(plan, each))
        if each.group.size > 1:
            sizes = each.parallel
            keys["parallel"] = {"replicate": sizes.replicate, "shard": sizes.shard, "tensor": sizes.tensor}
        if each.offload and each.role in TRAINED_ROLES:
            keys["offload"] = {"optimizer": True}
        services[str(each.role)] = keys
    return services


def requirements(plan: Plan) -> list[str]:
    """Return what a plan needs besides its settings, as lines of text: processes on other nodes, and memory of the hosts."""
    lines = []
    for each in plan.placed.placements:
        nodes = _nodes(plan, each)
        if each.role is Role.GENERATOR and nodes[-1] > 0:
            lines.append("generators on other nodes: start them there, and name their addresses in services.generators")
        elif each.role is not Role.GENERATOR and nodes[0] > 0:
            lines.append(
                f"the {each.role} service runs on node {nodes[0]}: start it there, and name its address in "
                f"services.{each.role}.address"
            )
        if each.role is not Role.GENERATOR and each.parallel.tensor > 1:
            ranks = each.group.size // len(nodes)
            size = ranks * each.work.parameters * each.work.dtype_bytes / 2**30
            lines.append(
                f"{size:,.0f} GiB of host memory per node while the {each.role} loads: it is tensor parallel, so each of its "
                f"{ranks} ranks there reads the whole model"
            )
        if each.role is Role.ACTOR and each.work.has_average:
            size = FLOAT32_BYTES * each.work.trained / 2**30
            lines.append(
                f"{size:,.1f} GiB of host memory for the moving average of the actor, twice that while it is saved"
            )
    return lines


def _nodes(plan: Plan, placement: Placement) -> list[int]:
    """Return the indices of the nodes of a placement."""
    return sorted({index // plan.cluster.per_node for index in placement.group.devices})


def proposed_settings(config: Config, plan: Plan) -> Tree:
    """Return the settings that the plan chooses, as a nested mapping."""
    tree: Tree = {"services": service_settings(plan)}
    for each in plan.placed.placements:
        if each.role in TRAINED_ROLES:
            tree[str(each.role)] = {"micro_batch_tokens": each.tokens, "gradient_checkpointing": each.checkpointing}
    if plan.load.generates:
        tree["rollout"] = {"max_concurrent_sequences": plan.placed.concurrent}
        _add_generators(tree, config, plan)
    tree["services"] = {role: keys for role, keys in tree["services"].items() if keys}
    return {section: keys for section, keys in tree.items() if keys}


def _add_generators(tree: Tree, config: Config, plan: Plan) -> None:
    generators = next((each for each in plan.placed.placements if each.role is Role.GENERATOR), None)
    if generators is None:
        return
    tensor = generators.parallel.tensor
    local = [device for device in generators.group.devices if device < plan.cluster.per_node]
    tree["rollout"]["generators"] = len(local) // tensor
    if not plan.cluster.device.is_cpu:
        tree["services"]["generator"] = {"devices": local}
    section = config.rollout.engine.replace("-", "_")
    if section not in ("vllm", "tensorrt_llm"):
        return
    engine: Tree = {"tensor_parallel_size": tensor}
    if plan.placed.shared:
        engine["release_memory"] = True
    if section == "vllm":
        share = sum(generators.memory.values()) / plan.cluster.device.memory
        engine["memory_fraction"] = round(min(0.95, share + 0.01), 2)
    tree["rollout"][section] = engine


def proposed_config(config: Config, plan: Plan, source: str) -> str:
    """Return the proposed config as YAML: the keys that the user has set, and those of the plan. ``source`` names the command.

    The given placement of a planned role is left out, also where the plan has no value for a key. So is a password in
    buffer.url. Raises ConfigError if the settings contradict each other.
    """
    tree: Tree = config.model_dump(mode="json", exclude_unset=True)
    for each in plan.placed.placements:
        service = tree.get("services", {}).get(str(each.role), {})
        for key in PLACEMENT_KEYS:
            service.pop(key, None)
    _merge(tree, proposed_settings(config, plan))
    parse_config(tree, source="of the plan")
    if config.buffer.url:
        tree["buffer"]["url"] = redact_url(config.buffer.url)
    notes = [f"# Proposed by: {source}", f"# Expected: {plan.seconds:.1f} s per step on {plan.cluster}."]
    if needed := requirements(plan):
        notes.append("# The plan also needs what follows:")
        notes += [f"#   {line}" for line in needed]
    return "\n".join(notes) + "\n" + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def _merge(tree: Tree, layer: Tree) -> None:
    for key, value in layer.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value
