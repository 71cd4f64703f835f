"""The table of metrics: every chart's metrics are defined, and names of parts are filled in."""

from __future__ import annotations

from quartet.telemetry.metric_definition import CHART_CURVES
from quartet.telemetry.step_metrics import CHARTS, METRICS, definition_of


def test_each_metric_of_a_chart_is_defined_and_in_one_chart() -> None:
    names = [name for _, _, labels in CHART_CURVES for name in labels]
    assert len(names) == len(set(names))
    assert set(names) == {name for name, definition in METRICS.items() if definition.chart}
    assert {name: definition.chart for name, definition in METRICS.items() if definition.chart} == {
        definition.name: title for title, definitions in CHARTS.items() for definition in definitions
    }


def test_the_definition_of_a_metric_names_its_part() -> None:
    definition = definition_of("reward_help_ful_mean")
    assert definition is not None
    assert (definition.name, definition.label) == ("reward_help_ful_mean", "help_ful")
    assert definition.meaning == "Mean unweighted score of the ensemble part help_ful."
    definition = definition_of("eval_gsm8k_main_pass_at_16")
    assert definition is not None
    assert (definition.name, definition.label) == ("eval_gsm8k_main_pass_at_16", "gsm8k_main pass@16")
    assert definition.meaning.startswith("Probability that at least one of 16 responses to a prompt of")
    assert definition_of("eval_gsm8k_pass_at_all") is None
    assert definition_of("kl_mean") is METRICS["kl_mean"]
    assert definition_of("no_such_metric") is None


def test_titles_have_the_unit_that_the_label_lacks() -> None:
    titles = [METRICS[name].title for name in ("reward_mean", "kl_mean", "entropy", "response_tokens_mean")]
    assert titles == ["reward", "KL, nats per response", "entropy, nats per token", "tokens per response"]
