"""The config that a plan proposes: the user's settings, and those that the plan chooses. Imports no torch."""

from __future__ import annotations

from typing import Any

import yaml

from quartet.config import Config, parse_config, redact_url
from quartet.planner.plan import Plan
from quartet.types import TRAINED_ROLES, Role

Tree = dict[str, Any]


def proposed_settings(config: Config, plan: Plan) -> Tree:
    """Return the settings that the plan chooses, as a nested mapping. It contains only keys that this version supports."""
    tree: Tree = {"services": {}}
    for each in plan.placed.placements:
        if each.role is Role.GENERATOR:
            continue
        service = tree["services"].setdefault(str(each.role), {})
        if each.group.size == 1 and not plan.cluster.device.is_cpu and each.group.first < plan.cluster.per_node:
            service["devices"] = [each.group.first]
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

    A password in buffer.url is left out. Raises ConfigError if the settings contradict each other.
    """
    tree: Tree = config.model_dump(mode="json", exclude_unset=True)
    _merge(tree, proposed_settings(config, plan))
    parse_config(tree, source="of the plan")
    if config.buffer.url:
        tree["buffer"]["url"] = redact_url(config.buffer.url)
    notes = [f"# Proposed by: {source}", f"# Expected: {plan.seconds:.1f} s per step on {plan.cluster}."]
    if plan.unsupported:
        notes.append("# This version lacks what follows, so the plan does not run yet:")
        notes += [f"#   {line}" for line in plan.unsupported]
    return "\n".join(notes) + "\n" + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def _merge(tree: Tree, layer: Tree) -> None:
    for key, value in layer.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value
