"""Checkpoints and prompts for the checks before the start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.preflight.files import save_tokenizer


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Create two directories that look like checkpoints, and a prompts file."""
    for name, architecture in (("policy", "LlamaForCausalLM"), ("reward", "LlamaForSequenceClassification")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(
            json.dumps({"architectures": [architecture], "id2label": {"0": "score"}})
        )
        (tmp_path / name / "model.safetensors").write_bytes(b"\x02" + 7 * b"\0" + b"{}")
        save_tokenizer(tmp_path / name)
    (tmp_path / "prompts.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    return tmp_path
