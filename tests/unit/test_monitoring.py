"""The files of docker/monitoring, compared with each other, the config and docs/reference/metrics.md.

tests/training/test_observability.py compares them with the metrics of real processes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from quartet.config.guards import GuardsConfig
from quartet.contract.control import RunState
from quartet.contract.status import GeneratorState, Role
from tests.every_case import every_case

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker/monitoring"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana/dashboards/quartet.json").read_text(encoding="utf-8"))
RULES = [
    rule
    for group in yaml.safe_load((FOLDER / "rules.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
PROMETHEUS: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
PAIRS = {")": "(", "]": "[", "}": "{"}


def dashboard_targets() -> Iterator[tuple[str, str]]:
    """Yield the title of each panel, with its expression."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


def expressions() -> list[tuple[str, str]]:
    """Return the name and the PromQL expression of every rule and every panel."""
    return [*((rule["alert"], rule["expr"]) for rule in RULES), *dashboard_targets()]


@cache
def names_in_expressions() -> frozenset[str]:
    """Return every metric that a rule or a panel queries."""
    results: set[str] = set()
    for _, expression in expressions():
        plain = re.sub(r'"[^"]*"', '""', expression)
        results |= set(re.findall(r"\b(?:quartet|process|python)_\w+|\bup\b", plain))
    return frozenset(results)


def problem_of(expression: str) -> str:
    """Return the problem with the brackets and quotes of a PromQL expression, or an empty string."""
    open_brackets: list[str] = []
    plain = re.sub(r'"[^"]*"', "", expression)
    if '"' in plain:
        return "a quote is not closed"
    for character in plain:
        if character in PAIRS.values():
            open_brackets.append(character)
        elif character in PAIRS and (not open_brackets or open_brackets.pop() != PAIRS[character]):
            return f"{character} closes nothing"
    return f"{open_brackets[-1]} is not closed" if open_brackets else ""


@every_case(("where", "expression"), expressions())
def test_expressions_have_balanced_brackets_and_quotes(where: str, expression: str) -> None:
    assert problem_of(expression) == ""
    assert re.search(r"\b(quartet|process)_\w+|\bup\b", expression), "queries no metric"


@pytest.mark.parametrize(("broken", "problem"), [("a(b[5m)", ") closes"), ("(a", "( is"), ('a{b="c}', "a quote")])
def test_unbalanced_expressions_are_detected(broken: str, problem: str) -> None:
    assert problem_of(broken).startswith(problem)


def test_rules_have_a_severity_a_summary_and_a_description() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert all(problem_of(text) == "" for text in rule["annotations"].values())


@pytest.mark.parametrize(("subject", "possible"), [("run", RunState), ("generator", GeneratorState)])
def test_queried_states_exist(subject: str, possible: type[RunState | GeneratorState]) -> None:
    states = [
        state
        for _, expression in expressions()
        for matched in re.findall(rf'quartet_{subject}_state{{[^}}]*\bstate[!=]=?~?"([^"]*)"', expression)
        for state in matched.split("|")
    ]
    assert states
    assert set(states) <= {state.value for state in possible}


def test_prometheus_scrapes_every_process() -> None:
    assert PROMETHEUS["rule_files"] == ["rules.yml"]
    services, generators, environments, gateway = PROMETHEUS["scrape_configs"]
    roles = {target["labels"]["role"] for target in services["static_configs"]}
    assert roles == {role.value for role in Role} - {"generator", "environment"}
    for role, jobs in (("generator", generators), ("environment", environments)):
        assert [(job["names"], job["port"]) for job in jobs["dns_sd_configs"]] == [([role], 9100)]
    assert all(target["targets"] == [f"{target['labels']['role']}:9100"] for target in services["static_configs"])
    assert gateway["authorization"]["credentials_file"], "the config must not contain a token"


def test_dashboard_panels_are_described_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    occupied = set()
    for panel in panels:
        position = panel["gridPos"]
        cells = {(position["x"] + x, position["y"] + y) for x in range(position["w"]) for y in range(position["h"])}
        assert position["x"] + position["w"] <= 24
        assert not cells & occupied, f"{panel['title']}: overlaps another panel"
        occupied |= cells
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["datasource"]["uid"] == "${datasource}"
    known = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) - {"__all"} <= known


def test_grafana_finds_the_dashboard_and_prometheus() -> None:
    folder = FOLDER / "grafana/provisioning"
    [source] = yaml.safe_load((folder / "datasources/prometheus.yml").read_text())["datasources"]
    [provider] = yaml.safe_load((folder / "dashboards/quartet.yml").read_text())["providers"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"


def test_every_queried_metric_is_documented() -> None:
    documented = set(
        re.findall(r"`(\w+?)(?:\{[^`]*\})?`", (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8"))
    )
    from_the_step = {f"quartet_{name}" for name in documented}
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in names_in_expressions()}
    assert families - documented - from_the_step == {"up"}


def test_guards_in_the_metrics_match_the_config() -> None:
    from quartet.services.orchestrator.telemetry.run_metrics import GUARDS

    assert set(GUARDS) == set(GuardsConfig.model_fields) - {"window_steps"}
