"""Errors of the saves and restores of a group: out of memory is neither retried nor a damaged checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import torch

from quartet.errors import ModelError, OutOfMemory, QuartetError, ServiceFailed
from quartet.model_files.sharded_files import FOLDER, rank_file
from quartet.models.weights.saved_state import Part
from quartet.models.weights.streamed_model import StreamedModel
from quartet.models.workers import sharded_checkpoint
from quartet.models.workers.group_saves import GroupSaves
from quartet.models.workers.sharded_checkpoint import WEIGHTS, ShardedState, write_parts
from tests.unit.models import tiny

EXHAUSTED = torch.OutOfMemoryError("Tried to allocate 20 GiB")


@pytest.mark.parametrize(("error", "expected"), [(EXHAUSTED, OutOfMemory), (KeyError("x"), ServiceFailed)])
def test_out_of_memory_in_an_export_stays_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, expected: type[QuartetError]
) -> None:
    def write(*_: Any) -> None:
        raise error

    monkeypatch.setattr(StreamedModel, "write", write)
    workers: Any = SimpleNamespace(
        rank=0, prepare_background=lambda: None, agreed=lambda compute: compute(), complete=lambda value: value
    )
    with pytest.raises(QuartetError) as raised:
        GroupSaves(workers, tmp_path).save_model(tmp_path / "policy", [], tiny.causal("llama"), None)
    assert type(raised.value) is expected
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (EXHAUSTED, OutOfMemory),
        (MemoryError(), MemoryError),
        (OSError(5, "Input/output error"), ModelError),
        (safetensors.SafetensorError("invalid offset"), ModelError),
    ],
)
def test_out_of_memory_is_not_a_damaged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, expected: type[Exception]
) -> None:
    def read(*_: Any) -> None:
        raise error

    (tmp_path / FOLDER).mkdir()
    write_parts(rank_file(tmp_path, 0, 1), {f"{WEIGHTS}weight": Part.whole(torch.ones(3), True)})
    state = ShardedState(tmp_path, WEIGHTS)
    monkeypatch.setattr(sharded_checkpoint, "read_block", read)
    with pytest.raises(expected) as raised:
        state.tensor("weight")
    assert type(raised.value) is expected
