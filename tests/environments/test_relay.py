"""The relay: agents reach an endpoint with TLS over plain HTTP, and only one of a process that generates."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path

import pytest

from quartet.contract.agent import AgentResult
from quartet.environments.agents import AgentHost
from quartet.environments.relay import Relay
from quartet.rpc.security.certificates import Authority
from tests.environments.agent_functions import ask
from tests.environments.policy_endpoint import PolicyEndpoint
from tests.environments.test_agents import COMMAND, run, settings


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of one authority, and of the generator of another one."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = Authority(timedelta(days=1))
    for process in ("generator", "actor", "reward", "environment"):
        authority.issue(folder / process, [f"{process}.quartet"])
    Authority(timedelta(days=1)).issue(folder / "foreign", ["generator.quartet"])
    return folder


def encrypted(stack: ExitStack, folder: Path) -> PolicyEndpoint:
    """Serve an endpoint with the certificate in a folder."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return stack.enter_context(closing(PolicyEndpoint(context)))


@pytest.mark.parametrize("role", ["generator", "actor"])
def test_an_agent_calls_an_endpoint_with_tls(stack: ExitStack, certificates: Path, role: str) -> None:
    endpoint = encrypted(stack, certificates / role)
    relay = stack.enter_context(closing(Relay(certificates / "environment/ca.crt")))
    url = relay.local_url(endpoint.url)
    assert url.startswith("http://127.0.0.1:")
    assert url.endswith("/v1")
    assert relay.local_url(endpoint.url) == url
    assert relay.local_url("http://127.0.0.1:9/v1") == "http://127.0.0.1:9/v1"
    text = "x" * 3_000_000
    assert ask(url, "a key", "policy", text) == text.upper()
    assert endpoint.keys() == ["a key"]


@pytest.mark.parametrize("process", ["reward", "foreign"])
def test_another_process_gets_no_key(stack: ExitStack, certificates: Path, process: str) -> None:
    endpoint = encrypted(stack, certificates / process)
    relay = stack.enter_context(closing(Relay(certificates / "environment/ca.crt")))
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        ask(relay.local_url(endpoint.url), "a key", "policy", "hi")
    assert endpoint.keys() == []


def test_a_command_needs_no_certificate(stack: ExitStack, certificates: Path) -> None:
    endpoint = encrypted(stack, certificates / "generator")
    host = stack.enter_context(closing(AgentHost(settings(command=COMMAND), certificates / "environment")))
    assert host.start(run(endpoint.url, text="hi")).result() == AgentResult(2.0, logged={"text": "HI", "seed": 7})
