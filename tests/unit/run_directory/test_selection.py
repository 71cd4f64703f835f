"""The run that a user names to generate, evaluate or roll back, if it is a stage before RLHF."""

from __future__ import annotations

from pathlib import Path

import pytest

from quartet.cli.checkpoint.fork import fork
from quartet.cli.checkpoint.list_and_tag import rollback
from quartet.cli.inference.evaluate import evaluate
from quartet.errors import ConfigError
from quartet.run_directory.run_files import RunFiles
from quartet.run_directory.selection import policy_in, roll_back_to


def stage_run(root: Path, stage: str) -> RunFiles:
    files = RunFiles(root)
    files.write_config(f"stage: {stage}\n")
    return files


def test_a_reward_model_has_nothing_to_generate_with(tmp_path: Path) -> None:
    files = stage_run(tmp_path / "rm", "reward-model")
    files.reward.mkdir()
    with pytest.raises(ConfigError) as refused:
        policy_in(str(files.root))
    assert str(refused.value) == f"run {files.root}: is a reward model; there is nothing to generate with"


def test_an_unfinished_sft_run_does_not_advise_a_checkpoint(tmp_path: Path) -> None:
    files = stage_run(tmp_path / "sft", "sft")
    with pytest.raises(ConfigError, match=r"has no saved policy, because it has not ended; wait for its end$"):
        policy_in(str(files.root))


def test_commands_for_runs_of_quartet_train_refuse_a_stage_without_advising_to_train_it(tmp_path: Path) -> None:
    files = stage_run(tmp_path / "sft", "sft")
    files.policy.mkdir()
    for command, call in (
        ("rollback", lambda: rollback(files.root, "latest")),
        ("rollback", lambda: roll_back_to(files, "latest")),
        ("fork", lambda: fork(files.root, "latest", "new", [])),
    ):
        with pytest.raises(ConfigError) as refused:
            call()
        expected = f"{command} {files.root}: is a run of quartet sft; expected one of quartet train"
        assert str(refused.value) == expected
    with pytest.raises(
        ConfigError, match="is of a run of quartet sft; give the config of one of quartet train with --"
    ):
        evaluate(str(files.root), None, [], "cpu", True, None)
