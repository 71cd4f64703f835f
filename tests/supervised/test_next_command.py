"""What the command of a stage prints at its end, with and without the config of the next one beside its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quartet.cli.supervised import train_stage


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with three configs, as `quartet init --from-pairs` writes them, beside the current folder."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my configs"
    folder.mkdir()
    data = {"train": "rows.jsonl"}
    trees: dict[str, dict[str, Any]] = {
        "sft": {"stage": "sft", "run": {"name": "sft"}, "data": data, "model": {"path": "base"}},
        "reward-model": {
            "stage": "reward-model",
            "run": {"name": "rm"},
            "data": data,
            "model": {"path": "runs/sft/policy"},
        },
        "train": {
            "data": {"prompts": "prompts.jsonl"},
            "actor": {"model": "runs/sft/policy"},
            "reward": {"model": "runs/rm/reward"},
        },
    }
    for name, tree in trees.items():
        (folder / f"{name}.yaml").write_text(json.dumps(tree))
    return folder


def last_line(stage: str, output: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr("quartet.models.torch_settings.set_up_torch", lambda threads: None)
    monkeypatch.setattr("quartet.supervised.stage.run_stage", lambda *_: Path(output))
    train_stage(stage, Path("my configs") / f"{stage}.yaml", [], False, False)
    first, last = capsys.readouterr().out.splitlines()
    assert first.endswith(f": {output}")
    return last


@pytest.mark.usefixtures("folder")
def test_the_next_command_can_be_copied(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    after_sft = last_line("sft", "runs/sft/policy", monkeypatch, capsys)
    assert after_sft == "next: quartet reward-model 'my configs/reward-model.yaml'"
    after_rm = last_line("reward-model", "runs/rm/reward", monkeypatch, capsys)
    assert after_rm == "next: quartet train 'my configs/train.yaml'"


def test_a_config_that_is_absent_or_takes_another_model_is_not_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = last_line("sft", "runs/other/policy", monkeypatch, capsys)
    assert other == "next: quartet reward-model, with model.path runs/other/policy"
    (folder / "train.yaml").unlink()
    absent = last_line("reward-model", "runs/rm/reward", monkeypatch, capsys)
    assert absent == "next: quartet train, with reward.model runs/rm/reward"
