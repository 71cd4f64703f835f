"""Checkpoints and prompts for the checks before the start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.preflight_workers import run_here
from tests.unit.preflight.files import save_tokenizer


@pytest.fixture(autouse=True)
def _tensors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoints of ``models`` have no tensors, so only tests of real ones compare them."""
    if "real_models" not in request.fixturenames:
        monkeypatch.setattr("quartet.preflight.check_contents", lambda models: ())


@pytest.fixture
def real_processes() -> None:
    """Let the checks start their processes."""


@pytest.fixture(autouse=True)
def _workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "real_processes" not in request.fixturenames:
        run_here(monkeypatch)


@pytest.fixture(scope="session")
def saved_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a policy, a reward model and a prompts file that a run could use."""
    from tests.unit.models import tiny

    directory, room = tmp_path_factory.mktemp("real"), {"max_position_embeddings": 256}
    for name, model in (("policy", tiny.causal("llama", **room)), ("reward", tiny.classifier("llama", **room))):
        tiny.saved(model, directory / name)
        tiny.tokenizer().save_pretrained(directory / name)
    (directory / "prompts.jsonl").write_text('{"text": "w8"}\n{"text": "w9"}\n')
    return directory


@pytest.fixture
def real_models(saved_models: Path, tmp_path: Path) -> Path:
    """Copy ``saved_models``, so that a test can change them."""
    return Path(shutil.copytree(saved_models, tmp_path / "models"))


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
