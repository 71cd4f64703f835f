"""`quartet helm check`: values that Helm renders, and a config that its pods load."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from quartet.cli.main import app
from quartet.errors import ConfigError
from tests.helm.rendering import CHART, Values, changed, chart_folder


def written(folder: Path, *values: Values) -> list[str]:
    """Return the paths of files with these values."""
    paths = [folder / f"values-{number}.yaml" for number, _ in enumerate(values)]
    for path, content in zip(paths, values, strict=True):
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return list(map(str, paths))


def refused(*arguments: str) -> str:
    """Return the message with which the command ends."""
    result = CliRunner().invoke(app, ["helm", "check", "--chart", str(chart_folder()), *arguments])
    assert isinstance(result.exception, ConfigError), result.output
    return str(result.exception)


def test_examples_are_valid_and_settings_without_effect_are_named(helm: Path, tmp_path: Path) -> None:
    own = {"config": {"algorithm": {"estimator": "reinforce", "gae_lambda": 0.9}}}
    values = [str(CHART / "examples/single-node-4-gpus.yaml"), *written(tmp_path, own)]
    result = CliRunner().invoke(app, ["helm", "check", *values, "--chart", str(chart_folder())])
    assert (result.exit_code, result.exception) == (0, None)
    *warnings, valid = result.output.splitlines()
    assert any(line.startswith("warning: algorithm.gae_lambda") for line in warnings), warnings
    assert valid.startswith(f"{values[0]}, {values[1]}: valid")


def test_a_condition_between_settings_is_checked_before_a_pod_starts(helm: Path, tmp_path: Path) -> None:
    values = changed("cpu-kind", config__algorithm={"estimator": "grpo"}, config__rollout__samples_per_prompt=1)
    (path,) = written(tmp_path, values)
    message = refused(path)
    assert message.startswith(f"config of {path}: ")
    assert "rollout.samples_per_prompt" in message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"redis__maxmemory": "6Gi"}, 'redis.maxmemory: "6Gi"; expected a positive number with a unit of Redis'),
        ({"redis__maxmemry": "6gb"}, "maxmemry"),
        ({"config__actor__lerning_rate": 1}, "lerning_rate: unknown key; did you mean"),
        (
            {"components__actor": {"gpus": 4}, "config__services": {"actor": {"parallel": {"shard": 2}}}},
            "after a change of them, or of the estimator, run quartet plan again",
        ),
    ],
    ids=["a check of the chart", "the schema", "an unknown key of the config", "GPUs that do not fit the config"],
)
def test_the_message_of_helm_is_the_error(changes: Values, expected: str, helm: Path, tmp_path: Path) -> None:
    message = refused(*written(tmp_path, changed("cpu-kind", **changes)))
    assert expected in message
    assert "Error: execution" not in message
    assert "--debug" not in message
    assert "INFO" not in message


@pytest.mark.parametrize("values", [{"loader": {"enabled": True}}, {"config": []}], ids=["none", "a list"])
def test_values_without_a_config_are_refused_by_the_schema(values: Values, helm: Path, tmp_path: Path) -> None:
    assert "at '/config" in refused(*written(tmp_path, values))


def test_missing_files_and_programs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = written(tmp_path, changed("cpu-kind"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "helm: no such command" in refused(path)
    assert f"values {tmp_path / 'no.yaml'}: cannot be read (No such file or directory)" in refused(
        str(tmp_path / "no.yaml")
    )
    assert f"--chart {tmp_path}: no Chart.yaml" in refused(path, "--chart", str(tmp_path))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- a", ": expected a mapping, such as config:"),
        ("a: [", ":1: not YAML ("),
        (
            "actor: {model: models/policy}",
            ": actor: is a section of a config; put the sections of the config below config:",
        ),
    ],
)
def test_a_file_without_values_is_named(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(text, encoding="utf-8")
    assert refused(str(path)).startswith(f"values {path}{problem}")
    assert refused(str(tmp_path)).startswith(f"values {tmp_path}: cannot be read (Is a directory)")
