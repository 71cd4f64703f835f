"""Stages that are killed, started again or replace an earlier run, and damaged checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors import SafetensorError

from quartet.errors import ConfigError, ModelError, StorageFailed
from quartet.run_directory.run_files import RunFiles
from quartet.run_directory.step_lines import read_step_lines
from quartet.supervised import checkpoints, stage, trainers
from tests.supervised.test_stages import Stages
from tests.supervised.test_stages import stages as stages

THREE_STEPS = {"steps": 3}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def unfinished(files: RunFiles) -> Path:
    """Make a finished stage one that was killed after its last checkpoint. Return the checkpoint."""
    files.outcome.unlink()
    files.policy_record.unlink(missing_ok=True)
    for folder in (files.policy, files.reward):
        shutil.rmtree(folder, ignore_errors=True)
    (checkpoint,) = files.stage.iterdir()
    return checkpoint


@pytest.mark.parametrize(
    ("name", "lora"), [("sft", None), ("sft", {"rank": 2}), ("reward-model", None), ("reward-model", {"rank": 2})]
)
def test_a_stage_killed_after_its_last_checkpoint_trains_no_further_step(
    stages: Stages, capsys: pytest.CaptureFixture[str], name: str, lora: dict[str, Any] | None
) -> None:
    model = stages.folder / "model"
    shutil.copytree(stages.toy / "base", model)
    config = transformers.AutoConfig.from_pretrained(model)
    config.bos_token_id = 5  # Another one than the tokenizer's, which training writes into the config.
    config.save_pretrained(model)
    options: dict[str, Any] = {"model": {"path": str(model), "lora": lora}, "run": {"steps": 2}}
    files = stages.run(name, **options)
    output = files.policy if name == "sft" else files.reward
    whole, lines = contents(output), read_step_lines(files.metrics)
    unfinished(files)
    capsys.readouterr()
    stages.run(name, resume=True, **options)
    assert "step 3/2" not in capsys.readouterr().out
    assert read_step_lines(files.metrics) == lines
    assert contents(output) == whole
    assert files.is_finished(2)


@pytest.mark.parametrize("error", [ModelError("model base: cannot be used"), KeyboardInterrupt()])
def test_an_earlier_run_survives_a_replacement_that_completes_no_step(
    stages: Stages, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    files = stages.run("sft", run={"steps": 1})
    before = contents(files.root)

    def fail(*_: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(trainers, "load_model", fail)
        with pytest.raises(type(error)):
            stages.run("sft", overwrite=True, run={"steps": 2})
    assert contents(files.root) == before


def test_a_replacement_that_completes_a_step_deletes_the_earlier_run(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = stages.run("sft", run={"steps": 1})

    def fail(*_: Any) -> Any:
        raise ModelError("cannot be merged")

    monkeypatch.setattr(trainers, "merged", fail)
    with pytest.raises(ModelError, match="cannot be merged"):
        stages.run("sft", overwrite=True, run={"steps": 2}, checkpoint={"every_steps": 0})
    assert len(read_step_lines(files.metrics)) == 2
    assert not files.policy.exists()
    assert not files.earlier.exists()


def test_the_earlier_run_is_deleted_at_the_first_checkpoint(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    files = stages.run("sft", run={"steps": 1})
    kept: list[bool] = []
    merged = trainers.merged
    monkeypatch.setattr(trainers, "merged", lambda model: (kept.append(files.earlier.exists()), merged(model))[1])
    stages.run("sft", overwrite=True, run={"steps": 2})
    assert kept == [False]


def truncated(name: str) -> Callable[[Path], None]:
    def spoil(checkpoint: Path) -> None:
        path = checkpoint / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return spoil


def missing(name: str) -> Callable[[Path], None]:
    return lambda checkpoint: (checkpoint / name).unlink()


def unpickle(*_: Any, **__: Any) -> Any:
    raise AssertionError("a pickle is read")


def pickled(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "pytorch_model.bin").write_bytes(b"\x80\x04N.")


def with_pickle(checkpoint: Path) -> None:
    (checkpoint / "optimizer.pt").write_bytes(b"\x80\x04N.")


@pytest.fixture(scope="module")
def cut(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Stages, int], Path]:
    """Return a function that gives a test a run of 3 steps killed after ``step``, one with a checkpoint.

    Each is trained once and copied. It returns the checkpoint.
    """
    trained: dict[int, Path] = {}

    def copied(stages: Stages, step: int) -> Path:
        if step not in trained:
            trained[step] = tmp_path_factory.mktemp("cut")
            with pytest.MonkeyPatch.context() as patch:
                cut_after(Stages(toy, trained[step]), patch, step)
        shutil.copytree(trained[step] / "runs", stages.folder / "runs")
        return RunFiles(stages.folder / "runs/sft").stage / f"step-{step:06d}"

    return copied


@pytest.mark.parametrize("step", [2, 3])
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(pickled, id="pickled-weights"),
        pytest.param(with_pickle, id="pickle-beside"),
        pytest.param(truncated("state.json"), id="truncated-state"),
        pytest.param(truncated("trainer_state.json"), id="truncated-trainer-state"),
        pytest.param(truncated("model.safetensors"), id="truncated-weights"),
        pytest.param(missing("state.json"), id="no-state"),
        pytest.param(missing("trainer_state.json"), id="no-trainer-state"),
    ],
)
def test_a_damaged_checkpoint_is_refused_with_a_remedy(
    stages: Stages,
    cut: Callable[[Stages, int], Path],
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path], None],
    step: int,
) -> None:
    spoil(cut(stages, step))
    monkeypatch.setattr(torch, "load", unpickle)
    with pytest.raises(ConfigError, match=r"^checkpoint .* is damaged \(.*\); start again with --overwrite$") as caught:
        stages.run("sft", resume=True, run=THREE_STEPS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("step", [2, 3])
def test_a_run_with_a_damaged_checkpoint_is_replaced(
    stages: Stages, cut: Callable[[Stages, int], Path], step: int
) -> None:
    pickled(cut(stages, step))
    files = stages.run("sft", overwrite=True, run=THREE_STEPS)
    assert files.is_finished(3)


@pytest.mark.parametrize("spoil", [truncated("state.safetensors"), missing("state.safetensors")])
def test_a_damaged_optimizer_is_refused_with_a_remedy(
    stages: Stages, cut: Callable[[Stages, int], Path], spoil: Callable[[Path], None]
) -> None:
    spoil(cut(stages, 2))
    with pytest.raises(ConfigError, match=r"is damaged \(.*\); start again with --overwrite$"):
        stages.run("sft", resume=True, run=THREE_STEPS)


def cut_after(stages: Stages, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Run a stage of 3 steps that is killed after ``step``, one with a checkpoint."""
    append = RunFiles.append_metrics

    def killed(files: RunFiles, metrics: dict[str, float]) -> None:
        append(files, metrics)
        if metrics["step"] == step + 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFiles, "append_metrics", killed)
        with pytest.raises(KeyboardInterrupt) if step < 3 else nullcontext():
            stages.run("sft", run=THREE_STEPS, checkpoint={"every_steps": step})
    if step == 3:
        unfinished(RunFiles(stages.folder / "runs/sft"))


