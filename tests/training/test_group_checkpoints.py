"""Checkpoints of worker groups: one file per rank, restored by any number of processes, and exported as one model."""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from quartet.contract.weights import SaveKind
from quartet.errors import ModelError
from quartet.model_files.sharded_files import rank_file
from quartet.model_files.weight_files import read_headers, same_bytes
from quartet.models.weights.loading import load_causal_lm, write_consolidated
from quartet.models.workers.workers import SINGLE
from quartet.run_directory.checkpoints import DamagedCheckpoint, read_verified_checkpoint
from quartet.system.durable_files import describe_files
from tests.training.group_checkpoints import (
    CASES,
    RUN,
    Group,
    build,
    continue_checkpoint,
    run_groups,
    save,
    save_base,
    saved_files,
    saved_state,
    state,
)

FEW = ["bfloat16", "critic", "multimodal"]
SLICED = ["bfloat16", "critic", "actor-lora", "multimodal"]
ALL = [case for case in CASES if case != "large"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of two ranks, and those of two ranks that compute slices of the same layers."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for case in {*FEW, *SLICED}:
        save_base(folder, case)
    run_groups(folder, Group(2, "train-two", FEW), Group(2, "train-sliced", SLICED, tensor=2))
    return folder


def assert_equal(states: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert states.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(value, states[name])] == []


def assert_same_files(directory: Path, expected: Path) -> None:
    names = sorted(path.name for path in expected.iterdir())
    assert names == sorted(path.name for path in directory.iterdir())
    assert filecmp.cmpfiles(directory, expected, names, shallow=False)[1:] == ([], [])


@pytest.mark.parametrize("case", FEW)
def test_one_process_restores_the_checkpoint_of_a_group(folder: Path, case: str) -> None:
    model = build(folder, case)
    model.restore(RUN, 3, 1, f"{case}-two")
    assert_equal(state(model), saved_state(folder, case, "train-two", 2))
    save(model, f"{case}-single", SaveKind.MODEL)
    # The group has gathered one tensor after the other.
    assert_same_files(folder / f"{case}-two-model", folder / f"{case}-single")


@pytest.mark.parametrize("case", FEW)
def test_the_group_reports_every_file_with_its_digest(folder: Path, case: str) -> None:
    files = saved_files(folder, case, "train-two", 2)
    assert files == describe_files(folder, folder / f"{case}-two")
    assert len([file for file in files if "/sharded/rank-" in file.path]) == 2


def test_each_rank_writes_its_part(folder: Path) -> None:
    files = saved_files(folder, "bfloat16", "train-two", 2)
    first, second = (file.bytes for file in files if "/sharded/rank-" in file.path)
    assert 0.8 < second / first <= 1


def test_a_checkpoint_of_a_group_is_exported_without_a_group(folder: Path, tmp_path: Path) -> None:
    checkpoint = folder / "bfloat16-two"
    write_consolidated(checkpoint, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (
        folder / "bfloat16-two-model/model.safetensors"
    ).read_bytes()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (checkpoint / name).read_bytes() == (folder / "bfloat16-two-model" / name).read_bytes()
        shutil.copyfile(checkpoint / name, tmp_path / name)
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert exported.dtype == torch.bfloat16
    assert_equal(exported.state_dict(), load_causal_lm(checkpoint, "bfloat16").state_dict())


def test_the_checkpoint_of_a_group_has_the_towers_of_a_multimodal_model(folder: Path, tmp_path: Path) -> None:
    checkpoint, source = folder / "multimodal-two", read_headers(folder / "multimodal-base")
    write_consolidated(checkpoint, tmp_path)
    exported = read_headers(tmp_path)
    assert exported.keys() == source.keys()
    for name, entry in exported.items():
        assert same_bytes(entry, source[name]) == name.startswith("visual.")
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (folder / "multimodal-two-model" / path.name).read_bytes()


def remove(file: Path) -> None:
    file.unlink()


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def change(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("damage", "problem", "error"),
    [
        (remove, "is missing", "is missing"),
        (truncate, "does not match", "cannot be read"),
        (change, "does not match", None),
    ],
)
def test_a_damaged_part_is_noticed_before_a_restore(
    folder: Path, tmp_path: Path, damage: Callable[[Path], None], problem: str, error: str | None, rank: int
) -> None:
    checkpoint = tmp_path / "step-000003"
    shutil.copytree(folder / "bfloat16-two", checkpoint / "actor")
    files = describe_files(checkpoint, checkpoint)
    manifest = {"format": 1, "run": RUN, "step": 3, "leader_epoch": 1, "state": {}, "roles": ["actor"]}
    manifest["files"] = {file.path: {"bytes": file.bytes, "sha256": file.sha256} for file in files}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    assert read_verified_checkpoint(checkpoint).holds("actor")
    file = rank_file(checkpoint / "actor", rank, 2)
    damage(file)
    with pytest.raises(DamagedCheckpoint, match=f"{file.name} {problem}"):
        read_verified_checkpoint(checkpoint)
    if error is not None:
        with pytest.raises(ModelError, match=error):
            load_causal_lm(checkpoint / "actor")


def test_files_of_different_saves_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "bfloat16-two", tmp_path / "actor")
    rank_file(tmp_path / "actor", 1, 2).rename(rank_file(tmp_path / "actor", 1, 4))
    with pytest.raises(ModelError, match=r"expected the files rank-00000-of-N.safetensors and so on of one save"):
        load_causal_lm(tmp_path / "actor")
    rank_file(tmp_path / "actor", 0, 2).unlink()
    rank_file(tmp_path / "actor", 1, 4).rename(rank_file(tmp_path / "actor", 0, 1))
    with pytest.raises(ModelError, match="is not complete"):
        load_causal_lm(tmp_path / "actor")


def assert_errors(folder: Path, expected: dict[str, tuple[str, str]], rank: int) -> None:
    errors = json.loads((folder / f"errors-{rank}.json").read_text())
    for fault, (kind, text) in expected.items():
        assert errors[fault][0] == kind
        assert text in errors[fault][1]


def test_a_rank_that_fails_or_ends_leaves_no_checkpoint(folder: Path) -> None:
    expected = {
        "full": ("StorageFailed", "rank 1 of 2 cannot write its file"),
        "unforeseen": ("ServiceFailed", "rank 1 of 2 has failed"),
        "ended": ("RuntimeError", ""),
    }
    assert_errors(folder, expected, 0)


def test_all_ranks_learn_that_a_model_cannot_be_written(folder: Path) -> None:
    expected = {
        "model-full": ("StorageFailed", "No space left on device"),
        "model-full-when-closed": ("StorageFailed", "No space left on device"),
        "model-unforeseen": ("ServiceFailed", "ValueError: unforeseen"),
    }
    assert_errors(folder, expected, 0)
    assert_errors(folder, dict.fromkeys(expected, ("ServiceUnavailable", "rank 0 of 2 has failed")), 1)


def test_all_ranks_learn_that_one_cannot_read_its_parts(folder: Path) -> None:
    assert_errors(folder, {"read": ("ServiceUnavailable", "rank 1 of 2 has failed")}, 0)
    assert_errors(folder, {"read": ("ModelError", "No space left on device; take the checkpoint before it")}, 1)
    assert [json.loads((folder / f"errors-{rank}.json").read_text())["read again"] for rank in range(2)] == [[], []]


def assert_restored_and_exported(folder: Path, case: str, name: str, size: int) -> None:
    """Compare the checkpoint and the model of a group, ``case``-``name``, with the group's complete tensors, in one process."""
    expected = saved_state(folder, case, f"train-{name}", size)
    model = build(folder, case)
    model.restore(RUN, 3, 1, f"{case}-{name}")
    assert_equal(state(model), expected)
    save(model, f"{case}-single", SaveKind.MODEL)
    exported = folder / f"{case}-{name}-model"
    assert_same_files(exported, folder / f"{case}-single")
    if not case.startswith("critic"):
        kind = transformers.AutoModelForMultimodalLM if case == "multimodal" else transformers.AutoModelForCausalLM
        loaded = kind.from_pretrained(exported)
        weights = {key: value for key, value in loaded.state_dict().items() if not key.startswith("model.visual.")}
        assert_equal(weights, load_causal_lm(folder / f"{case}-single", str(loaded.dtype)[6:]).state_dict())
        if "lora" not in case:
            assert_equal(weights, {key: value for key, value in expected.items() if not key.startswith("optimizer.")})


@pytest.mark.parametrize("case", SLICED)
def test_slices_of_layers_are_restored_and_exported_complete(folder: Path, case: str) -> None:
    assert_restored_and_exported(folder, case, "sliced", 2)


@pytest.mark.slow
def test_slices_of_sharded_layers_are_restored_and_exported_complete(tmp_path: Path) -> None:
    cases = [case for case in ALL if case != "mixture"]
    for case in cases:
        save_base(tmp_path, case)
    run_groups(tmp_path, Group(4, "train-sliced", cases, tensor=2))
    for case in cases:
        assert_restored_and_exported(tmp_path, case, "sliced", 4)


@pytest.mark.slow
def test_any_number_of_processes_continues_a_checkpoint(tmp_path: Path) -> None:
    for case in ALL:
        save_base(tmp_path, case)
    run_groups(tmp_path, Group(4, "train-four", ALL), Group(2, "four-two", ALL))
    for case in ALL:
        continue_checkpoint(tmp_path, case, "two-one", SINGLE)
    run_groups(tmp_path, Group(2, "one-last", ALL))
    for case in ALL:
        expected = saved_state(tmp_path, case, "train-four", 4)
        for action, size in (("four-two", 2), ("two-one", 1), ("one-last", 2)):
            assert_equal(saved_state(tmp_path, case, action, size), expected)
        for target in ("two", "one", "last"):
            assert_same_files(tmp_path / f"{case}-{target}-model", tmp_path / f"{case}-four-model")


@pytest.mark.slow
def test_rank_0_holds_its_part_of_a_checkpoint_and_one_tensor_of_an_export(tmp_path: Path) -> None:
    save_base(tmp_path, "large")
    run_groups(tmp_path, Group(2, "memory", ["large"]), fresh=True)
    peaks = json.loads((tmp_path / "memory.json").read_text())
    # Half of the weights and of two moments, in a copy.
    assert 0.45 < peaks["checkpoint"] / peaks["checkpoint_files"] < 0.55, peaks
    # The largest of the tensors has a tenth of the bytes.
    assert peaks["model"] < 0.3 * peaks["model_files"], peaks
