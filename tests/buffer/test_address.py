"""Settings of the connection to a shared Redis: passwords from files, and certificates per process."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from quartet.buffer.connection import connect
from quartet.buffer.redis_url import BUFFER_URL_VARIABLE, buffer_url, environment_overrides
from quartet.config.loading import load_config, parse_config
from quartet.config.root import Config
from quartet.config.url_redaction import redact_url
from quartet.errors import ConfigError, ServiceUnavailable
from quartet.rpc.security.certificates import Authority

ENCODED, FROM_URL, FROM_FILE = ":p%40ss%2Fw%3Ard@", ":mine@", ":secret@"


def config_of(**buffer: Any) -> Config:
    tree = {"data": {"prompts": "p"}, "actor": {"model": "a"}, "reward": {"model": "r"}, "buffer": buffer}
    return parse_config(tree, "test")


@pytest.mark.parametrize(
    ("url", "result"),
    [
        ("redis://host:6379/0", f"redis://{ENCODED}host:6379/0"),
        ("redis://quartet@host/0", f"redis://quartet{ENCODED}host/0"),
        ("rediss://quartet@[::1]:6379/0?timeout=3", f"rediss://quartet{ENCODED}[::1]:6379/0?timeout=3"),
    ],
)
def test_the_password_is_read_from_its_file(tmp_path: Path, url: str, result: str) -> None:
    file = tmp_path / "password"
    file.write_text("p@ss/w:rd\n")
    config = config_of(url=url, password_file=str(file))
    assert buffer_url(config) == result
    assert "p@ss" not in config.to_yaml() + redact_url(result)
    assert "p%40ss" not in redact_url(result)


@pytest.mark.parametrize(
    ("buffer", "content", "problem"),
    [
        ({"url": f"redis://me{FROM_URL}host"}, "secret", "buffer.url contains a password too"),
        ({"url": "redis://host"}, "", "expected one line"),
        ({"url": "redis://host"}, "two\nlines", "expected one line"),
        ({"url": "redis://host"}, None, "cannot be read"),
        ({}, "secret", "buffer.url, which is null"),
    ],
)
def test_an_invalid_password_is_refused_and_not_quoted(
    tmp_path: Path, buffer: dict[str, str], content: str | None, problem: str
) -> None:
    file = tmp_path / "password"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=rf"^buffer\.password_file.*{problem}") as error:
        buffer_url(config_of(password_file=str(file), **buffer))
    assert not content or content not in str(error.value)


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    authority = Authority(timedelta(days=1))
    authority.issue(tmp_path / "redis", ["localhost", "127.0.0.1"])
    authority.issue(tmp_path / "actor", ["actor.quartet"])
    authority.issue(tmp_path / "expired", ["actor.quartet"], timedelta(minutes=-1))
    return tmp_path


@pytest.fixture
def encrypted(certificates: Path, redis_url: str) -> Iterator[str]:
    """HOST:PORT of a proxy with mutual TLS to the Redis of the tests."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates / "redis" / "ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificates / "redis" / "tls.crt", certificates / "redis" / "tls.key")
    listener = socket.create_server(("127.0.0.1", 0))

    def forward(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        while True:
            try:
                raw, _ = listener.accept()
            except OSError:
                return
            with suppress(OSError):  # Some tests cause a failed handshake.
                client = context.wrap_socket(raw, server_side=True)
                server = socket.socket(socket.AF_UNIX)
                server.connect(redis_url.removeprefix("unix://"))
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=forward, args=ends, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.close()


def test_a_process_connects_to_redis_with_mutual_tls(encrypted: str, certificates: Path) -> None:
    config = config_of(url=f"rediss://{encrypted}/0")
    url = buffer_url(config, certificates / "actor")
    assert url is not None
    client = connect(url)
    client.set("over tls", "yes", ex=10)
    assert client.get("over tls") == b"yes"
    client.close()


@pytest.mark.parametrize("folder", [None, "expired"])
def test_redis_is_unreachable_without_a_valid_certificate(
    encrypted: str, certificates: Path, folder: str | None
) -> None:
    url = buffer_url(config_of(url=f"rediss://{encrypted}/0"), certificates / folder if folder else None)
    assert url is not None
    with pytest.raises(ServiceUnavailable, match=r"^rollout buffer at rediss://.*unreachable"):
        connect(url)


def test_certificates_in_the_url_are_not_replaced(certificates: Path) -> None:
    url = "rediss://host/0?ssl_ca_certs=/own/ca.crt"
    assert buffer_url(config_of(url=url), certificates / "actor") == url


def test_the_url_of_the_environment_replaces_that_of_the_config_with_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "password").write_text("secret")
    path = tmp_path / "config.yaml"
    buffer = {"url": "redis://one/0", "password_file": str(tmp_path / "password")}
    path.write_text(config_of(**buffer).to_yaml())
    monkeypatch.setenv(BUFFER_URL_VARIABLE, f"redis://two{FROM_URL}host/1")
    assert buffer_url(load_config(path, environment_overrides())) == f"redis://two{FROM_URL}host/1"
    monkeypatch.setenv(BUFFER_URL_VARIABLE, "redis://two@host/1")
    assert buffer_url(load_config(path, environment_overrides())) == f"redis://two{FROM_FILE}host/1"
    monkeypatch.delenv(BUFFER_URL_VARIABLE)
    assert buffer_url(load_config(path, environment_overrides())) == f"redis://{FROM_FILE}one/0"