def test_a_full_disk_ends_a_stage_with_the_folder_and_a_remedy(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_file", full)
        message = r"stage.step-000002: cannot be written \(I/O error: No space left.*\); fix that, then continue with --resume"
        with pytest.raises(StorageFailed, match=message):
            stages.run("sft", run={"steps": 2})
    files = stages.run("sft", overwrite=True, run={"steps": 2})
    assert files.policy.is_dir()


def test_a_stage_is_not_both_resumed_and_replaced(stages: Stages) -> None:
    files = stages.run("sft", run={"steps": 1})
    before = contents(files.root)
    with pytest.raises(ConfigError, match=r"--overwrite and --resume: .*; give only one"):
        stages.run("sft", resume=True, overwrite=True, run={"steps": 1})
    assert contents(files.root) == before


def test_a_reward_model_is_scored_on_the_device_of_its_trainer(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    build, reward, devices = trainers.build_trainer, stage.ModelReward, []

    def on_a_gpu(*arguments: Any) -> Any:
        trainer = build(*arguments)
        train = trainer.train

        def then_moved(**options: Any) -> None:
            train(**options)
            trainer.args = SimpleNamespace(device=torch.device("cuda:0"))

        trainer.train = then_moved
        return trainer

    def on_the_cpu(config: Any, device: str) -> Any:
        devices.append(device)
        return reward(config, "cpu")

    monkeypatch.setattr(trainers, "build_trainer", on_a_gpu)
    monkeypatch.setattr(stage, "ModelReward", on_the_cpu)
    stages.run("reward-model", run={"steps": 1})
    assert devices == ["cuda:0"]


def test_a_run_that_appears_before_the_lock_is_not_continued(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"run": {"steps": 2}}
    check = stage.check_stage

    def other_run_first(config: Any, report: Any) -> Any:
        monkeypatch.setattr(stage, "check_stage", check)
        stages.run("sft", **options)
        before.update(contents(RunFiles(config.run_directory).root))
        return check(config, report)

    before: dict[str, bytes] = {}
    monkeypatch.setattr(stage, "check_stage", other_run_first)
    with pytest.raises(ConfigError, match="holds an earlier run; use --resume to continue it"):
        stages.run("sft", **options)
    assert before
    assert contents(stages.folder / "runs/sft") == before


def test_a_new_start_takes_up_no_checkpoint(stages: Stages) -> None:
    options: dict[str, Any] = {"run": {"steps": 2}}
    files = stages.run("sft", **options)
    weights = contents(files.policy)
    stale = unfinished(files).rename(files.stage / "step-000001")
    for path in (files.metrics, files.identity):
        path.unlink()
    stages.run("sft", **options)
    assert [line["step"] for line in read_step_lines(files.metrics)] == [1, 2]
    assert not stale.exists()
    assert contents(files.policy) == weights
