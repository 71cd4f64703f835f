"""What Helm refuses of `config`: what the config tree would refuse, and what the chart sets itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from helm import values_schema
from quartet.config import load_config
from tests.helm.rendering import CHART, ROOT, changed, chart, manifests
from tests.helm.test_components import files
from tests.helm.test_values import refusal

SHIPPED = [*sorted((ROOT / "configs").rglob("*.yaml")), ROOT / "src/quartet/demo/demo.yaml"]

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt": ({"algorithm": {"kl_coeficient": 0.1}}, "'/config/algorithm': additional properties 'kl_coeficient'"),
    "deep": ({"guards": {"kl_runaway": {"abov": 1}}}, "'/config/guards/kl_runaway': additional properties 'abov'"),
    "choice": ({"algorithm": {"estimator": "ppo"}}, "'/config/algorithm/estimator': value must be one of 'gae'"),
    "too much": ({"algorithm": {"gamma": 1.5}}, "'/config/algorithm/gamma': maximum: got 1.5, want 1"),
    "too little": ({"run": {"steps": 0}}, "'/config/run/steps': minimum: got 0, want 1"),
    "not above": ({"algorithm": {"dual_clip": 1}}, "'/config/algorithm/dual_clip': exclusiveMinimum: got 1, want 1"),
    "text": ({"algorithm": {"clip_ratio": "0.2"}}, "'/config/algorithm/clip_ratio': got string, want number"),
    "null": ({"critic": None}, "'/config/critic': got null, want object"),
    "in a list": (
        {"reward": {"source": "ensemble", "parts": [{"name": "a", "wait": 1}]}},
        "'/config/reward/parts/0': additional properties 'wait'",
    ),
    "a pair": (
        {"critic": {"optimizer": {"betas": [0.9]}}},
        "'/config/critic/optimizer/betas': minItems: got 1, want 2",
    ),
    "left out": ({"data": {"max_prompt_tokens": 8}}, "'/config/data': missing property 'prompts'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_the_tree_refuses_is_refused_with_its_path(case: str) -> None:
    sections, said = WRONG[case]
    values = changed("cpu-kind")
    values["config"] |= sections
    assert said in refusal(values)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_is_taken(path: Path) -> None:
    chart().validate_schema({"config": helm_python.values_from_yaml(path.read_text(encoding="utf-8"))})


def test_a_config_as_resolved_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(files(changed("cpu-kind"))["config.yaml"], encoding="utf-8")
    chart().validate_schema({"config": yaml.safe_load(load_config(path).to_yaml())})


def test_null_that_means_something_comes_through(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(files(changed("cpu-kind", config__algorithm={"importance_cap": None}))["config.yaml"])
    assert load_config(path).algorithm.importance_cap is None


def test_the_schema_is_that_of_the_tree() -> None:
    kept = values_schema.SCHEMA.read_text(encoding="utf-8")
    assert kept == values_schema.generated(kept), "run make helm-schema and commit"
    assert values_schema.main([]) == 0


def test_a_schema_of_another_tree_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "values.schema.json"
    other.write_text((CHART / "values.schema.json").read_text(encoding="utf-8").replace('"rloo", ', ""))
    monkeypatch.setattr(values_schema, "SCHEMA", other)
    assert values_schema.main([]) == 1
    said = capsys.readouterr()
    assert '+              "enum": ["gae", "reinforce", "rloo", "grpo", "reinforce_plus_plus"],' in said.out
    assert "make helm-schema" in said.err
    assert values_schema.main(["--write"]) == 0
    assert values_schema.main([]) == 0


# What the chart sets in cpu-kind, each with a value that is not the chart's.
OTHERS = {bool: lambda laid: not laid, list: lambda laid: [*laid, *(laid or [0])], str: lambda laid: f"{laid}1"}


def laid_over(node: dict[str, Any], path: str = "config") -> dict[str, Any]:
    """What the chart lays over the config, by its path."""
    found: dict[str, Any] = {}
    for key, value in node.items():
        place = f"{path}__{key}"
        found |= laid_over(value, place) if isinstance(value, dict) else {place: value}
    return found


LAID = laid_over(yaml.safe_load(files(changed("cpu-kind", gateway__requestsPerSecond=50))["deployment.yaml"]))


@pytest.mark.parametrize("path", LAID)
def test_what_the_chart_would_overwrite_is_refused(path: str) -> None:
    laid = LAID[path]
    other = OTHERS[type(laid)](laid) if type(laid) in OTHERS else laid + 1
    said = refusal(changed("cpu-kind", gateway__requestsPerSecond=50, **{path: other}))
    assert f"{path.replace('__', '.')}: the chart sets it; leave it out, and see " in said


def test_what_the_chart_would_set_so_itself_is_let_be() -> None:
    same = {**LAID, "config__services__actor__address": None, "config__gateway__allowed_hosts": []}
    assert manifests(changed("cpu-kind", gateway__requestsPerSecond=50, **same))


@pytest.mark.parametrize(
    ("path", "value", "instead"),
    [
        ("config__timeouts__drain", 5, "components.NAME.drainSeconds"),
        ("config__gateway__enabled", False, "components.gateway.enabled"),
    ],
)
def test_what_the_chart_does_in_another_way_is_refused(path: str, value: object, instead: str) -> None:
    said = refusal(changed("cpu-kind", **{path: value}))
    assert f"{path.replace('__', '.')}: the chart" in said
    assert instead in said


def test_what_the_chart_leaves_alone_is_taken() -> None:
    values = changed("cpu-kind", config__services={"actor": {"threads": 3}}, config__gateway={"requests_per_second": 5})
    config = yaml.safe_load(files(values)["config.yaml"])
    assert config["services"] == {"actor": {"threads": 3}}
    assert config["gateway"] == {"requests_per_second": 5}
