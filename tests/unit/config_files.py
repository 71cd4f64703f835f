"""Helpers that write config files and return the error messages of invalid ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quartet.config.loading import load_config
from quartet.errors import ConfigError

MINIMAL = """\
data:
  prompts: prompts.jsonl
actor:
  model: policy
reward:
  model: reward
"""
REQUIRED: dict[str, Any] = {"data": {"prompts": "p"}, "actor": {"model": "a"}, "reward": {"model": "r"}}


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load_config(path, list(overrides))
    text = str(refused.value)
    first, *problems = text.split("\n  ")
    assert "\n" not in text.replace("\n  ", "")
    assert not problems or first.endswith(f": {len(problems)} problems:")
    return text
