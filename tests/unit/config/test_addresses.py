"""Addresses in a config: passwords in them are hidden or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from quartet.config.loading import load_config, parse_config
from quartet.config.url_redaction import is_redacted, redact_url
from quartet.errors import ConfigError
from tests.unit.config_files import MINIMAL, REQUIRED, refusal, write


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    return write(tmp_path, MINIMAL)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:s3cret@host:6379/0",  # pragma: allowlist secret - an example
        "redis://user:s3cret@host:6379/0",  # pragma: allowlist secret - an example
        "redis://user:s3cret:s3cret@host/0",  # pragma: allowlist secret - an example
        "redis://user:s3cret@s3cret@host/0",  # pragma: allowlist secret - an example
        "redis://me@mail:s3cret@host/0",  # pragma: allowlist secret - an example
        "unix:///run/redis.sock?password=s3cret&db=1",
        "unix://user:s3cret@/run/redis.sock",  # pragma: allowlist secret - an example
        "rediss://host/0?db=2&password=s3cret",
        "rediss://q@host/0?ssl_password=s3cret&db=2",
        "redis://host/0?PASSWORD=s3cret",
        "redis://host/0?%70assWord=s3cret",
    ],
)
def test_a_password_is_never_shown(url: str, minimal: Path) -> None:
    assert "s3cret" not in redact_url(url)
    assert is_redacted(redact_url(url))
    assert not is_redacted(url)
    shown = load_config(minimal, [f"buffer.url={url}"]).to_yaml()
    assert "s3cret" not in shown
    assert "***" in shown
    assert yaml.safe_load(shown)["buffer"]["url"].split("://")[0] == url.split("://")[0]


@pytest.mark.parametrize(
    "url",
    [
        "redis://host",
        "redis:///0",
        "redis://host:6379/0",
        "redis://user@host:6379/0",
        "unix:///run/my redis.sock?db=1",
        "redis://[::1]:6379/0",
        "rediss://user@[::1]:6379/0?ssl_ca_certs=/home/a@b/ca.crt&timeout=3",
    ],
)
def test_a_url_without_password_is_accepted_and_shown_unchanged(url: str, minimal: Path) -> None:
    assert redact_url(url) == url
    assert not is_redacted(url)
    assert yaml.safe_load(load_config(minimal, [f"buffer.url={url}"]).to_yaml())["buffer"]["url"] == url


@pytest.mark.parametrize(
    "url",
    [
        "redsi://:s3cret@host:6379/0",  # pragma: allowlist secret - an example
        "redis://:s3cret/s3cret@host/0",  # pragma: allowlist secret - an example
        "redis://me@mail:s3cret/s3cret@host/0",  # pragma: allowlist secret - an example
        "redis://:s3cret#s3cret@host/0",  # pragma: allowlist secret - an example
        "redis://host:6379/0#password=s3cret",
        "redis://host/0?db=1#s3cret@s3cret",
        "unix:///run/redis.sock#s3cret",
        "redis://q:s3cret",
        "redis://q:s3cret/0",
        "redis://q:123-s3cret",
        "redis://me@host:s3cret/0",
        "redis://[::1]:s3cret/0",
        "redis://q:12/s3cret@host",  # pragma: allowlist secret - an example
        "redis://host/0?pass\tword=s3cret",
    ],
)
def test_a_malformed_url_is_refused_without_its_password(url: str, tmp_path: Path) -> None:
    message = refusal(write(tmp_path, MINIMAL + yaml.safe_dump({"buffer": {"url": url}})))
    assert ":8: buffer.url: expected redis://HOST:PORT/DB" in message
    assert "s3cret" not in message


@pytest.mark.parametrize(
    "telemetry",
    [
        {"otlp_endpoint": "http://bob:secret@collector:4318"},  # pragma: allowlist secret - an example
        {"otlp_endpoint": "http://bob:sec/secret@collector:4318"},  # pragma: allowlist secret - an example
        {"otlp_endpoint": "http://collector:4318/v1/traces?password=secret"},
        {"otlp_endpoint": "http://collector:4318/v1/traces?a=b&api_%50assword=secret"},
        {"otlp_endpoint": "http://collector:4318#password=secret"},
        {"otlp_endpoint": "otlp://bob:secret@collector"},  # pragma: allowlist secret - an example
        {"mlflow": {"tracking_uri": "https://bob:secret@tracking"}},  # pragma: allowlist secret - an example
        # pragma: allowlist nextline secret - an example
        {"mlflow": {"tracking_uri": "postgresql+psycopg2://bob:secret@database/mlflow"}},
    ],
)
def test_passwords_in_telemetry_urls_are_refused(telemetry: dict[str, Any]) -> None:
    tree = {"data": {"prompts": "p"}, "actor": {"model": "a"}, "reward": {"model": "r"}, "telemetry": telemetry}
    with pytest.raises(
        ConfigError, match="expected an address without user and password; give them in the environment"
    ) as caught:
        parse_config(tree, "test")
    assert "telemetry." in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("uri", ["mlruns", "file:///home/a@b/mlruns", "http://[::1]:5000", "http://tracking:5000/a@b"])
def test_telemetry_urls_without_a_password_are_accepted(uri: str) -> None:
    config = parse_config({**REQUIRED, "telemetry": {"mlflow": {"tracking_uri": uri}}}, "test")
    assert config.telemetry.mlflow is not None
    assert config.telemetry.mlflow.tracking_uri == uri


def test_a_frozen_model_has_one_address_or_several(minimal: Path) -> None:
    one = load_config(minimal, ["services.reward.address=a:1"]).services.reward
    assert (one.address, one.addresses) == ("a:1", ("a:1",))
    several = load_config(minimal, ['services.reward.address=["a:1", "b:1"]']).services.reward
    assert several.address == several.addresses == ("a:1", "b:1")
    assert load_config(minimal, []).services.reference.addresses == ()
