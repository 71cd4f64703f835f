"""Updates by groups of processes over gloo, compared with those of one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from quartet.models.workers.workers import SINGLE, split_by_tokens
from tests.unit.models import tiny
from tests.unit.models.workers import rank
from tests.unit.models.workers.processes import run_ranks

WEIGHTS, OUTPUTS = 1e-5, 1e-4
"""Largest differences of float32 weights and log-probs to those of one process.

Ranks add the same gradients in another order, which changes their last bits. AdamW moves a weight by at most the rate, 1e-3, per
step, and takes the difference relative to the size of the gradient. ``rank.EPS`` limits it where a gradient is near 0. In 10 to
20 steps the difference of a weight reaches about 1e-6."""

REPEATED = ("ppo",)
"""Cases that the group of two runs twice."""

Results = dict[str, list[tuple[dict[str, torch.Tensor], dict[str, Any]]]]


def run_group(
    folder: Path, size: int, replicate: int = 1, tensor: int = 1, cases: Sequence[str] = rank.CASES
) -> Results:
    """Run cases with ``size`` processes, and some twice. Return the weights and metrics of each rank, by case."""
    repeated = REPEATED if size == 2 else rank.REPEATED
    cases = [*cases, *(rank.again(case) for case in repeated if case in cases)]
    run_ranks(rank, folder, size, replicate, tensor, *cases)
    return {
        case: [
            (
                safetensors.torch.load_file(folder / f"{case}-{number}.safetensors"),
                json.loads((folder / f"{case}-{number}.json").read_text()),
            )
            for number in range(size)
        ]
        for case in cases
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Results]:
    """A function that returns the results of a group of 2 with the quick cases, or of 4 with all. Each group runs once."""
    known: dict[int, Results] = {}

    def of_size(size: int) -> Results:
        if size not in known:
            cases = QUICK if size == 2 else rank.CASES
            known[size] = run_group(tmp_path_factory.mktemp("ranks"), size, cases=cases)
        return known[size]

    return of_size


QUICK = (
    *rank.OFFLOADED,
    "rloo-lora",
    "dropout-lora",
    "value",
    "few-tokens",
    "not-finite",
    "bfloat16",
    "correction-of_engine_with_masks",
    "kl_cov",
    "zamba2",
    "qwen3_moe",
)
SIZES = [2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.mark.parametrize(
    ("size", "case"),
    [*((2, case) for case in QUICK), *(pytest.param(4, case, marks=pytest.mark.slow) for case in rank.CASES)],
)
def test_a_group_computes_what_one_process_computes(
    results: Callable[[int], Results], case: str, size: int, tmp_path: Path
) -> None:
    weights, metrics = results(size)[case][0]
    compare_with_one_process(case, weights, metrics, tmp_path)


def compare_with_one_process(
    case: str, weights: dict[str, torch.Tensor], metrics: dict[str, Any], folder: Path
) -> None:
    """Compare the result of a group with that of one process. ``folder``: for files."""
    torch.set_num_threads(1)
    expected, expected_metrics = rank.run(case, SINGLE, folder)
    assert weights.keys() == expected.keys()
    assert metrics.keys() == expected_metrics.keys()
    for name, value in expected_metrics.items():
        if case != "bfloat16":
            assert metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
    assert expected_metrics["0/optimizer_steps"] > 0
    if case == "not-finite":
        assert metrics["0/skipped_steps"] == 2
    for name, value in weights.items():
        difference = (value.float() - expected[name].float()).abs().max().item()
        if case != "bfloat16":
            assert difference < (OUTPUTS if name == "scores" else WEIGHTS), name
        elif name != "scores" and not name.startswith("optimizer."):
            # One process sums bfloat16 gradients and keeps rounded weights, a group sums float32 and keeps master weights.
            assert difference < 2**-8 * value.abs().max() + 8 * rank.RATE, name


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_get_the_same_weights_and_metrics(results: Callable[[int], Results], size: int) -> None:
    for case, (first, *others) in results(size).items():
        for weights, metrics in others:
            assert metrics == first[1], case
            assert all(torch.equal(value, first[0][name]) for name, value in weights.items()), case


@pytest.mark.parametrize(
    ("size", "case"),
    [
        *((2, case) for case in REPEATED),
        *(pytest.param(4, case, marks=pytest.mark.slow) for case in rank.REPEATED),
    ],
)
def test_the_same_group_repeats_to_the_bit(results: Callable[[int], Results], case: str, size: int) -> None:
    first, second = (results(size)[name][0] for name in (case, rank.again(case)))
    assert first[1] == second[1]
    assert all(torch.equal(value, second[0][name]) for name, value in first[0].items())


@pytest.mark.slow
def test_a_group_with_compiled_layers_computes_what_one_process_computes(tmp_path: Path) -> None:
    again = rank.again("compiled")
    results = run_group(tmp_path, 2, cases=("compiled", again, "compiled-lora"))
    for case in ("compiled", "compiled-lora"):
        (weights, metrics), (others, other_metrics) = results[case]
        compare_with_one_process(case, weights, metrics, tmp_path)
        assert metrics == other_metrics
        assert all(torch.equal(value, others[name]) for name, value in weights.items())
    (first, metrics), (second, again_metrics) = results["compiled"][0], results[again][0]
    assert metrics == again_metrics
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_offload_changes_nothing_on_cpus(results: Callable[[int], Results]) -> None:
    offloaded, expected = (results(2)[case][0] for case in rank.OFFLOADED)
    assert offloaded[1] == expected[1]
    assert all(torch.equal(value, expected[0][name]) for name, value in offloaded[0].items())


def test_shares_have_nearly_equal_numbers_of_tokens() -> None:
    lengths = np.array([7, 1, 9, 3, 3, 5, 8])
    shares = split_by_tokens(lengths, 3)
    assert sorted(index for share in shares for index in share) == list(range(7))
    assert all(share == sorted(share) for share in shares)
    assert [int(lengths[share].sum()) for share in shares] == [12, 12, 12]


def test_a_rank_without_a_sequence_gets_an_empty_share() -> None:
    assert split_by_tokens([4, 9], 3) == [[1], [0], []]


def test_ranks_compute_equal_numbers_of_micro_batches() -> None:
    from quartet.models.workers.shares import share_of
    from quartet.models.workers.workers import Workers

    model, batch = tiny.causal("llama"), tiny.batch([2, 3, 1], [4, 9, 2])
    shares = []
    for number in range(4):
        workers = Workers()
        workers.data_rank, workers.data_size = number, 4
        shares.append(share_of(workers, model, batch, 5))
    assert {len(share.micro_batches) for share in shares} == {1}
    assert [share.padding for share in shares] == [0, 0, 0, 1]
    assert sorted(row for share in shares for part in share.counted() for row in part.rows) == [0, 1, 2]
