"""Resume checks, and errors for run files that cannot be read or written."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from quartet.cli import start_run as command
from quartet.config.root import Config
from quartet.demo.toy_task import ToyTask
from quartet.errors import ConfigError, ServiceFailed, StorageFailed
from quartet.launcher import local_run
from quartet.preflight import check_earlier_run
from quartet.run_directory.identity import Identity
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.control import run_control
from quartet.services.orchestrator.control.run_control import RunControl
from tests.training.conftest import MakeConfig
from tests.training.runs import active_run, json_lines, merged, parsed, run_to_completion
from tests.training.test_resume import crash_run

EVALUATION: dict[str, Any] = {"evaluation": {"every_steps": 2, "max_prompts": 3}}


def evaluation_sections(toy_task: ToyTask) -> dict[str, Any]:
    return {"data": {"validation": str(toy_task.prompts)}, **EVALUATION}


def changed_config(config: Config, **changes: Any) -> Config:
    return parsed(merged(config.model_dump(mode="json"), changes))


def write_run(config: Config) -> RunFiles:
    """Write the config and the identity of a run; return its files."""
    files = RunFiles(config.run_directory)
    files.write_config(config.to_yaml())
    Identity.new(config, {}).write(files.identity)
    return files


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"evaluation": {"max_prompts": 6}}, "evaluation.max_prompts"),
        ({"data": {"validation": "others.jsonl"}}, "data.validation"),
    ],
)
def test_the_evaluation_data_of_a_run_cannot_change(
    changed: dict[str, Any], key: str, make: MakeConfig, toy_task: ToyTask
) -> None:
    config = make(**evaluation_sections(toy_task))
    files = write_run(config)
    with pytest.raises(ConfigError, match=rf"^--resume: {key} is .*, the run in .* had "):
        check_earlier_run(changed_config(config, **changed), files, resume=True)


def test_evaluation_cannot_be_turned_on_without_a_baseline(make: MakeConfig, toy_task: ToyTask) -> None:
    config = make(data={"validation": str(toy_task.prompts)})
    files = write_run(config)
    with pytest.raises(ConfigError, match=r"^--resume: evaluation\.every_steps is 3, .* had none: .* leave it at 0"):
        check_earlier_run(changed_config(config, evaluation={"every_steps": 3}), files, resume=True)


@pytest.mark.parametrize(
    "changed", [{"every_steps": 5}, {"every_steps": 0}, {"judge": "mine:judge"}, {"timeout_seconds": 5.0}], ids=str
)
def test_evaluation_interval_and_judge_may_change(changed: dict[str, Any], make: MakeConfig, toy_task: ToyTask) -> None:
    config = make(**evaluation_sections(toy_task))
    check_earlier_run(changed_config(config, evaluation=changed), write_run(config), resume=True)


def test_a_run_resumes_with_another_evaluation_interval(
    make: MakeConfig, toy_task: ToyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(**merged(evaluation_sections(toy_task), {"run": {"steps": 6}, "checkpoint": {"every_steps": 2}}))
    crash_run(config, "generate", 4, monkeypatch)
    other = changed_config(config, evaluation={"every_steps": 3})
    check_earlier_run(other, RunFiles(config.run_directory), resume=True)
    run = run_to_completion(other)
    assert [line["step"] for line in json_lines(run.files.evaluation_summaries)] == [0, 2, 3, 6]


class NoLauncher:
    """Launcher that fails before it starts a process."""

    def __init__(self, *_: Any) -> None:
        raise ServiceFailed("no launcher")


def test_a_run_without_a_step_can_be_resumed_or_replaced(
    make: MakeConfig, toy_task: ToyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(**evaluation_sections(toy_task))
    crash_run(config, "generate", 1, monkeypatch)
    files = RunFiles(config.run_directory)
    before = (files.evaluations / "step-000000.jsonl").read_bytes()
    monkeypatch.setattr(local_run, "Launcher", NoLauncher)
    with pytest.raises(ServiceFailed, match="no launcher"):
        command.run(config, overwrite=False, resume=True)
    assert (files.evaluations / "step-000000.jsonl").read_bytes() == before
    (files.root / "thesis.tex").write_text("mine")
    with pytest.raises(ServiceFailed, match="no launcher"):
        command.run(changed_config(config, run={"seed": 7}), overwrite=False)
    assert {path.name for path in files.root.iterdir()} == {".lock", "config.yaml", "logs", "thesis.tex"}


def raise_disk_full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_ends_the_run_with_a_remedy(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause by a guard cannot be stored. tests/unit/run_directory/test_run_files.py covers the other files."""
    guards = {"window_steps": 2, "missing_eos": {"action": "pause", "below": 1.0}}
    config = make(run={"steps": 3}, guards=guards)
    files, real = RunFiles(config.run_directory), os.fsync

    def fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}").replace("/.", "/")
        if path.startswith(f"{files.root}/pending_commands"):
            raise_disk_full()
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with active_run(config) as running:
            running.control._persist = True
            run = running.finish()
            running.control._persist = False
    assert run.code == 1
    assert f"{files.root}/pending_commands" in run.progress.error
    assert "cannot be written (No space left on device); fix that, then continue with --resume" in run.progress.error
    assert run.progress.recoveries == 0


def test_a_stop_takes_effect_even_if_it_cannot_be_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control = RunControl(RunFiles(tmp_path))
    monkeypatch.setattr(run_control, "write_durably", raise_disk_full)
    with pytest.raises(StorageFailed, match=r"pending_commands: cannot be written \(No space left on device\)"):
        control.stop()
    assert control.stopping
    with pytest.raises(StorageFailed):
        RunControl(RunFiles(tmp_path)).pause()
