"""Every config in the repository is valid, and each of its settings trains two steps on a toy task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from quartet.config.agent import AgentConfig
from quartet.config.deployment import ServiceConfig
from quartet.environments.host import EnvironmentHost
from quartet.errors import QuartetError
from quartet.rpc.server import Server
from quartet.services.environment.servicer import EnvironmentServicer
from tests.training.runs import merged, parsed, run_to_completion

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(
    [*(ROOT / "configs").rglob("*.yaml"), *(ROOT / "examples").rglob("*.yaml"), ROOT / "src/quartet/demo/demo.yaml"]
)


def test_every_shipped_config_is_valid_and_each_of_its_settings_takes_two_steps(
    toy_task_tree: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the configs, few are trained that together have all settings, as they are or with another number."""
    monkeypatch.chdir(ROOT)
    trees: list[dict[str, Any]] = []
    for path in SHIPPED:
        shipped = yaml.safe_load(path.read_text(encoding="utf-8"))
        if "stage" in shipped:  # tests/dialogue runs those of the stages before RLHF.
            continue
        # They are those of a function or class that the toy task does not use.
        for section in ("reward", "environment"):
            shipped.get(section, {}).pop("arguments", None)
        trees.append(merged(shipped, toy_task_changes(toy_task_tree(), shipped)))
        try:
            parsed(trees[-1])
        except QuartetError as error:
            pytest.fail(f"{path.relative_to(ROOT)}: {error}")
    untrained = set[str]().union(*map(settings_of, trees))
    while untrained:
        tree = max(trees, key=lambda tree: len(settings_of(tree) & untrained))
        untrained -= settings_of(tree)
        with environment(tree) as address:
            run = run_to_completion(
                parsed(merged(tree, {"services": {"environment": {"address": address}}} if address else {}))
            )
        assert [step["step"] for step in run.metrics] == [1, 2]


def settings_of(tree: dict[str, Any]) -> set[str]:
    """Return the settings of a config that a run in one process uses, without the values of numbers."""
    used = ("data", "algorithm", "rollout", "actor", "critic", "reference", "reward", "environment", "evaluation")
    result = set[str]()

    def add(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, each in value.items():
                add(f"{path}.{key}", each)
        elif isinstance(value, list):
            for each in value:
                add(path, each)
        else:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            result.add(f"{path}={'number' if is_number and value else value}")

    for section in used:
        add(section, tree.get(section))
    return result


@contextmanager
def environment(tree: dict[str, Any]) -> Iterator[str | None]:
    """Serve the environment of a config, if it has one. Yield its address."""
    if "environment" not in tree:
        yield None
        return
    config = parsed(tree)
    with closing(EnvironmentHost(config.environment, config.actor.model)) as host:
        server = Server([EnvironmentServicer(host, 1)], "127.0.0.1:0")
        try:
            yield server.address
        finally:
            server.stop(5.0)


def toy_task_changes(toy_task: dict[str, Any], shipped: dict[str, Any]) -> dict[str, Any]:
    """Return the checkpoints, prompts, sizes, engine and ranks of the toy task as changes to a shipped config."""
    samples = shipped.get("rollout", {}).get("samples_per_prompt", 1)
    changes = {
        "run": toy_task["run"],
        "data": {
            **toy_task["data"],
            **({"validation": toy_task["data"]["prompts"]} if "validation" in shipped["data"] else {}),
        },
        "rollout": {
            **toy_task["rollout"],
            "samples_per_prompt": min(samples, 2),
            "engine": "torch",
            "generators": 0,
            **({"max_turn_tokens": 4, "max_response_tokens": 24} if "environment" in shipped else {}),
        },
        "actor": {"model": toy_task["actor"]["model"]},
        "buffer": toy_task["buffer"],
    }
    reward = shipped["reward"]
    if "parts" in reward:
        parts = [
            {**part, **({"model": toy_task["reward"]["model"]} if "model" in part else {})} for part in reward["parts"]
        ]
        changes["reward"] = {"parts": parts}
    elif "model" in reward:
        changes["reward"] = {"model": toy_task["reward"]["model"]}
    elif reward.get("source") != "none":
        # The prompts of the toy task have no fields for a verifier.
        changes["reward"] = {"function": "quartet.rewards.examples:length_target", "batched": False}
    if "environment" in shipped:
        # An agent needs packages, or a service, of its example.
        plain = {"kind": "class", "agent": AgentConfig().model_dump(mode="json")}
        changes["environment"] = {"class_name": "quartet.environments.examples:WordPuzzle", **plain}
    for role in ("critic", "reference"):
        if shipped.get(role, {}).get("model"):
            changes[role] = {"model": toy_task["actor"]["model"]}
    if "vllm" in shipped.get("rollout", {}):
        changes["rollout"]["vllm"] = None
    one_rank = ServiceConfig().model_dump(mode="json")
    changes["services"] = {
        role: {key: one_rank[key] for key in ("devices", "nodes", "parallel", "offload") if key in service}
        for role, service in shipped.get("services", {}).items()
    }
    warmups = {role: {"warmup_steps": 0} for role in ("actor", "critic") if shipped.get(role, {}).get("warmup_steps")}
    return merged(changes, warmups)
