"""Models that the ranks of a group load in parts: the same weights as those of one process, each held once by the group."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from quartet.models.value_head import ValueModel
from quartet.models.weights.lora import add_adapter
from quartet.models.weights.snapshot import write_model
from quartet.models.workers.workers import SINGLE
from tests.unit.models import tiny
from tests.unit.models.workers import reading_rank
from tests.unit.models.workers.processes import run_ranks

SIZE = 3
"""Ranks. Few dimensions are multiples of it, so that shards have different sizes."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints, and with what each rank has loaded."""
    folder = tmp_path_factory.mktemp("parts")
    for kind in (*tiny.KINDS, *tiny.MIXTURES):
        tiny.causal(kind).save_pretrained(folder / kind)
    reward = tiny.classifier("llama")
    reward.save_pretrained(folder / "reward")
    write_model(folder / "critic", ValueModel.of_classifier(tiny.classifier("llama", seed=3)).snapshot())
    adapter = add_adapter(tiny.causal("llama"), str(folder / "llama"), 2, 4.0, seed=9)
    for parameter in adapter.parameters():
        torch.nn.init.normal_(parameter)
    write_model(folder / "llama-adapter", adapter.snapshot())
    run_ranks(reading_rank, folder, SIZE)
    return folder


@pytest.mark.parametrize("case", reading_rank.CASES)
def test_ranks_hold_parts_of_the_weights_and_buffers_of_one_process(loaded: Path, case: str) -> None:
    torch.set_num_threads(1)
    expected, single = reading_rank.state(case, loaded, SINGLE)
    reports = [json.loads((loaded / f"{case}-{rank}.json").read_text()) for rank in range(SIZE)]
    weights = safetensors.torch.load_file(loaded / f"{case}-0.safetensors")
    # Trained weights of half precision are float32 in a group, with the same values.
    assert {name: value.tolist() for name, value in weights.items()} == {
        name: value.tolist() for name, value in expected.items()
    }
    for report in reports:
        assert report["parameters"] == single["parameters"]
        # The trial passes of a group save what one process saves. Gathered weights do not count.
        assert report["activations"] == single["activations"]
        # Only the weights of a merged adapter cannot be read in parts.
        assert report["read_whole"] == (case == "llama-adapter")
    # Three ranks cannot share four experts.
    largest = 0.42 if case == "llama-lora" else 0.36
    if case.partition("-")[0] not in tiny.MIXTURES:
        assert max(report["held"] for report in reports) < largest * single["parameters"]
