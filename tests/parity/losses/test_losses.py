"""Losses and estimators give the results of other libraries, which `make parity` has stored."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.parity.losses import section
from tests.parity.losses.batch import Batch, make_batch
from tests.parity.losses.case import Case, Group, compare, load, save, unique
from tests.parity.losses.cases import GROUPS

DOCS = Path(__file__).parents[3] / "docs/evidence/parity.md"
CASES = [(group, case) for group in GROUPS for case in group.cases]


@pytest.mark.parametrize(("group", "case"), CASES, ids=[case.key for _, case in CASES])
def test_results_are_those_of_the_peer(group: Group, case: Case) -> None:
    row = compare(case, load(group)[case.key])
    assert row.holds, f"{row.ours:.9g}, {case.peer} {row.theirs:.9g}, difference {row.difference:.1e}"


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.file)
def test_every_stored_result_has_a_case(group: Group) -> None:
    assert set(load(group)) == {case.key for case in group.cases}, "run make parity"


def test_the_page_has_a_row_for_every_case() -> None:
    page = section.existing(DOCS.read_text(encoding="utf-8"))
    for group, case in CASES:
        table = page.partition(f"### {group.title}\n")[2].partition("###")[0]
        assert f"{case.peer} `{case.theirs}`" in table, f"run make parity: {case.key}"
    assert len(re.findall(r"^\| .* \| [-+.0-9e]+ \|$", page, re.MULTILINE)) == len(CASES)
    assert "| **" not in page


def test_the_batch_reaches_every_clip_and_both_signs() -> None:
    batch = make_batch()
    ratio = (batch.log_probs - batch.old_log_probs).exp()
    for sign in (1, -1):
        for advantages in (batch.advantages, batch.token_advantages):
            chosen = ratio[(advantages * sign > 0) & (batch.mask > 0)]
            assert chosen.min() < 0.7
            assert chosen.max() > 3
    assert 0 < (batch.mask == 0).sum() < len(batch.mask) / 4


def _case(result: float) -> Case:
    def run(batch: Batch) -> dict[str, torch.Tensor]:
        return {"loss": torch.tensor(result, dtype=torch.float64), "gradient": batch.values * result}

    return Case("ours", "peer", "theirs", run, run)


@pytest.mark.parametrize(
    ("result", "holds"), [(1.0, True), (1.0 + 9e-7, True), (1.0 + 2e-6, False), (float("nan"), False)]
)
def test_a_result_may_differ_by_one_in_a_million(result: float, holds: bool) -> None:
    row = compare(_case(result), _case(1.0).run(make_batch()))
    assert row.holds is holds


def test_results_with_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="gradient"):
        compare(_case(1.0), {"loss": 1.0})


def test_stored_results_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.parity.losses.case.RESULTS", tmp_path / "results")
    group = Group("title", "file", (_case(2 / 3),))
    save(group, {case.key: case.run(make_batch()) for case in group.cases})
    assert compare(_case(2 / 3), load(group)[group.cases[0].key]).difference < 1e-11


def test_two_cases_cannot_have_one_key() -> None:
    with pytest.raises(ValueError, match="ours"):
        unique((_case(1.0), _case(2.0)))


def test_the_section_is_inserted_once_and_then_replaced() -> None:
    page = f"# Title\n\n## ppo\n\n{section.END}\nrest\n"
    rows = {"Table": [compare(_case(1.0), _case(1.0).run(make_batch()))]}
    text = section.write(rows, dict.fromkeys(section.PACKAGES, "1.0"))
    once = section.replace(page, text)
    assert section.replace(once, text) == once
    assert section.existing(once) == text
    assert section.existing(page) == ""
    assert once.count("| `ours` | peer `theirs` |") == 1
