"""Reward sources of the tests, connected to a scorer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quartet.config.loading import parse_config
from quartet.config.root import Config
from tests.rewards.scorers.faults import TIMEOUT

FAST: dict[str, Any] = {"timeout_seconds": TIMEOUT, "max_attempts": 2, "backoff_seconds": 0.001}
"""Settings with negligible pauses."""
CONNECTED: dict[str, Any] = {**FAST, "max_response_bytes": 100_000}
PATHS = {"openrlhf": "/get_reward", "slime": "/rm"}
"""Paths that the address itself contains."""
HTTP = ("openrlhf", "slime", "vllm-classify", "sglang-embeddings", "nemo-gym")


def section(kind: str, url: str, **changes: Any) -> dict[str, Any]:
    """Return the keys of a source of this kind: a dialect, or judge. ``changes`` apply to its section."""
    if kind == "judge":
        judge = {"url": f"{url}/v1", "model": "judge", "rubric": "Count the words.", **CONNECTED, **changes}
        return {"source": "judge", "judge": judge}
    model = {"model": "rm"} if kind in ("vllm-classify", "sglang-embeddings") else {}
    http = {"dialect": kind, "urls": [url + PATHS.get(kind, "")], **model, **CONNECTED, **changes}
    return {"source": "http", "http": http}


def config_of(reward: dict[str, Any], tokenizer: Path, folder: Path) -> Config:
    """Return a config with this reward, whose run is in ``folder``."""
    return parse_config(
        {
            "run": {"name": "run", "directory": str(folder)},
            "data": {"prompts": "prompts.jsonl"},
            "actor": {"model": str(tokenizer)},
            "reward": reward,
        },
        "test",
    )
