"""Checkpoints are complete or absent, match their manifest, and only the newest are kept."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from quartet.contract.status import Role
from quartet.contract.weights import SavedFile, SaveKind
from quartet.errors import MismatchError, ServiceFailed, ServiceUnavailable, StorageFailed
from quartet.run_directory.checkpoints import checkpoint_folders, delete_checkpoint, read_checkpoint, tagged_checkpoints
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.checkpointing import checkpoint_writer as module
from quartet.services.orchestrator.checkpointing.checkpoint_writer import CheckpointWriter
from quartet.system.durable_files import describe_files
from tests.services.orchestrator.fake_services import FakeCall
from tests.waiting import LIMIT


class Saver:
    """The service of a trained model. It writes two files, or fails after the first."""

    def __init__(self, role: Role, root: Path) -> None:
        self.role, self._root = role, root
        self.failure: Exception | None = None
        self.blocked = False
        self.requests: list[tuple[str, str, SaveKind, int | None]] = []

    def save(self, run: str, leader_epoch: int, directory: str, kind: SaveKind, step: int | None = None) -> FakeCall:
        self.requests.append((run, directory, kind, step))
        target = self._root / directory
        target.mkdir(parents=True)
        (target / "model.safetensors").write_bytes(f"{self.role} {len(self.requests)}".encode())
        if self.failure is None:
            (target / "config.json").write_text("{}")
        self.call = FakeCall(lambda: self.reported(target))
        if not self.blocked:
            self.call.complete(self.failure)
        return self.call

    def reported(self, target: Path) -> list[SavedFile]:
        return describe_files(self._root, target)


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return RunFiles(tmp_path)


@pytest.fixture
def savers(tmp_path: Path) -> tuple[Any, Any]:
    return Saver(Role.ACTOR, tmp_path), Saver(Role.CRITIC, tmp_path)


def save(checkpoints: CheckpointWriter, step: int, savers: Any, state: dict[str, Any] | None = None) -> None:
    checkpoints.start("run", step, 1, savers, state or {}).finish()


def names(files: RunFiles) -> list[str]:
    return sorted(path.name for path in files.checkpoints.iterdir())


def test_a_checkpoint_contains_both_models_and_a_matching_manifest(files: RunFiles, savers: tuple[Any, Any]) -> None:
    state = {"kl_controller": {"value": 0.05}}
    save(CheckpointWriter(files, 2, "the: config\n"), 20, savers, state)
    assert names(files) == ["step-000020"]
    folder = files.checkpoints / "step-000020"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["format"], manifest["run"], manifest["step"], manifest["state"]) == (1, "run", 20, state)
    assert manifest["config_sha256"] == hashlib.sha256(b"the: config\n").hexdigest()
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert set(manifest["files"]) == written - {"manifest.json"}
    assert len(manifest["files"]) == 4
    for name, entry in manifest["files"].items():
        contents = (folder / name).read_bytes()
        assert entry == {"bytes": len(contents), "sha256": hashlib.sha256(contents).hexdigest()}
    for saver in savers:
        (request,) = saver.requests
        assert request == ("run", f"checkpoints/.step-000020.1.partial/{saver.role}", SaveKind.CHECKPOINT, 20)


@pytest.mark.parametrize("missing", ["actor", "critic"])
def test_a_manifest_without_the_files_of_a_model_is_invalid(
    missing: str, files: RunFiles, savers: tuple[Any, Any]
) -> None:
    checkpoints = CheckpointWriter(files, 2, "")
    save(checkpoints, 1, savers)
    save(checkpoints, 2, savers)
    path = files.checkpoints / "step-000002" / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["roles"] == ["actor", "critic"]
    remaining = {name: entry for name, entry in manifest["files"].items() if not name.startswith(missing)}
    path.write_text(json.dumps({**manifest, "files": remaining}))
    assert read_checkpoint(path.parent).problem() == f"manifest.json names no file of the {missing}"
    assert newest_step(checkpoints) == 1
    path.write_text(json.dumps({**manifest, "files": {}}))
    assert newest_step(checkpoints) == 1


def newest_step(checkpoints: CheckpointWriter) -> int | None:
    newest = checkpoints.newest("run")
    return newest.step if newest else None


def test_a_run_without_a_critic_saves_its_actor(files: RunFiles, savers: tuple[Any, Any]) -> None:
    checkpoints = CheckpointWriter(files, 2, "")
    save(checkpoints, 1, savers[:1])
    assert newest_step(checkpoints) == 1
    assert read_checkpoint(files.checkpoints / "step-000001").roles == ("actor",)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_keep_last_keeps_the_newest_checkpoints(keep: int, files: RunFiles, savers: tuple[Any, Any]) -> None:
    checkpoints = CheckpointWriter(files, keep, "")
    steps = [5, 10, 95, 100, 105]
    for number, step in enumerate(steps, 1):
        save(checkpoints, step, savers)
        assert names(files) == [f"step-{step:06d}" for step in steps[:number][-keep:]]


def test_a_failed_save_leaves_only_the_earlier_checkpoints(files: RunFiles, savers: tuple[Any, Any]) -> None:
    checkpoints = CheckpointWriter(files, 1, "")
    save(checkpoints, 1, savers)
    savers[1].failure = ServiceFailed("critic: disk full")
    with pytest.raises(ServiceFailed, match="disk full"):
        save(checkpoints, 2, savers)
    assert names(files) == ["step-000001"], "files of an incomplete checkpoint were left"
    savers[1].failure = None
    save(checkpoints, 2, savers)
    assert names(files) == ["step-000002"]


def test_saving_a_step_again_replaces_it(files: RunFiles, savers: tuple[Any, Any]) -> None:
    checkpoints = CheckpointWriter(files, 2, "")
    for _ in range(2):
        save(checkpoints, 1, savers)
    assert names(files) == ["step-000001"]
    assert (files.checkpoints / "step-000001/actor/model.safetensors").read_bytes() == b"actor 2"


@pytest.mark.parametrize("wrong", [{"bytes": 3}, {"path": "checkpoints/.step-000001.1.partial/actor/elsewhere"}])
def test_files_that_do_not_match_the_report_are_an_error(
    wrong: dict[str, Any], files: RunFiles, savers: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reported(target: Path) -> list[SavedFile]:
        return [SavedFile(**{"path": "p", "bytes": 7, "sha256": "", **wrong})]

    if "bytes" in wrong:
        wrong["path"] = "checkpoints/.step-000001.1.partial/actor/model.safetensors"
    monkeypatch.setattr(savers[0], "reported", reported)
    with pytest.raises(MismatchError, match="must be a path that orchestrator, actor and critic share"):
        save(CheckpointWriter(files, 2, ""), 1, savers)
    assert [name for name in names(files) if not name.startswith(".")] == []


def test_a_checkpoint_appears_only_after_both_models_are_saved(files: RunFiles, savers: tuple[Any, Any]) -> None:
    savers[1].blocked = True
    checkpoints = CheckpointWriter(files, 2, "")
    pending = checkpoints.start("run", 3, 1, savers, {"kl": 0.1})
    assert not pending.done()
    assert names(files) == [".step-000003.1.partial"]
    assert not list(files.checkpoints.rglob("manifest.json"))
    assert checkpoints.newest("run") is None
    savers[1].call.complete()
    assert pending.done()
    pending.finish()
    assert names(files) == ["step-000003"]
    newest = checkpoints.newest("run")
    assert newest is not None
    assert (newest.step, newest.state) == (3, {"kl": 0.1})


def test_an_abandoned_checkpoint_is_removed_by_the_next(files: RunFiles, savers: tuple[Any, Any]) -> None:
    savers[0].blocked = savers[1].blocked = True
    checkpoints = CheckpointWriter(files, 2, "")
    checkpoints.start("run", 3, 1, savers, {}).abandon()
    assert savers[0].call.cancelling
    assert savers[1].call.cancelling
    savers[0].blocked = savers[1].blocked = False
    save(checkpoints, 6, savers)
    assert names(files) == ["step-000006"]


def test_a_failed_save_waits_for_the_other_service_before_removing_files(
    files: RunFiles, savers: tuple[Any, Any]
) -> None:
    savers[0].failure, savers[1].blocked = ServiceFailed("actor: disk full"), True
    pending = CheckpointWriter(files, 2, "").start("run", 1, 1, savers, {})
    failed: list[Exception] = []

    def finish() -> None:
        try:
            pending.finish()
        except ServiceFailed as error:
            failed.append(error)

    thread = threading.Thread(target=finish)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert names(files) == [".step-000001.1.partial"]
    savers[1].call.complete()
    thread.join(LIMIT)
    assert len(failed) == 1
    assert names(files) == []


def test_a_lost_service_is_raised_without_waiting(files: RunFiles, savers: tuple[Any, Any]) -> None:
    savers[0].failure, savers[1].blocked = ServiceUnavailable("actor: gone"), True
    pending = CheckpointWriter(files, 2, "").start("run", 1, 1, savers, {})
    with pytest.raises(ServiceUnavailable, match="actor: gone"):
        pending.finish()


@pytest.mark.parametrize("stage", ["manifest", "name"])
def test_a_full_disk_at_the_manifest_keeps_the_earlier_checkpoint(
    stage: str, files: RunFiles, savers: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_disk_full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoints = CheckpointWriter(files, 1, "")
    save(checkpoints, 1, savers)
    pending = checkpoints.start("run", 2, 1, savers, {})
    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync") if stage == "manifest" else (module, "fsync_path")), raise_disk_full)
        with pytest.raises(
            StorageFailed, match=r"step-000002: cannot be written \(No space left on device\); free space"
        ):
            pending.finish()
    assert "step-000001" in names(files)
    if stage == "manifest":
        assert names(files) == ["step-000001"]
    save(checkpoints, 3, savers)
    assert names(files) == ["step-000003"]


def test_a_damaged_checkpoint_of_the_same_step_is_replaced_and_keeps_its_tag(
    files: RunFiles, savers: tuple[Any, Any]
) -> None:
    checkpoints = CheckpointWriter(files, 2, "")
    save(checkpoints, 4, savers)
    (files.checkpoints / "best").symlink_to("step-000004")
    (files.checkpoints / "step-000004/actor/model.safetensors").write_bytes(b"damaged")
    assert checkpoints.newest("run") is None
    save(checkpoints, 4, savers)
    assert names(files) == ["best", "step-000004"]
    newest = checkpoints.newest("run")
    assert newest is not None
    assert newest.problem() is None


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("bit", "model.safetensors"),
        ("cut", "model.safetensors"),
        ("gone", "critic/"),
        ("manifest", "manifest.json"),
        ("run", "belongs to run other"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_and_reported_once(
    damage: str, problem: str, files: RunFiles, savers: tuple[Any, Any]
) -> None:
    checkpoints = CheckpointWriter(files, 2, "")
    save(checkpoints, 2, savers)
    checkpoints.start("other" if damage == "run" else "run", 4, 1, savers, {}).finish()
    folder = files.checkpoints / "step-000004"
    model, manifest = folder / "actor" / "model.safetensors", folder / "manifest.json"
    content = model.read_bytes()
    if damage == "bit":
        model.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    elif damage == "cut":
        model.write_bytes(content[:-1])
    elif damage == "gone":
        shutil.rmtree(folder / "critic")
    elif damage == "manifest":
        manifest.write_text('{"format": 1, "run"')
    assert [newest_step(checkpoints) for _ in range(2)] == [2, 2]
    [note] = checkpoints.take_skipped()
    assert note.startswith(f"checkpoint {folder} is skipped: ")
    assert problem in note
    assert checkpoints.take_skipped() == []


def test_tagged_checkpoints_are_kept_until_they_are_untagged(files: RunFiles, savers: tuple[Any, Any]) -> None:
    checkpoints = CheckpointWriter(files, 2, "")
    save(checkpoints, 1, savers)
    (files.checkpoints / "first").symlink_to("step-000001")
    for step in (2, 3, 4):
        save(checkpoints, step, savers)
    assert names(files) == ["first", "step-000001", "step-000003", "step-000004"]
    assert tagged_checkpoints(files) == {"first": "step-000001"}
    assert [path.name for path in checkpoint_folders(files)] == ["step-000001", "step-000003", "step-000004"]
    (files.checkpoints / "first").unlink()
    save(checkpoints, 5, savers)
    assert names(files) == ["step-000004", "step-000005"]


def test_a_checkpoint_tagged_during_its_deletion_is_kept(
    files: RunFiles, savers: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(CheckpointWriter(files, 2, ""), 1, savers)
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        moved = real(path, target)
        if path.name == "step-000001":
            (files.checkpoints / "best").symlink_to(path.name)
        return moved

    monkeypatch.setattr(Path, "rename", rename)
    delete_checkpoint(files.checkpoints / "step-000001")
    assert names(files) == ["best", "step-000001"]
    assert (files.checkpoints / "best" / "manifest.json").is_file()


def test_a_new_checkpoint_succeeds_if_an_old_one_cannot_be_deleted(
    files: RunFiles, savers: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    checkpoints = CheckpointWriter(files, 1, "")
    save(checkpoints, 1, savers)
    monkeypatch.setattr(module, "delete_checkpoint", refuse)
    save(checkpoints, 2, savers)
    assert names(files) == ["step-000001", "step-000002"]
