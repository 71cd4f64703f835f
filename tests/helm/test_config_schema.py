"""Helm refuses invalid values of ``config``, and settings that the chart sets itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from helm import values_schema
from quartet.config.loading import invalid_keys, load_config
from quartet.config.root import Config
from tests.every_case import every_case
from tests.helm.rendering import CHART, ROOT, changed, chart, manifests, refusal
from tests.helm.test_components import files

SHIPPED = [*sorted((ROOT / "configs").rglob("*.yaml")), ROOT / "src/quartet/demo/demo.yaml"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_is_valid(path: Path) -> None:
    chart().validate_schema({"config": helm_python.values_from_yaml(path.read_text(encoding="utf-8"))})


def test_a_resolved_config_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(files(changed("cpu-kind"))["config.yaml"], encoding="utf-8")
    chart().validate_schema({"config": yaml.safe_load(load_config(path).to_yaml())})


def test_a_meaningful_null_is_preserved(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        files(changed("cpu-kind", config__algorithm={"rollout_correction": {"upper": None, "lower": 0.5}}))[
            "config.yaml"
        ]
    )
    assert load_config(path).algorithm.rollout_correction.upper is None


def test_the_schema_matches_the_config() -> None:
    committed = values_schema.SCHEMA.read_text(encoding="utf-8")
    assert committed == values_schema.generated(committed), "run make generate and commit"
    assert values_schema.main([]) == 0


def test_an_outdated_schema_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "values.schema.json"
    text = (CHART / "values.schema.json").read_text(encoding="utf-8")
    other.write_text(text.replace('"rloo",', '"other",'))
    monkeypatch.setattr(values_schema, "SCHEMA", other)
    assert values_schema.main([]) == 1
    output = capsys.readouterr()
    assert re.search(r'^\+ +"rloo",$', output.out, re.MULTILINE)
    assert "make generate" in output.err
    assert values_schema.main(["--write"]) == 0
    assert values_schema.main([]) == 0


def keys_of(node: dict[str, Any], path: str = "config") -> set[str]:
    """Return the paths of all keys below a part of the config."""
    below = [
        keys_of(value, f"{path}__{key}") if isinstance(value, dict) else {f"{path}__{key}"}
        for key, value in node.items()
    ]
    return set().union(*below)


FULL_CONFIG: dict[str, Any] = Config.model_validate(changed("cpu-kind")["config"]).model_dump(mode="json")
SECTIONS = ("buffer", "security", "gateway", "services")
ALLOWED = {"config__gateway__max_requests_per_second"}
ALLOWED |= {
    f"config__services__{role}__num_threads"
    for role in ("actor", "critic", "reward", "reference", "generator", "environment")
}
GROUP_KEYS = (
    "processes",
    "parallel__replicate",
    "parallel__shard",
    "parallel__tensor",
    "offload__parameters",
    "offload__optimizer",
)
ALLOWED |= {
    f"config__services__{role}__{key}" for role in ("actor", "critic", "reward", "reference") for key in GROUP_KEYS
}
ALLOWED.add("config__services__reward__sharing")
CHART_KEYS = keys_of({section: FULL_CONFIG[section] for section in SECTIONS}) - ALLOWED
CHART_KEYS |= {"config__run__directory", "config__timeouts__drain_seconds"}
# Valid values by the last part of the key. Other keys have a path as their value.
VALUES: dict[str, Any] = {
    "listen": "h:1",
    "metrics_listen": "h:1",
    "health_listen": "h:1",
    "address": "h:1",
    "devices": [0],
    "generators": ["h:1"],
    "nodes": 2,
}
VALUES |= {"enabled": True, "start_runs": False, "allow_plaintext": False, "allowed_hosts": ["h"], "drain_seconds": 10}
# With these values, the chart sets the fewest keys.
MINIMAL = {
    "components__gateway": None,
    "components__reference": None,
    "config__actor": {"model": "models/m", "lora": {}},
    "security": {"rpcToken": {"enabled": False}, "tls": {"enabled": False}, "allowPlaintext": True},
    "redis": {"enabled": False, "external": {"url": "redis://q@h"}},
}


@pytest.mark.parametrize("setting", [{}, MINIMAL], ids=["default", "minimal"])
def test_keys_of_the_chart_are_refused_at_once_even_if_it_does_not_set_them(setting: dict[str, Any]) -> None:
    given = {path: VALUES.get(path.rpartition("__")[2], "/models/x") for path in CHART_KEYS}
    message = refusal(changed("cpu-kind", **setting, **given))
    refused = re.findall(r"(config\.\S+): the chart sets it; remove it, and see ", message)
    assert sorted(refused) == sorted(path.replace("__", ".") for path in CHART_KEYS)


@pytest.mark.parametrize("setting", [{}, MINIMAL], ids=["default", "minimal"])
def test_null_and_an_empty_list_of_a_chart_key_are_accepted(setting: dict[str, Any]) -> None:
    empty = {"config__services__actor__address": None, "config__gateway__allowed_hosts": []}
    assert manifests(changed("cpu-kind", **setting, **empty))


def test_the_rate_limit_of_the_gateway_cannot_be_set_twice() -> None:
    message = refusal(
        changed("cpu-kind", gateway__maxRequestsPerSecond=50, config__gateway={"max_requests_per_second": 5})
    )
    assert "config.gateway.max_requests_per_second: the chart sets it; remove it, and see gateway" in message


@pytest.mark.parametrize(
    ("path", "value", "instead"),
    [
        ("config__timeouts__drain_seconds", 5, "components.NAME.drainSeconds"),
        ("config__gateway__enabled", False, "components.gateway.enabled"),
        ("config__run__directory", "elsewhere", "storage.runs"),
    ],
)
def test_a_refused_key_names_its_replacement(path: str, value: object, instead: str) -> None:
    message = refusal(changed("cpu-kind", **{path: value}))
    assert instead in message.partition("remove it, and see ")[2]


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
def test_a_telemetry_address_with_a_password_is_refused_and_not_quoted(address: str, key: str) -> None:
    telemetry = {"otlp_endpoint": address} if key == "otlp_endpoint" else {"mlflow": {"tracking_uri": address}}
    values = changed("cpu-kind", config__telemetry=telemetry)
    assert "telemetry" in str(invalid_keys(values["config"]))
    message = refusal(values)
    assert f"config.telemetry.{key}: contains a user, a password" in message
    assert "sesame" not in message


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
def test_telemetry_addresses_without_a_password_are_accepted(telemetry: dict[str, Any]) -> None:
    assert manifests(changed("cpu-kind", config__telemetry=telemetry))


def test_keys_that_the_chart_does_not_set_are_accepted() -> None:
    values = changed(
        "cpu-kind", config__services={"actor": {"num_threads": 3}}, config__gateway={"max_requests_per_second": 5}
    )
    config = yaml.safe_load(files(values)["config.yaml"])
    assert config["services"] == {"actor": {"num_threads": 3}}
    assert config["gateway"] == {"max_requests_per_second": 5}
