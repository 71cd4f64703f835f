"""Paths are confined to their root, and files are written atomically."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest

from quartet.contract.weights import SavedFile
from quartet.errors import InvalidRequest, MismatchError
from quartet.system.durable_files import (
    check_saved_files,
    confine_path,
    describe_files,
    describe_os_error,
    replace_directory,
    write_durably,
)


@pytest.mark.parametrize("relative", ["policy", "checkpoints/.step-000001.partial/actor", "a/./b", "..a", "a..b"])
def test_a_path_below_the_root_is_accepted(relative: str, tmp_path: Path) -> None:
    assert confine_path(tmp_path, relative) == tmp_path / relative


@pytest.mark.parametrize(
    "relative",
    ["", "..", "../x", "a/../../x", "a/..", "/etc", "//etc", "a\\..\\b", "a\0b", ".", "./", "./."],
)
def test_a_path_out_of_the_root_or_the_root_itself_is_refused(relative: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="directory"):
        confine_path(tmp_path / "run", relative)


def test_a_link_out_of_the_root_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    (tmp_path / "outside").mkdir()
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "deep").symlink_to("link")
    for relative in ("link", "link/policy", "deep/policy"):
        with pytest.raises(InvalidRequest, match="is outside the run's directory"):
            confine_path(root, relative)


def test_links_inside_the_root_and_a_linked_root_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "real/inner").mkdir(parents=True)
    root = tmp_path / "run"
    root.symlink_to(tmp_path / "real")
    (root / "link").symlink_to("inner")
    assert confine_path(root, "link/policy").parent.resolve() == tmp_path / "real/inner"


def test_files_are_described_by_path_size_and_hash(tmp_path: Path) -> None:
    (tmp_path / "policy/deep").mkdir(parents=True)
    (tmp_path / "policy/b").write_bytes(b"12345")
    (tmp_path / "policy/deep/a").write_bytes(b"")
    (tmp_path / "other").write_bytes(b"not below")
    result = describe_files(tmp_path, tmp_path / "policy")
    assert [(file.path, file.bytes, file.sha256) for file in result] == [
        ("policy/b", 5, hashlib.sha256(b"12345").hexdigest()),
        ("policy/deep/a", 0, hashlib.sha256(b"").hexdigest()),
    ]


def test_a_durable_write_replaces_the_text_and_leaves_no_partial_file(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    write_durably(path, "old")
    write_durably(path, "né")
    assert path.read_text(encoding="utf-8") == "né"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_directory_replacement_keeps_the_old_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(target: Path) -> None:
        (target / "file").write_text("new")

    directory = tmp_path / "policy"
    directory.mkdir()
    (directory / "file").write_text("old")
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name == ".policy.writing":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(OSError, match="Input/output error"):
            replace_directory(directory, write)
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    assert (directory / "file").read_text() == "old"
    replace_directory(directory, write)
    assert (directory / "file").read_text() == "new"


def test_a_failed_durable_write_keeps_the_old_text_and_leaves_no_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "manifest.json"
    write_durably(path, "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_durably(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_missing_saved_files_are_an_error_with_advice_on_the_shared_directory(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"123")
    check_saved_files(tmp_path, [SavedFile("there", 3, "")])
    for file in (SavedFile("there", 4, ""), SavedFile("elsewhere", 3, "")):
        with pytest.raises(
            MismatchError, match=r"run\.directory must be a path that orchestrator, actor and critic share"
        ):
            check_saved_files(tmp_path, [file])


def test_an_os_error_is_described_with_the_path_and_the_user() -> None:
    denied = describe_os_error(PermissionError(errno.EACCES, "Permission denied", "models/policy"))
    assert denied.startswith(
        f"models/policy: Permission denied; give user {os.getuid()} access, for example with chmod"
    )
    assert (
        describe_os_error(OSError(errno.EROFS, "Read-only file system", "/x"))
        == "/x: Read-only file system; give another path"
    )
