"""timeline.jsonl: complete lines are appended, and later steps are dropped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quartet.run_directory.run_files import RunFiles


def steps(files: RunFiles) -> list[int]:
    return [json.loads(line)["step"] for line in files.timeline.read_text().splitlines()]


def test_later_steps_are_removed(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    for step in range(1, 13):
        files.append_timeline({"step": step, "spans": []})
    before = files.timeline.stat()
    files.truncate_after(12)
    assert files.timeline.stat().st_ino == before.st_ino
    files.truncate_after(9)
    assert steps(files) == list(range(1, 10))
    # A new inode tells readers that the file was replaced.
    assert files.timeline.stat().st_ino != before.st_ino
    files.append_timeline({"step": 10})
    assert steps(files) == list(range(1, 11))
    files.truncate_after(0)
    assert files.timeline.read_text() == ""


def test_a_truncated_line_does_not_damage_the_next_one(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.append_timeline({"step": 1})
    with files.timeline.open("a") as file:
        file.write('{"step": 2, "spa')
    files.append_timeline({"step": 3})
    assert files.timeline.read_text().splitlines() == ['{"step": 1}', '{"step": 2, "spa', '{"step": 3}']
    files.truncate_after(2)
    assert files.timeline.read_text().startswith('{"step": 1}\n')
    assert '"step": 3' not in files.timeline.read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_raises_os_error_and_appends_nothing(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.timeline.symlink_to("/dev/full")
    with pytest.raises(OSError):  # noqa: PT011 - which one depends on how far the writing came
        files.append_timeline({"step": 1})
