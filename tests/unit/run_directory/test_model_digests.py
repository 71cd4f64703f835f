"""A run notices that a file of one of its models has changed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.errors import ConfigError
from quartet.run_directory import model_digests
from quartet.run_directory.identity import Identity


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create files that look like a policy and a reward model, without weights that could be loaded."""
    monkeypatch.setenv("QUARTET_CACHE", str(tmp_path / "cache"))
    for name in ("policy", "reward"):
        (tmp_path / name).mkdir()
        for file in ("config.json", "model.safetensors", "tokenizer.json", "README.md"):
            (tmp_path / name / file).write_text(f"{name} {file}")
    return tmp_path


def config(root: Path, **actor: object) -> Config:
    tree = {
        "data": {"prompts": root / "prompts.jsonl"},
        "actor": {"model": str(root / "policy"), **actor},
        "reward": {"model": str(root / "reward")},
    }
    return parse_config(tree, "test")


def identity(root: Path) -> Identity:
    checked = config(root)
    (root / "prompts.jsonl").write_text('{"text": "a"}\n')
    return Identity.new(checked, {}).with_model_files(model_digests.local_digests(checked))


def refusal(before: Identity, root: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        before.check_models(model_digests.local_digests(config(root)), Path("runs/a b"))
    return str(refused.value)


def test_every_file_that_decides_what_a_model_computes_has_a_digest(root: Path) -> None:
    (root / "policy/chat_template.jinja").write_text("{{ messages }}")
    files = model_digests.model_digests(model_digests.role_models(config(root), Role.ACTOR))
    assert sorted(files) == [
        f"actor.model/{name}" for name in ("chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json")
    ]
    assert files["actor.model/config.json"].split()[0] == str(len("policy config.json"))


def test_a_resume_with_a_changed_file_is_refused_and_names_it(root: Path) -> None:
    before = identity(root)
    before.write(root / "run.json")
    assert Identity.read(root / "run.json") == before
    before.check_models(model_digests.local_digests(config(root)), root)
    (root / "reward/model.safetensors").write_text("reward model.safetensorS")
    assert refusal(before, root) == (
        f"reward.model {root}/reward: model.safetensors differs from the file that the run in runs/a b started with; restore the "
        "files of that model, or train from one of the run's checkpoints with the model as it is now: quartet fork 'runs/a b' "
        "STEP --name NAME"
    )
    (root / "reward/model.safetensors").write_text("reward model.safetensors")
    (root / "policy/chat_template.jinja").write_text("new")
    assert "policy: chat_template.jinja is not among the files that" in refusal(before, root)
    (root / "policy/chat_template.jinja").unlink()
    (root / "policy/tokenizer.json").unlink()
    assert "policy: tokenizer.json is missing among the files that" in refusal(before, root)


def test_models_of_services_elsewhere_and_added_ones_are_not_compared(root: Path) -> None:
    before = identity(root)
    before.check_models({}, root)
    (root / "reward/config.json").write_text("other")
    known = {name: digest for name, digest in before.model_files.items() if not name.startswith("reward.")}
    partial = Identity(before.id, before.settings, before.prompts_sha256, model_files=known)
    added = partial.with_model_files({"reward.model/config.json": "1 a", "actor.model/new": "2 b"})
    assert added.model_files == {**known, "reward.model/config.json": "1 a"}


def test_the_base_of_an_adapter_and_the_commit_of_a_hub_model_count(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = root / "hub/models--owner--name/snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (root / "hub/models--owner--name/refs").mkdir()
    (root / "hub/models--owner--name/refs/main").write_text("a" * 40)
    monkeypatch.setenv("HF_HUB_CACHE", str(root / "hub"))
    adapter = root / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": "owner/name"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    files = model_digests.model_digests({"actor.model": str(adapter)})
    assert sorted(files) == [f"actor.model/{name}" for name in ("adapter_config.json", "base/config.json", "commit")]
    assert files["actor.model/commit"] == "a" * 40


def test_a_digest_is_kept_until_the_file_changes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_digests, "_RECENT_SECONDS", -1e9)
    models = {"actor.model": str(root / "policy")}
    first = model_digests.model_digests(models)
    (kept,) = [
        path for path in (root / "cache/digests").iterdir() if path.read_text() == first["actor.model/config.json"]
    ]
    kept.write_text(f"1 {'0' * 32}")
    assert model_digests.model_digests(models)["actor.model/config.json"] == f"1 {'0' * 32}"
    # Not even the old time and size hide a change.
    path = root / "policy/config.json"
    times = path.stat()
    path.write_text("POLICY config.json")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert model_digests.model_digests(models)["actor.model/config.json"] not in (first, f"1 {'0' * 32}")
