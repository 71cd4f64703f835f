"""Tests of the comparison without TRL: tolerances, replaced expressions, and the content of docs/evidence/parity.md."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.trl_rewriting import rewritten
from tests.parity import page, scenarios
from tests.parity.comparison import MetricComparison, compare, compare_change
from tests.parity.page import ScenarioResult

DOCS = Path(__file__).parents[2] / "docs/evidence/parity.md"
COMMON = {
    "log_probs",
    "reference_log_probs",
    "scores",
    "advantages",
    "kl_mean",
    "policy_loss",
    "clip_fraction",
    "entropy",
}
OF_PPO = COMMON | {
    "values",
    "returns",
    "value_loss",
    "value_clip_fraction",
    "approx_kl",
    "policy_weights",
    "critic_weights",
}
OF_RLOO = COMMON | {"grad_norm", "policy_weights"}


@pytest.mark.parametrize(
    ("quartet", "trl", "holds"),
    [
        (-0.05, -0.05, True),
        (-0.050004, -0.05, True),
        (-0.050006, -0.05, False),
        (0.05, -0.05, False),
        (0.0, 0.0, True),
        (1e-12, 0.0, False),
        (math.nan, 0.05, False),
        (math.nan, math.nan, False),
    ],
)
def test_numbers_may_differ_by_one_in_ten_thousand(quartet: float, trl: float, holds: bool) -> None:
    assert compare("policy_loss", quartet, trl).holds is holds


def test_one_wrong_element_of_an_array_fails_even_if_the_mean_is_right() -> None:
    trl = np.array([3.0, -4.0, 1.0, 0.0], np.float32)
    nudged = trl + np.array([0, 0, 3e-4, -3e-4], np.float32)
    far = trl + np.array([0, 0, 5e-4, -5e-4], np.float32)
    assert compare("advantages", nudged, trl).holds
    assert not compare("advantages", far, trl).holds
    assert compare("advantages", far, trl).difference == pytest.approx(5e-4 / 4, rel=1e-3)
    assert compare("advantages", trl, trl).trl == pytest.approx(math.sqrt(26 / 4))


def test_arrays_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="different rollouts"):
        compare("values", np.zeros(3, np.float32), np.zeros(4, np.float32))


def test_weights_are_compared_by_their_change() -> None:
    before = {"a": torch.full((2, 2), 100.0), "b": torch.zeros(3)}
    trl = {"a": before["a"] + 1, "b": before["b"]}
    ours = {"a": before["a"] + 1, "b": torch.tensor([0.0, 0.002, 0.0])}
    metric = compare_change("policy_weights", before, ours, trl, tolerance=1e-3)
    assert (metric.quartet, metric.trl) == (pytest.approx(2.0), 2.0)
    assert metric.difference == pytest.approx(0.001)
    assert not compare_change("policy_weights", before, before, trl, tolerance=1e-3).holds
    with pytest.raises(ValueError, match="different names"):
        compare_change("policy_weights", before, {"a": ours["a"]}, trl, tolerance=1e-3)


OFFSET = 10


def doubled(number: int) -> int:
    """Return a number computed with an expression that the tests replace."""
    result = 0
    for addend in (number, number + 1):
        result += 2 * (addend + 1)
    return result


def test_a_replaced_expression_still_uses_the_names_of_its_module() -> None:
    changed = rewritten(doubled, {"addend + 1": "addend - OFFSET"})
    assert doubled(3) == 2 * 4 + 2 * 5
    assert changed(3) == 2 * -7 + 2 * -6


def test_a_missing_expression_is_an_error() -> None:
    with pytest.raises(LookupError, match=r"addend \+ 2"):
        rewritten(doubled, {"addend + 1": "0", "addend + 2": "0"})


def test_a_metric_out_of_tolerance_fails_and_is_marked() -> None:
    metrics = [MetricComparison("policy_loss", 1.0, 2.0, 0.5), MetricComparison("clip_fraction", 0.1, 0.1, 0.0)]
    wrong = ScenarioResult("ppo", "about", metrics)
    assert [failure.split(": Quartet")[0] for failure in wrong.failures] == ["ppo: policy loss"]
    written = page.write([wrong], "trl 0", 1e-4, 1e-3)
    assert page.rows(written) == {"ppo": {"policy_loss": (0.5, False), "clip_fraction": (0.0, True)}}


def test_a_comparison_without_clipped_tokens_fails() -> None:
    idle = ScenarioResult("ppo", "about", [MetricComparison("clip_fraction", 0.0, 0.0, 0.0)])
    assert len(idle.failures) == 1
    assert "nothing was clipped" in idle.failures[0]


def test_the_page_shows_every_metric_of_every_scenario_within_tolerance() -> None:
    rows = page.rows(DOCS.read_text(encoding="utf-8"))
    expected = {
        scenario.name: names if scenario.compares_entropy else names - {"entropy"}
        for listed, names in ((scenarios.PPO, OF_PPO), (scenarios.RLOO, OF_RLOO))
        for scenario in listed
    }
    assert {name: set(metrics) for name, metrics in rows.items()} == expected
    for metrics in rows.values():
        for name, (difference, holds) in metrics.items():
            assert holds
            assert difference <= (1e-3 if name.endswith("_weights") else 1e-4)


def test_the_page_lists_every_difference() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for difference in (*page.differences.PPO, *page.differences.RLOO):
        assert (
            f"| {difference.what} | {difference.quartet} | {difference.trl} | {difference.reason} | {difference.handling} |"
            in text
        )
    for line in page.differences.NOT_COMPARED:
        assert f"- {line}" in text
