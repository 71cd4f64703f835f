"""Models that are written one tensor after the other have the bytes that transformers writes."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from quartet.models.weights import streamed_model
from quartet.models.weights.safetensors_file import DTYPES, SafetensorsFile
from quartet.models.weights.streamed_model import StreamedModel, write_config
from tests.unit.models import tiny


def write(model: object, directory: Path) -> None:
    directory.mkdir()
    state = model.state_dict(keep_vars=True)  # type: ignore[attr-defined]
    write_config(model, directory, model.dtype)  # type: ignore[attr-defined]
    distinct = {id(value): (name, value) for name, value in state.items()}
    with StreamedModel(model, state, directory) as files:
        for name, value in distinct.values():
            files.write(name, value)


@pytest.mark.parametrize("kind", [*tiny.KINDS, *tiny.MIXTURES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_files_are_those_of_save_pretrained(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny.causal(kind).to(dtype)
    write(model, tmp_path / "streamed")
    tiny.saved(model, tmp_path / "expected")
    names = sorted(path.name for path in (tmp_path / "expected").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "streamed").iterdir())
    assert filecmp.cmpfiles(tmp_path / "expected", tmp_path / "streamed", names, shallow=False)[1:] == ([], [])


@pytest.mark.parametrize("raises", [True, False])
def test_tensors_that_a_checkpoint_stores_as_one_are_written_together(
    raises: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def join(model: object, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        result = dict(state)
        for name in [name for name in state if "gate_proj" in name]:
            if not raises and name.replace("gate", "up") not in state:
                continue
            parts = result.pop(name), result.pop(name.replace("gate", "up"))
            result[name.replace("gate", "gate_up")] = torch.cat(parts)
        return result

    model = tiny.causal("llama")
    monkeypatch.setattr(streamed_model, "revert_weight_conversion", join)
    write(model, tmp_path / "streamed")
    written = safetensors.torch.load_file(tmp_path / "streamed" / "model.safetensors")
    expected = join(model, model.state_dict())
    assert written.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in written.items())


def test_a_large_model_is_split_into_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.causal("llama")
    monkeypatch.setattr(streamed_model, "MAX_FILE_SIZE", "40KB")
    write(model, tmp_path / "streamed")
    model.save_pretrained(tmp_path / "expected", max_shard_size="40KB")
    names = sorted(path.name for path in (tmp_path / "expected").glob("*.safetensors"))
    assert len(names) > 1
    assert filecmp.cmpfiles(tmp_path / "expected", tmp_path / "streamed", names, shallow=False)[1:] == ([], [])
    index, expected = (
        json.loads((tmp_path / folder / "model.safetensors.index.json").read_text())
        for folder in ("streamed", "expected")
    )
    assert index["weight_map"] == expected["weight_map"]
    assert index["metadata"]["total_size"] == expected["metadata"]["total_size"]


def test_a_file_of_every_type_is_that_of_the_library(tmp_path: Path) -> None:
    tensors = {f"{name} ü": torch.arange(6).reshape(2, 3).to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 2)}
    with SafetensorsFile(tmp_path / "streamed", tensors, {"format": "pt"}) as file:
        for name in reversed(tensors):
            file.write(name, tensors[name])
    safetensors.torch.save_file(tensors, tmp_path / "expected", metadata={"format": "pt"})
    assert (tmp_path / "streamed").read_bytes() == (tmp_path / "expected").read_bytes()


@pytest.mark.parametrize("given", [torch.zeros(4, 2), torch.zeros(8), torch.zeros(4, dtype=torch.float64)])
def test_a_tensor_that_the_header_does_not_describe_is_refused(given: torch.Tensor, tmp_path: Path) -> None:
    with (
        SafetensorsFile(tmp_path / "file", {"first": torch.zeros(4), "second": torch.zeros(4)}, {}) as file,
        pytest.raises(ValueError, match=r"file: first has shape and type .* expected \(\(4,\), torch.float32\)"),
    ):
        file.write("first", given)
