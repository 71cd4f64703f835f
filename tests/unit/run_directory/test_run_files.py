"""A run directory: one run at a time, and files of others are not removed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quartet.contract.control import Alert
from quartet.errors import ConfigError, StorageFailed
from quartet.run_directory.locking_and_removal import (
    check_unused,
    delete_earlier_run,
    find_run,
    lock_run_directory,
    move_earlier_run_aside,
    remove_run,
    restore_earlier_run,
)
from quartet.run_directory.run_files import RunFiles
from quartet.run_directory.step_lines import read_step_lines


def write_run(files: RunFiles) -> None:
    files.write_config("run: {}\n")
    files.append_metrics({"step": 1})
    files.write_trajectories(1, [{"id": "a"}])
    files.write_evaluation(0, {"eval_kl": 0.0}, [{"index": 0}])
    files.write_failed_trajectories(1, [{"step": 1}])
    (files.root / "thesis.tex").write_text("mine")


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


RUN_FILES = [
    "config.yaml",
    "evaluations",
    "evaluations.jsonl",
    "failed_trajectories.jsonl",
    "logs",
    "metrics.jsonl",
    "thesis.tex",
    "trajectories",
]


def test_only_one_run_can_lock_a_directory(tmp_path: Path) -> None:
    with (
        lock_run_directory(RunFiles(tmp_path / "run")),
        pytest.raises(ConfigError, match="a run is active there"),
        lock_run_directory(RunFiles(tmp_path / "run")),
    ):
        pass
    with lock_run_directory(RunFiles(tmp_path / "run")):
        pass


def test_the_lock_of_a_stage_does_not_advise_quartet_stop(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "run")
    files.write_config("stage: reward-model\n")
    with (
        lock_run_directory(files),
        pytest.raises(ConfigError, match=r"/run: a stage is active there; it takes no commands: end it with Ctrl-C"),
        lock_run_directory(files),
    ):
        pass


def test_a_file_at_the_path_of_the_run_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"), lock_run_directory(RunFiles(tmp_path / "run")):
        pass


def test_a_directory_name_that_the_file_system_refuses_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"), lock_run_directory(RunFiles(tmp_path / ("x" * 300))):
        pass


def test_an_earlier_run_is_restored_unless_it_was_deleted(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    write_run(files)
    move_earlier_run_aside(files)
    assert names(tmp_path) == [".earlier", "thesis.tex"]
    files.write_config("run: {name: new}\n")
    restore_earlier_run(files)
    assert names(tmp_path) == RUN_FILES
    assert "new" not in files.config.read_text()
    move_earlier_run_aside(files)
    delete_earlier_run(files)
    restore_earlier_run(files)
    assert names(tmp_path) == ["thesis.tex"]


def test_files_that_belong_to_no_run_are_not_moved(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("foo: bar\n")
    (tmp_path / "policy").mkdir()
    with pytest.raises(ConfigError, match="does not belong to a run of Quartet"):
        move_earlier_run_aside(RunFiles(tmp_path))
    assert names(tmp_path) == ["config.yaml", "policy"]


def test_a_directory_with_an_earlier_run_is_refused(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    check_unused(files)
    files.append_metrics({"step": 1, "reward_mean": 0.5})
    with pytest.raises(ConfigError, match="--overwrite"):
        check_unused(files)
    assert read_step_lines(files.metrics) == [{"step": 1, "reward_mean": 0.5}]


def test_a_damaged_metrics_line_is_reported_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2: not JSON"):
        read_step_lines(tmp_path / "metrics.jsonl")


def test_an_evaluation_writes_its_rows_and_a_summary_line(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    first, second = [{"index": 0, "sampled": "a\u2028b\n"}, {"index": 3, "sampled": ""}], [{"index": 0, "sampled": "c"}]
    files.write_evaluation(0, {"eval_kl": 0.0}, first)
    files.write_evaluation(20, {"eval_kl": 1.5}, second)
    assert files.read_evaluation(0) == first
    assert files.read_evaluation(20) == second
    assert names(tmp_path / "evaluations") == ["step-000000.jsonl", "step-000020.jsonl"]
    assert read_step_lines(tmp_path / "evaluations.jsonl") == [
        {"step": 0, "eval_kl": 0.0},
        {"step": 20, "eval_kl": 1.5},
    ]


def test_a_repeated_evaluation_replaces_the_lines_of_an_earlier_attempt(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    for step in (0, 5, 10):
        files.write_evaluation(step, {"eval_kl": step / 10}, [])
    files.write_evaluation(5, {"eval_kl": 9.0}, [])
    assert read_step_lines(tmp_path / "evaluations.jsonl") == [{"step": 0, "eval_kl": 0.0}, {"step": 5, "eval_kl": 9.0}]


def test_rows_of_evaluation_sets_are_removed_with_their_step(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    for step in (0, 5):
        files.write_evaluation(step, {}, [], {"step-000001.jsonl": [{"index": step}], "b": []})
    assert files.evaluation_sets(5) == ["b", "step-000001.jsonl"]
    files.truncate_after(4)
    assert (files.evaluation_sets(0), files.evaluation_sets(5)) == (["b", "step-000001.jsonl"], [])
    assert files.evaluation_of(0, "step-000001.jsonl").read_text() == '{"index": 0}\n'


def test_failed_trajectories_of_a_repeated_step_are_written_once(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.write_failed_trajectories(1, [])
    assert not files.failed_trajectories.exists(), "without failed trajectories there must be no file"
    files.write_failed_trajectories(1, [{"step": 1, "id": "a", "response": "x\u2028y\n"}])
    files.write_failed_trajectories(3, [{"step": 3, "id": "b"}, {"step": 3, "id": "c"}])
    files.write_failed_trajectories(3, [{"step": 3, "id": "c"}])
    assert read_step_lines(files.failed_trajectories) == [
        {"step": 1, "id": "a", "response": "x\u2028y\n"},
        {"step": 3, "id": "c"},
    ]
    files.write_failed_trajectories(3, [])
    assert [line["step"] for line in read_step_lines(files.failed_trajectories)] == [1]


def test_failed_trajectories_of_truncated_steps_are_removed(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    for step in (1, 2, 4):
        files.write_failed_trajectories(step, [{"step": step, "id": str(step)}])
    files.truncate_after(2)
    assert [line["step"] for line in read_step_lines(files.failed_trajectories)] == [1, 2]


@pytest.mark.parametrize(("contents", "reason"), [(None, "No such file or directory"), ("{\n", "not JSON Lines")])
def test_a_missing_or_damaged_evaluation_is_an_error(contents: str | None, reason: str, tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    if contents is not None:
        files.write_evaluation(0, {}, [])
        (tmp_path / "evaluations/step-000000.jsonl").write_text(contents)
    with pytest.raises(ConfigError, match=rf"step-000000\.jsonl: cannot be read \({reason}\)"):
        files.read_evaluation(0)


def test_the_run_of_a_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = RunFiles(tmp_path / "runs/a")
    files.write_config("run: {}\n")
    (tmp_path / "config.yaml").write_text("foo: bar\n")
    for inside in ("policy", "checkpoints/step-000020/actor"):
        result = find_run(tmp_path / "runs/a" / inside)
        assert result is not None
        assert result.root == files.root
    monkeypatch.chdir(files.root)
    result = find_run(Path("policy"))
    assert result is not None
    assert result.root == files.root
    assert find_run(tmp_path / "runs/b/policy") is None


KINDS = {
    "metrics": "metrics",
    "alerts": "alerts",
    "failed_trajectories": "failed_trajectories",
    "evaluation_summaries": "evaluations",
}


def alert(step: int) -> Alert:
    return Alert(step, "kl_runaway", "warn", "kl_mean is 9", "lower the learning rate")


@pytest.mark.parametrize("attribute", KINDS)
def test_a_truncated_last_line_is_ignored_and_removed_on_resume(attribute: str, tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    path: Path = getattr(files, attribute)
    path.write_text('{"step": 1}\n{"step": 2, "act')
    assert read_step_lines(path) == [{"step": 1}]
    files.truncate_after(5)
    assert path.read_text() == '{"step": 1}\n'


@pytest.mark.parametrize("attribute", KINDS)
@pytest.mark.parametrize("line", ["{", "5", "{}", '{"st\xff'])
def test_a_damaged_line_is_an_error_with_file_and_line(line: str, attribute: str, tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    path: Path = getattr(files, attribute)
    path.write_bytes(b'{"step": 1}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(
        ConfigError, match=rf"^{KINDS[attribute]} .*{path.name}:2: (not JSON|has no step); repair the file"
    ):
        files.truncate_after(1)


def test_alerts_after_a_truncated_one_can_be_read(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.append_alert(alert(1))
    with files.alerts.open("a") as file:
        file.write('{"step": 2, "gu')
    assert [line["step"] for line in files.read_alerts(1)] == [1]
    files.truncate_after(1)
    files.append_alert(alert(2))
    assert [line["step"] for line in files.read_alerts(2)] == [2]


def test_an_alert_is_written_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = RunFiles(tmp_path)
    files.append_alert(alert(1))
    before, flushed_sizes = files.alerts.read_bytes(), list[int]()

    def full(descriptor: int) -> None:
        flushed_sizes.append(os.fstat(descriptor).st_size)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFailed, match=r"alerts\.jsonl: cannot be written \(No space left on device\).*--resume"):
        files.append_alert(alert(2))
    assert flushed_sizes[0] > len(before), "the line must be written before the flush"
    assert files.alerts.read_bytes() == before


WRITES: dict[str, Callable[[RunFiles], Any]] = {
    "append_metrics": lambda files: files.append_metrics({"step": 2}),
    "append_alert": lambda files: files.append_alert(alert(2)),
    "write_failed_trajectories": lambda files: files.write_failed_trajectories(2, [{"step": 2}]),
    "append_failed_trajectories": lambda files: files.append_failed_trajectories({"step": 2}),
    "write_trajectories": lambda files: files.write_trajectories(2, [{"id": "b"}]),
    "write_evaluation": lambda files: files.write_evaluation(2, {}, [{"index": 0}]),
    "truncate_after": lambda files: files.truncate_after(0),
    "committed": lambda files: files.read_committed(),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_full_disk_is_an_error_and_does_not_change_the_files(
    write: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = RunFiles(tmp_path)
    write_run(files)
    files.append_alert(alert(1))
    with files.metrics.open("a") as file:
        file.write('{"st')

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def contents() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in tmp_path.glob("*.jsonl")}

    before = contents()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(
            StorageFailed, match=r"cannot be written \(No space left on device\); fix that, then continue"
        ):
            WRITES[write](files)
    assert contents() == before


def test_another_number_of_scores_than_trajectories_is_an_error(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.write_trajectories(3, [{"score": 1.5}, {"score": -2}, {"score": 0.25}])
    assert files.read_scores(3, 3) == [1.5, -2.0, 0.25]
    files.write_trajectories(4, [{"score": None}])
    assert files.read_scores(4, 1) == [None]
    path = files.trajectories / "step-000003.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(
        ConfigError, match=r"step-000003\.jsonl: has 2 lines, expected the step's 3; .*quartet rollback"
    ):
        files.read_scores(3, 3)
    path.unlink()
    with pytest.raises(ConfigError, match=r"step-000003\.jsonl: cannot be read; .*quartet rollback"):
        files.read_scores(3, 3)


def test_the_step_of_the_saved_policy_is_known_only_after_a_complete_save(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    assert files.policy_step() is None
    files.write_policy_step(12)
    assert files.policy_step() is None, "a record without a policy"
    files.policy.mkdir()
    assert files.policy_step() == 12
    files.remove_policy_step()
    assert files.policy_step() is None


def test_removing_a_run_leaves_other_files(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "run")
    files.root.mkdir()
    write_run(files)
    remove_run(files)
    assert names(files.root) == ["thesis.tex"]
    (files.root / "config.yaml").write_text("foo: bar\n")
    (files.root / "evaluations").mkdir()
    remove_run(files)
    assert names(files.root) == ["config.yaml", "evaluations", "thesis.tex"]


def change(name: str, step: int, at: float) -> dict[str, Any]:
    return {"setting": name, "before": 0.0, "after": 1.0, "step": step, "user": "me", "at": at}


def test_a_crash_leaves_all_changes_of_a_command_or_none(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    first, second = [change("a", 2, 1.0), change("b", 2, 1.0)], [change("a", 3, 2.0), change("b", 3, 2.0)]
    files.append_changes(first)
    files.append_changes(second)
    complete = files.changes.read_bytes()
    assert files.read_changes() == [*first, *second]
    for size in range(len(complete) - 1, len(complete) // 2, -7):
        files.changes.write_bytes(complete[:size])
        assert files.read_changes() == first
        assert len(files.changes.read_bytes().splitlines()) == 2
    files.append_changes([change("c", 4, 3.0)])
    assert files.read_changes() == [*first, change("c", 4, 3.0)]
