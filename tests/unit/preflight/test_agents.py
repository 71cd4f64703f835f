"""Checks of agents before a run: programs, functions, addresses, ports and keys."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.errors import ConfigError
from quartet.preflight.agents import check_agent
from quartet.preflight.functions import check_function, named_functions
from quartet.preflight.security_checks import check_access
from tests.unit.preflight.files import lines


def config(services: dict[str, Any] | None = None, **agent: Any) -> Config:
    tree = {
        "data": {"prompts": "p.jsonl"}, "actor": {"model": "m"}, "reward": {"model": "r"}, "rollout": {"max_turns": 3},
        "environment": {"kind": "agent", "agent": agent}, "services": services or {},
    }  # fmt: skip
    return parse_config(tree, "test")


def found(played: Config) -> list[tuple[str, str]]:
    return [(finding.level, str(finding)) for finding in check_agent(played)]


def test_a_program_that_is_missing_is_an_error_and_a_missing_file_a_warning(tmp_path: Path) -> None:
    [(level, text)] = found(config(command=["no-such-program", "x.py"]))
    assert level == "error"
    assert "environment.agent.command no-such-program: no such program in" in text
    script = tmp_path / "agent.py"
    script.touch()
    assert [level for level, _ in found(config(command=[sys.executable, str(script), "--level=x.py"]))] == ["ok"]
    [_, (level, text)] = found(config(command=[sys.executable, "missing/agent.py"]))
    assert level == "warning"
    assert "environment.agent.command missing/agent.py: no such file" in text
    # Another machine runs it.
    assert found(config({"environment": {"address": "host:1"}}, command=["no-such-program"])) == []


def test_a_service_that_does_not_respond_is_a_warning() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/run"
        assert found(config(url=url)) == [("ok", f"environment.agent.url {url}: accepts connections")]
        [(level, text)] = found(config(command=["true"], listen=url.split("/")[2]))[:1]
        assert level == "error"
        assert "environment.agent.listen" in text
        assert "cannot listen there" in text
    [(level, text)] = found(config(url=url))
    assert level == "warning"
    assert "no service responds at 127.0.0.1" in text


@pytest.mark.parametrize(
    ("name", "problem"), [("two_turns", ""), ("not_async", "is not async"), ("wants_more", "has the parameter tools")]
)
def test_a_function_is_imported(name: str, problem: str) -> None:
    key, calls = (
        "environment.agent.function",
        named_functions(config(function=f"tests.environments.agent_functions:{name}")),
    )
    if problem:
        with pytest.raises(ConfigError, match=problem):
            list(check_function(key, calls[key]))
    else:
        [finding] = check_function(key, calls[key])
        assert finding.level == "ok"
        assert "fields, base_url, api_key, model, seed, session by name" in finding.what


def test_the_key_of_a_service_is_checked(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("short")
    with pytest.raises(ConfigError, match=r"environment\.agent\.api_key_file .*: has 5 characters"):
        lines(check_access(config(url="http://127.0.0.1:9/run", api_key_file=key)))
