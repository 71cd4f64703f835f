"""`quartet certificates`: its files, and the arguments that it refuses."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from quartet.cli.make_certificates import make_certificates
from quartet.errors import ConfigError
from quartet.rpc.security.allow_list import PROCESSES


def names(folder: Path) -> list[str]:
    """Return the alternative names of a process's certificate."""
    certificate = x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes())
    result = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in result]


def test_every_process_gets_a_separate_certificate_that_only_the_owner_can_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "made" / "here"
    folder.parent.mkdir()
    make_certificates(folder, 30, [], ["redis.internal", "10.0.0.7"])
    assert {path.name for path in folder.iterdir()} == set(PROCESSES)
    for process in PROCESSES:
        assert (folder / process).stat().st_mode & 0o777 == 0o700
        modes = {path.name: path.stat().st_mode & 0o777 for path in (folder / process).iterdir()}
        assert modes == {"tls.crt": 0o600, "tls.key": 0o600, "ca.crt": 0o600}
    assert names(folder / "actor") == ["actor.quartet"]
    assert names(folder / "gateway") == ["gateway.quartet", "localhost", "127.0.0.1"]
    assert names(folder / "redis") == ["redis.quartet", "redis", "localhost", "127.0.0.1", "redis.internal", "10.0.0.7"]
    expiry = x509.load_pem_x509_certificate((folder / "actor" / "tls.crt").read_bytes()).not_valid_after_utc
    assert abs(expiry - datetime.now(UTC) - timedelta(days=30)) < timedelta(minutes=1)
    assert "valid for 30 days" in capsys.readouterr().out
    assert [path.name for path in folder.parent.iterdir()] == ["here"]
    # The private key of the authority, which could sign further certificates, is not saved.
    keys = {path.read_bytes() for path in folder.rglob("*.key")}
    assert len(keys) == len(PROCESSES)


def test_roles_that_share_a_process_share_its_certificate(tmp_path: Path) -> None:
    make_certificates(tmp_path / "made", 1, ["critic+reward"], [])
    assert names(tmp_path / "made" / "critic") == ["critic.quartet", "reward.quartet"]
    assert not (tmp_path / "made" / "reward").exists()


@pytest.mark.parametrize("shared", [["critic+rewards"], ["critic+critic"], ["critic+reward", "reward+reference"], [""]])
def test_unknown_and_repeated_roles_are_refused(tmp_path: Path, shared: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^--process .*is not a role, or is given twice"):
        make_certificates(tmp_path / "made", 1, shared, [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("process", ["orchestrator", "gateway", "operator", "prometheus", "redis"])
def test_only_model_services_may_share_a_process(tmp_path: Path, process: str) -> None:
    message = (
        f"--process actor\\+{process}: the {process} needs a separate process; "
        "only actor, critic, reward, reference may share one"
    )
    with pytest.raises(ConfigError, match=message):
        make_certificates(tmp_path / "made", 1, [f"actor+{process}"], [])
    assert list(tmp_path.iterdir()) == []


def test_certificates_in_use_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    make_certificates(tmp_path / "made", 1, [], [])
    before = (tmp_path / "made" / "actor" / "tls.crt").read_bytes()
    with pytest.raises(ConfigError, match="not an empty folder; choose a new or empty one"):
        make_certificates(tmp_path / "made", 1, [], [])
    assert (tmp_path / "made" / "actor" / "tls.crt").read_bytes() == before
    with pytest.raises(ConfigError, match="cannot be written"):
        make_certificates(tmp_path / "made" / "actor" / "tls.crt" / "below", 1, [], [])


@pytest.mark.parametrize("name", ["", "bad name!", "\u00fc.example", "-a", "a/b"])
def test_invalid_host_names_of_redis_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"^--redis-name .*expected a host name or an address"):
        make_certificates(tmp_path / "made", 1, [], [name])
    assert list(tmp_path.iterdir()) == []
