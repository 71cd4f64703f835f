"""Paths that stay below their root, and files that are whole."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from quartet.errors import InvalidRequest
from quartet.files import confined, describe_files, write_durably


@pytest.mark.parametrize("relative", ["policy", "checkpoints/.step-000001.partial/actor", "a/./b", "..a", "a..b"])
def test_a_path_below_the_root_is_that_path(relative: str, tmp_path: Path) -> None:
    assert confined(tmp_path, relative) == tmp_path / relative


@pytest.mark.parametrize(
    "relative",
    ["", "..", "../x", "a/../../x", "a/..", "/etc", "//etc", "a\\..\\b", "a\0b", ".", "./", "./."],
)
def test_a_path_out_of_the_root_or_the_root_itself_is_refused(relative: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="directory"):
        confined(tmp_path / "run", relative)


def test_a_link_out_of_the_root_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    (tmp_path / "outside").mkdir()
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "deep").symlink_to("link")
    for relative in ("link", "link/policy", "deep/policy"):
        with pytest.raises(InvalidRequest, match="leaves the run's directory"):
            confined(root, relative)


def test_a_link_inside_the_root_and_a_root_that_is_a_link_are_fine(tmp_path: Path) -> None:
    (tmp_path / "real/inner").mkdir(parents=True)
    root = tmp_path / "run"
    root.symlink_to(tmp_path / "real")
    (root / "link").symlink_to("inner")
    assert confined(root, "link/policy").parent.resolve() == tmp_path / "real/inner"


def test_files_are_described_by_path_size_and_hash(tmp_path: Path) -> None:
    (tmp_path / "policy/deep").mkdir(parents=True)
    (tmp_path / "policy/b").write_bytes(b"12345")
    (tmp_path / "policy/deep/a").write_bytes(b"")
    (tmp_path / "other").write_bytes(b"not below")
    found = describe_files(tmp_path, tmp_path / "policy")
    assert [(file.path, file.bytes, file.sha256) for file in found] == [
        ("policy/b", 5, hashlib.sha256(b"12345").hexdigest()),
        ("policy/deep/a", 0, hashlib.sha256(b"").hexdigest()),
    ]


def test_a_durable_write_replaces_the_text_and_leaves_nothing_aside(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    write_durably(path, "old")
    write_durably(path, "né")
    assert path.read_text(encoding="utf-8") == "né"
    assert list(tmp_path.iterdir()) == [path]
