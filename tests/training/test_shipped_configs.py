"""Every config in the repository parses, and takes two steps on a toy task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.training.runs import merged, parsed, run_to_the_end

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(
    [*(ROOT / "configs").rglob("*.yaml"), *(ROOT / "examples").rglob("*.yaml"), ROOT / "src/quartet/demo/demo.yaml"]
)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shipped_config_takes_two_steps(
    path: Path, toy_task_tree: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    shipped = yaml.safe_load(path.read_text(encoding="utf-8"))
    tree = merged(shipped, tied_to(toy_task_tree(), shipped))
    run = run_to_the_end(parsed(tree))
    assert [step["step"] for step in run.metrics] == [1, 2]


def tied_to(toy_task: dict[str, Any], shipped: dict[str, Any]) -> dict[str, Any]:
    """The toy task's checkpoints, prompts, sizes and devices, in place of the config's; everything else stays as shipped."""
    samples = shipped.get("rollout", {}).get("samples_per_prompt", 1)
    small = {
        "run": toy_task["run"],
        "data": {
            **toy_task["data"],
            **({"validation": toy_task["data"]["prompts"]} if "validation" in shipped["data"] else {}),
        },
        "rollout": {**toy_task["rollout"], "samples_per_prompt": min(samples, 2)},
        "actor": {"model": toy_task["actor"]["model"]},
        "buffer": toy_task["buffer"],
    }
    reward = shipped["reward"]
    if "parts" in reward:
        parts = [
            {**part, **({"model": toy_task["reward"]["model"]} if "model" in part else {})} for part in reward["parts"]
        ]
        small["reward"] = {"parts": parts}
    elif "model" in reward:
        small["reward"] = {"model": toy_task["reward"]["model"]}
    for role in ("critic", "reference"):
        if shipped.get(role, {}).get("model"):
            small[role] = {"model": toy_task["actor"]["model"]}
    small["services"] = {
        role: {"devices": []} for role, service in shipped.get("services", {}).items() if "devices" in service
    }
    warmups = {role: {"warmup_steps": 0} for role in ("actor", "critic") if shipped.get(role, {}).get("warmup_steps")}
    return merged(small, warmups)
