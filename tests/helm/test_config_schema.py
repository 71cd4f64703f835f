"""Helm refuses invalid values of `config`, and settings that the chart sets itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from helm import values_schema
from quartet.config import Config, invalid_keys, load_config
from tests.every_case import every_case
from tests.helm.rendering import CHART, ROOT, changed, chart, manifests
from tests.helm.test_components import files
from tests.helm.test_values import refusal

SHIPPED = [*sorted((ROOT / "configs").rglob("*.yaml")), ROOT / "src/quartet/demo/demo.yaml"]

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt": ({"algorithm": {"kl_coeficient": 0.1}}, "'/config/algorithm': additional properties 'kl_coeficient'"),
    "deep": ({"guards": {"kl_runaway": {"abov": 1}}}, "'/config/guards/kl_runaway': additional properties 'abov'"),
    "choice": ({"algorithm": {"estimator": "ppo"}}, "does not match pattern '^(gae|reinforce|"),
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
    path.write_text(files(changed("cpu-kind", config__algorithm={"importance_sampling_cap": None}))["config.yaml"])
    assert load_config(path).algorithm.importance_sampling_cap is None


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
    assert '+              "examples": ["gae", "reinforce", "rloo", "grpo", "reinforce_plus_plus"]' in said.out
    assert "make helm-schema" in said.err
    assert values_schema.main(["--write"]) == 0
    assert values_schema.main([]) == 0


def keys_of(node: dict[str, Any], path: str = "config") -> set[str]:
    """Every key below a part of the config, by its path."""
    below = [
        keys_of(value, f"{path}__{key}") if isinstance(value, dict) else {f"{path}__{key}"}
        for key, value in node.items()
    ]
    return set().union(*below)


EVERYTHING: dict[str, Any] = Config.model_validate(changed("cpu-kind")["config"]).model_dump(mode="json")
SECTIONS = ("buffer", "security", "gateway", "services")
FREE = {"config__gateway__max_requests_per_second"}
FREE |= {f"config__services__{role}__num_threads" for role in ("actor", "critic", "reward", "reference")}
OWNED = keys_of({section: EVERYTHING[section] for section in SECTIONS}) - FREE
OWNED |= {"config__run__directory", "config__timeouts__drain_seconds"}
# What is right as a value of a key, by the word that its name ends with; of others, a path.
VALUES: dict[str, Any] = {
    "listen": "h:1",
    "metrics_listen": "h:1",
    "health_listen": "h:1",
    "address": "h:1",
    "devices": [0],
}
VALUES |= {"enabled": True, "start_runs": False, "allow_plaintext": False, "allowed_hosts": ["h"], "drain_seconds": 10}
# With all of these the chart sets the fewest keys.
FEWEST = {
    "components__gateway": None,
    "components__reference": None,
    "config__actor": {"model": "m", "lora": {}},
    "security": {"rpcToken": {"enabled": False}, "tls": {"enabled": False}, "allowPlaintext": True},
    "redis": {"enabled": False, "external": {"url": "redis://q@h"}},
}


@every_case("setting", [{}, FEWEST], ids=["most", "fewest"])
@every_case("path", sorted(OWNED))
def test_what_is_the_chart_s_to_set_is_refused_whether_it_sets_it_or_not(path: str, setting: dict[str, Any]) -> None:
    value = VALUES.get(path.rpartition("__")[2], "/models/x")
    said = refusal(changed("cpu-kind", **setting, **{path: value}))
    assert f"{path.replace('__', '.')}: the chart sets it; remove it, and see " in said


@pytest.mark.parametrize("setting", [{}, FEWEST], ids=["most", "fewest"])
def test_null_and_an_empty_list_say_nothing(setting: dict[str, Any]) -> None:
    nothing = {"config__services__actor__address": None, "config__gateway__allowed_hosts": []}
    assert manifests(changed("cpu-kind", **setting, **nothing))


def test_the_rate_of_the_gateway_is_given_in_one_place() -> None:
    said = refusal(
        changed("cpu-kind", gateway__maxRequestsPerSecond=50, config__gateway={"max_requests_per_second": 5})
    )
    assert "config.gateway.max_requests_per_second: the chart sets it; remove it, and see gateway" in said


@pytest.mark.parametrize(
    ("path", "value", "instead"),
    [
        ("config__timeouts__drain_seconds", 5, "components.NAME.drainSeconds"),
        ("config__gateway__enabled", False, "components.gateway.enabled"),
        ("config__run__directory", "elsewhere", "storage.runs"),
    ],
)
def test_what_is_refused_says_what_to_set_instead(path: str, value: object, instead: str) -> None:
    said = refusal(changed("cpu-kind", **{path: value}))
    assert instead in said.partition("remove it, and see ")[2]


TELEMETRY = [
    "http://bob:sesame@collector:4318",  # pragma: allowlist secret - an example
    "HTTP://bob:open/sesame@collector:4318",  # pragma: allowlist secret - an example
    "http://bob:/sesame@collector",  # pragma: allowlist secret - an example
    "http://bob:12sesame/@collector",  # pragma: allowlist secret - an example
    "otlp://bob:sesame@collector",  # pragma: allowlist secret - an example
    "http://sesame@collector",
    "http://collector/v1?a=b&api_password=sesame",
    "http://collector/v1?%70ASSWORD=sesame",
    "http://collector/v1#password=sesame",
]


@every_case("key", ["otlp_endpoint", "mlflow.tracking_uri"])
@every_case("address", TELEMETRY)
def test_a_telemetry_address_with_a_password_is_refused_as_the_tree_does_and_not_quoted(address: str, key: str) -> None:
    telemetry = {"otlp_endpoint": address} if key == "otlp_endpoint" else {"mlflow": {"tracking_uri": address}}
    values = changed("cpu-kind", config__telemetry=telemetry)
    assert "telemetry" in str(invalid_keys(values["config"]))
    said = refusal(values)
    assert f"config.telemetry.{key}: contains a user, a password" in said
    assert "sesame" not in said


@pytest.mark.parametrize(
    "telemetry",
    [
        {
            "otlp_endpoint": "http://collector:4318/v1/traces?a=b",
            "mlflow": {"tracking_uri": "http://tracking:5000/a@b"},
        },
        {"otlp_endpoint": None, "mlflow": {"tracking_uri": "file:///home/a@b/mlruns"}},
        {"mlflow": None},
    ],
)
def test_telemetry_addresses_without_a_password_are_taken(telemetry: dict[str, Any]) -> None:
    assert manifests(changed("cpu-kind", config__telemetry=telemetry))


def test_what_the_chart_leaves_alone_is_taken() -> None:
    values = changed(
        "cpu-kind", config__services={"actor": {"num_threads": 3}}, config__gateway={"max_requests_per_second": 5}
    )
    config = yaml.safe_load(files(values)["config.yaml"])
    assert config["services"] == {"actor": {"num_threads": 3}}
    assert config["gateway"] == {"max_requests_per_second": 5}
