"""Checkpoints: whole or not at all, described truly, the newest kept."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from quartet.errors import ServiceFailed
from quartet.files import describe_files
from quartet.telemetry.run_files import RunFiles
from quartet.types import Role, SavedFile, SaveKind
from services.orchestrator.checkpoints import Checkpoints
from tests.orchestrator.fakes import Answer


class Saver:
    """A trained model's service that writes two files, or fails after the first."""

    def __init__(self, role: Role, root: Path) -> None:
        self.role, self._root = role, root
        self.failure: Exception | None = None
        self.asked: list[tuple[str, str, SaveKind]] = []

    def save(self, run: str, leader_epoch: int, directory: str, kind: SaveKind) -> Answer:
        self.asked.append((run, directory, kind))
        target = self._root / directory
        target.mkdir(parents=True)
        (target / "model.safetensors").write_bytes(f"{self.role} {len(self.asked)}".encode())
        if self.failure is None:
            (target / "config.json").write_text("{}")
        answer = Answer(lambda: self.reported(target))
        answer.answer(self.failure)
        return answer

    def reported(self, target: Path) -> list[SavedFile]:
        return describe_files(self._root, target)


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return RunFiles(tmp_path)


@pytest.fixture
def savers(tmp_path: Path) -> tuple[Any, Any]:
    return Saver(Role.ACTOR, tmp_path), Saver(Role.CRITIC, tmp_path)


def names(files: RunFiles) -> list[str]:
    return sorted(path.name for path in files.checkpoints.iterdir())


def test_a_checkpoint_holds_both_models_and_a_manifest_that_is_true(files: RunFiles, savers: tuple[Any, Any]) -> None:
    state = {"kl_controller": {"value": 0.05}}
    Checkpoints(files, 2, "the: config\n").save("run", 20, 1, savers, state)
    assert names(files) == ["step-000020"]
    folder = files.checkpoints / "step-000020"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["format"], manifest["run"], manifest["step"], manifest["state"]) == (1, "run", 20, state)
    assert manifest["config_sha256"] == hashlib.sha256(b"the: config\n").hexdigest()
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert set(manifest["files"]) == written - {"manifest.json"}
    assert len(manifest["files"]) == 4
    for name, described in manifest["files"].items():
        contents = (folder / name).read_bytes()
        assert described == {"bytes": len(contents), "sha256": hashlib.sha256(contents).hexdigest()}
    for saver in savers:
        (asked,) = saver.asked
        assert asked == ("run", f"checkpoints/.step-000020.partial/{saver.role}", SaveKind.CHECKPOINT)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(keep: int, files: RunFiles, savers: tuple[Any, Any]) -> None:
    checkpoints = Checkpoints(files, keep, "")
    steps = [5, 10, 95, 100, 105]
    for number, step in enumerate(steps, 1):
        checkpoints.save("run", step, 1, savers, {})
        assert names(files) == [f"step-{kept:06d}" for kept in steps[:number][-keep:]]


def test_a_save_that_fails_leaves_the_earlier_checkpoints_and_no_new_one(
    files: RunFiles, savers: tuple[Any, Any]
) -> None:
    checkpoints = Checkpoints(files, 1, "")
    checkpoints.save("run", 1, 1, savers, {})
    savers[1].failure = ServiceFailed("critic: disk full")
    with pytest.raises(ServiceFailed, match="disk full"):
        checkpoints.save("run", 2, 1, savers, {})
    assert [name for name in names(files) if not name.startswith(".")] == ["step-000001"]
    savers[1].failure = None
    checkpoints.save("run", 2, 1, savers, {})
    assert names(files) == ["step-000002"]


def test_saving_a_step_again_replaces_it(files: RunFiles, savers: tuple[Any, Any]) -> None:
    checkpoints = Checkpoints(files, 2, "")
    for _ in range(2):
        checkpoints.save("run", 1, 1, savers, {})
    assert names(files) == ["step-000001"]
    assert (files.checkpoints / "step-000001/actor/model.safetensors").read_bytes() == b"actor 2"


@pytest.mark.parametrize("wrong", [{"bytes": 3}, {"path": "checkpoints/.step-000001.partial/actor/elsewhere"}])
def test_files_that_are_not_there_as_reported_are_an_error(
    wrong: dict[str, Any], files: RunFiles, savers: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reported(target: Path) -> list[SavedFile]:
        return [SavedFile(**{"path": "p", "bytes": 7, "sha256": "", **wrong})]

    if "bytes" in wrong:
        wrong["path"] = "checkpoints/.step-000001.partial/actor/model.safetensors"
    monkeypatch.setattr(savers[0], "reported", reported)
    with pytest.raises(ServiceFailed, match="must be a path that orchestrator, actor and critic share"):
        Checkpoints(files, 2, "").save("run", 1, 1, savers, {})
    assert [name for name in names(files) if not name.startswith(".")] == []
