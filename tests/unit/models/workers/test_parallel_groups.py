"""Updates by groups with copies of the model (replicate) and sliced layers (tensor), compared with those of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.unit.models.workers import rank
from tests.unit.models.workers.test_updates_of_groups import Results, compare_with_one_process, run_group

SHORT = ("ppo", "qwen2-lora")
CASES = (
    *SHORT,
    "rloo",
    "tied",
    "rloo-lora",
    "dropout-lora",
    "value",
    "value-lora",
    "frozen",
    "few-tokens",
    "not-finite",
    "bfloat16",
)
"""Cases of llama models but for ``rank.KINDS``: "tied" is all weights of a qwen2 model, with tied embeddings."""
ARCHITECTURES = ("gpt_neox", "qwen3", "qwen3-lora", "phi3", "phi3-lora")
"""Cases of further styles in the plans of transformers, and of biases."""
SIZES = {
    "tensor-2": (1, 1, 2, CASES + ARCHITECTURES),
    "replicate-2": (2, 1, 1, SHORT),
    "shard-2-tensor-2": (1, 2, 2, CASES),
    "replicate-2-shard-2": (2, 2, 1, CASES),
}
"""Replicate, shard, tensor, and cases, by name."""
ALWAYS = {"tensor-2": SHORT}
"""Cases that are not slow."""
PARAMETERS = [
    pytest.param(sizes, case, marks=[] if case in ALWAYS.get(sizes, ()) else pytest.mark.slow, id=f"{sizes}-{case}")
    for sizes, (_, _, _, cases) in SIZES.items()
    for case in cases
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[[str, str], Results]:
    """A function that returns the results of a group, by the name of its sizes, with those of a case. A group runs once with the
    cases that are not slow, and once with the others."""
    known: dict[tuple[str, bool], Results] = {}

    def of_sizes(sizes: str, case: str) -> Results:
        replicate, shard, tensor, cases = SIZES[sizes]
        always = case in ALWAYS.get(sizes, ())
        if (sizes, always) not in known:
            cases = tuple(each for each in cases if (each in ALWAYS.get(sizes, ())) == always)
            folder = tmp_path_factory.mktemp("ranks")
            known[sizes, always] = run_group(folder, replicate * shard * tensor, replicate, tensor, cases)
        return known[sizes, always]

    return of_sizes


@pytest.mark.parametrize(("sizes", "case"), PARAMETERS)
def test_a_group_computes_what_one_process_computes(
    results: Callable[[str, str], Results], sizes: str, case: str, tmp_path: Path
) -> None:
    first, *others = results(sizes, case)[case]
    compare_with_one_process(case, *first, tmp_path)
    for weights, metrics in others:
        assert metrics == first[1]
        assert all(torch.equal(value, first[0][name]) for name, value in weights.items())


@pytest.mark.parametrize(("sizes", "case"), [each for each in PARAMETERS if each.values[1] in rank.REPEATED])
def test_the_same_group_repeats_to_the_bit(results: Callable[[str, str], Results], sizes: str, case: str) -> None:
    once, twice = (results(sizes, case)[name][0] for name in (case, rank.again(case)))
    assert once[1] == twice[1]
    assert all(torch.equal(value, twice[0][name]) for name, value in once[0].items())


@pytest.mark.slow
def test_a_whole_parameter_that_gets_a_part_of_its_gradient_is_refused(tmp_path: Path) -> None:
    """The plan of phi does not name its norms of heads."""
    message = (
        r"tensor 2: model\.layers\.0\.self_attn\.[qk]_layernorm\.weight and 7 more parameters of the phi model would get a part "
        "of the gradient only: .*; set tensor 1"
    )
    with pytest.raises(AssertionError, match=message):
        run_group(tmp_path, 2, tensor=2, cases=["phi"])
