"""Every config in the repository parses, and takes two steps on a tiny world."""

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
    path: Path, world_tree: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    shipped = yaml.safe_load(path.read_text(encoding="utf-8"))
    tree = merged(shipped, tied_to(world_tree(), shipped))
    run = run_to_the_end(parsed(tree))
    assert [step["step"] for step in run.metrics] == [1, 2]


def tied_to(world: dict[str, Any], shipped: dict[str, Any]) -> dict[str, Any]:
    """The world's checkpoints, prompts, sizes and devices, in place of the config's; everything else stays as shipped."""
    samples = shipped.get("rollout", {}).get("samples_per_prompt", 1)
    small = {
        "run": world["run"],
        "data": {
            **world["data"],
            **({"validation": world["data"]["prompts"]} if "validation" in shipped["data"] else {}),
        },
        "rollout": {**world["rollout"], "samples_per_prompt": min(samples, 2)},
        "actor": {"model": world["actor"]["model"]},
        "buffer": world["buffer"],
    }
    reward = shipped["reward"]
    if "parts" in reward:
        parts = [
            {**part, **({"model": world["reward"]["model"]} if "model" in part else {})} for part in reward["parts"]
        ]
        small["reward"] = {"parts": parts}
    elif "model" in reward:
        small["reward"] = {"model": world["reward"]["model"]}
    for role in ("critic", "reference"):
        if shipped.get(role, {}).get("model"):
            small[role] = {"model": world["actor"]["model"]}
    small["services"] = {
        role: {"devices": []} for role, service in shipped.get("services", {}).items() if "devices" in service
    }
    warmups = {role: {"warmup_steps": 0} for role in ("actor", "critic") if shipped.get(role, {}).get("warmup_steps")}
    return merged(small, warmups)
