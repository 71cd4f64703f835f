"""Models that the ranks of a group load in parts: the same weights as those of one process, each held once by the group."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from quartet.config.models import LoraConfig
from quartet.models.value_head import ValueModel
from quartet.models.weights.lora import add_adapter
from quartet.models.weights.snapshot import write_model
from quartet.models.workers.workers import SINGLE
from tests.unit.models import multimodal, tiny
from tests.unit.models.workers import reading_rank
from tests.unit.models.workers.processes import run_ranks

SIZE = 3
"""Ranks. Few dimensions are multiples of it, so that shards have different sizes."""


def load(folder: Path, cases: tuple[str, ...], size: int = SIZE, replicate: int = 1) -> Path:
    """Write checkpoints to ``folder``, load the cases in a group of ``size`` ranks, and return the folder."""
    for kind in (*tiny.KINDS, *tiny.MIXTURES, *reading_rank.HYBRIDS):
        if any(kind in case.split("-") for case in (*cases, "llama")):
            tiny.causal(kind).save_pretrained(folder / kind)
    multimodal.model("qwen2_audio").save_pretrained(folder / "qwen2_audio")
    tiny.classifier("llama").save_pretrained(folder / "reward")
    write_model(folder / "critic", ValueModel.of_classifier(tiny.classifier("llama", seed=3)).snapshot())
    adapter = add_adapter(tiny.causal("llama"), str(folder / "llama"), LoraConfig(rank=2, alpha=4.0), 9)
    for parameter in adapter.parameters():
        torch.nn.init.normal_(parameter)
    write_model(folder / "llama-adapter", adapter.snapshot())
    (folder / "cases").write_text(" ".join(cases))
    run_ranks(reading_rank, folder, size, replicate)
    return folder


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that returns the folder with what each rank has loaded in a case. The slow cases run in another group."""
    known: dict[bool, Path] = {}

    def of_case(case: str) -> Path:
        quick = case in reading_rank.QUICK
        if quick not in known:
            cases = tuple(each for each in reading_rank.CASES if (each in reading_rank.QUICK) == quick)
            known[quick] = load(tmp_path_factory.mktemp("parts"), cases)
        return known[quick]

    return of_case


@pytest.mark.parametrize(
    "case",
    [case if case in reading_rank.QUICK else pytest.param(case, marks=pytest.mark.slow) for case in reading_rank.CASES],
)
def test_ranks_hold_parts_of_the_weights_and_buffers_of_one_process(loaded: Callable[[str], Path], case: str) -> None:
    torch.set_num_threads(1)
    folder = loaded(case)
    expected, single = reading_rank.state(case, folder, SINGLE)
    reports = [json.loads((folder / f"{case}-{rank}.json").read_text()) for rank in range(SIZE)]
    weights = safetensors.torch.load_file(folder / f"{case}-0.safetensors")
    # Trained weights of half precision are float32 in a group, with the same values.
    assert {name: value.tolist() for name, value in weights.items()} == {
        name: value.tolist() for name, value in expected.items()
    }
    hybrid = case.partition("-")[0] in reading_rank.HYBRIDS
    for report in reports:
        assert report["parameters"] == single["parameters"]
        # The trial passes of a group save what one process saves. Gathered weights do not count.
        assert report["activations"] == pytest.approx(single["activations"], rel=0.03 if hybrid else 0)
        # Only the weights of a merged adapter cannot be read in parts.
        assert report["read_whole"] == (case == "llama-adapter")
    # Three ranks cannot share four experts.
    largest = 0.42 if case == "llama-lora" else 0.36
    if case.partition("-")[0] not in tiny.MIXTURES:
        assert max(report["held"] for report in reports) < largest * single["parameters"]


@pytest.mark.slow  # The test above reads one copy in parts.
def test_each_copy_of_a_model_is_read_in_parts(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    cases = ("llama-bfloat16", "llama-lora")
    folder = load(tmp_path, cases, size=4, replicate=2)
    for case in cases:
        expected, single = reading_rank.state(case, folder, SINGLE)
        for rank in range(4):
            report = json.loads((folder / f"{case}-{rank}.json").read_text())
            weights = safetensors.torch.load_file(folder / f"{case}-{rank}.safetensors")
            assert all(torch.equal(weights[name].to(value.dtype), value) for name, value in expected.items())
            assert not report["read_whole"]
            assert report["held"] < 0.58 * single["parameters"]
