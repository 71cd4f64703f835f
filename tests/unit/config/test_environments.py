"""The config of environments: one switch, and the keys that need each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quartet.config.agent import AgentConfig
from quartet.config.layout import listen_address, num_threads, service_roles
from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.data.prompt_settings import PromptSettings
from quartet.errors import ConfigError
from quartet.preflight import check_separate_orchestrator
from quartet.preflight.functions import ENVIRONMENT_CHECK, FunctionCall, named_functions
from tests.unit.preflight.files import lines

GAME = {"class_name": "my_game:Game"}
TURNS = {"max_turns": 3}


def config(**sections: Any) -> Config:
    tree = {"data": {"prompts": "p.jsonl"}, "actor": {"model": "m"}, "reward": {"model": "r"}, **sections}
    return parse_config(tree, "test")


def test_the_number_of_turns_is_the_switch() -> None:
    played = config(rollout=TURNS, environment=GAME)
    assert played.has_environment
    assert service_roles(played)[-1] is Role.ENVIRONMENT
    assert named_functions(played)["environment.class_name"] == FunctionCall("my_game:Game", check=ENVIRONMENT_CHECK)
    assert num_threads(played, Role.ENVIRONMENT) == 1
    assert listen_address(played.services.environment) == "127.0.0.1:0"
    # An address that a deployment sets for all runs changes nothing without turns.
    plain = config(services={"environment": {"address": "host:1"}})
    assert not plain.has_environment
    assert Role.ENVIRONMENT not in service_roles(plain)


def test_an_environment_elsewhere_needs_no_class() -> None:
    played = config(rollout=TURNS, services={"environment": {"address": "host:5"}})
    assert played.has_environment
    assert listen_address(played.services.environment) == "127.0.0.1:5"
    assert "environment.class_name" not in named_functions(played)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"rollout": TURNS}, r"environment\.class_name: missing; rollout\.max_turns 3 needs an environment"),
        ({"environment": GAME}, r"environment\.class_name my_game:Game: not used with rollout\.max_turns 0"),
        ({"rollout": {"extra_samples": 1}}, r"rollout\.extra_samples: chooses among episodes; set rollout\.max_turns"),
        (
            {"rollout": {**TURNS, "extra_samples": 2000}, "environment": GAME},
            r"rollout\.extra_samples: a step generates 128064 trajectories; expected at most 65536",
        ),
        ({"environment": {"class_name": "game"}}, r"environment\.class_name: expected package\.module:callable"),
        ({"environment": {"arguments": {"a": 1}}}, r"arguments: not used without class_name"),
        ({"environment": {**GAME, "arguments": {"a": {1, 2}}}}, r"environment\.arguments: expected values as in JSON"),
        ({"environment": {**GAME, "chat_template": "t"}}, r"chat_template: not used with observations text"),
        ({"environment": {**GAME, "num_workers": 0}}, r"environment\.num_workers"),
        ({"environment": {**GAME, "timeout_seconds": 0}}, r"environment\.timeout_seconds"),
    ],
)
def test_keys_that_do_not_fit_are_refused(sections: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        config(**sections)


def test_a_separate_orchestrator_needs_the_address() -> None:
    services: dict[str, Any] = {name: {"address": f"{name}:1"} for name in ("actor", "critic", "reward", "reference")}
    played = config(rollout=TURNS, environment=GAME, services=services, buffer={"url": "redis://host:1/0"})
    with pytest.raises(ConfigError, match=r"services\.environment\.address: null"):
        lines(check_separate_orchestrator(played))


@pytest.mark.parametrize(("observations", "opens"), [("text", True), ("chat", False)])
def test_the_environment_opens_the_first_turn_of_a_chat(observations: str, opens: bool) -> None:
    played = config(rollout=TURNS, environment={**GAME, "observations": observations})
    assert [each.opens_response for each in PromptSettings.for_training(played)] == [opens]
    assert PromptSettings(Path("p"), "m", 10).opens_response


def test_arguments_are_json_of_any_depth() -> None:
    arguments = {"a": 1, "b": [1.5, None, {"c": True}], "d": "text"}
    assert config(rollout=TURNS, environment={**GAME, "arguments": arguments}).environment.arguments == arguments


AGENT = {"kind": "agent", "agent": {"command": ["node", "agent.js"]}}


def agent(**settings: Any) -> dict[str, Any]:
    return {"kind": "agent", "agent": {"command": ["a"], **settings}}


def test_an_agent_takes_the_place_of_a_class() -> None:
    played = config(rollout=TURNS, environment=AGENT)
    assert played.has_agents
    assert played.has_environment
    assert played.environment.agent.kind == "command"
    assert service_roles(played)[-1] is Role.ENVIRONMENT
    assert not config(rollout=TURNS, environment=GAME).has_agents
    # A service elsewhere knows its agent.
    assert config(
        rollout=TURNS, environment={"kind": "agent"}, services={"environment": {"address": "host:5"}}
    ).has_agents
    # The template of the endpoint, not of observations.
    assert (
        config(rollout=TURNS, environment={**AGENT, "chat_template": "t.jinja"}).environment.chat_template is not None
    )


@pytest.mark.parametrize(
    ("settings", "address", "encrypted", "expected"),
    [
        ({}, "127.0.0.1:4000", False, "http://127.0.0.1:4000/v1"),
        ({"listen": "10.0.0.1:0"}, "10.0.0.1:4000", True, "https://10.0.0.1:4000/v1"),
        ({"advertise": "policy:80"}, "0.0.0.0:4000", False, "http://policy:80/v1"),
        ({"advertise": "[::1]:0"}, "0.0.0.0:4000", True, "https://[::1]:4000/v1"),
    ],
)
def test_the_address_that_agents_get(settings: Any, address: str, encrypted: bool, expected: str) -> None:
    assert AgentConfig(**settings).base_url(address, encrypted) == expected


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"environment": AGENT}, r"environment\.kind agent: not used with rollout\.max_turns 0"),
        (
            {"rollout": TURNS, "environment": {"kind": "agent"}},
            r"environment\.agent: names no agent; give one of command",
        ),
        ({"rollout": TURNS, "environment": {**GAME, "agent": {"command": ["a"]}}}, r"agent: not used with kind class"),
        (
            {"rollout": TURNS, "environment": agent(url="http://127.0.0.1:1")},
            r"agent\.command and url: both name the agent",
        ),
        ({"rollout": TURNS, "environment": agent(api_key_file="k")}, r"agent\.api_key_file: not used without url"),
        ({"rollout": TURNS, "environment": {**AGENT, **GAME}}, r"class_name: not used with kind agent"),
        (
            {"rollout": TURNS, "environment": {**AGENT, "observations": "chat"}},
            r"observations chat: not used with kind agent",
        ),
        (
            {"rollout": TURNS, "environment": agent(command="node agent.js")},
            r'agent\.command: expected a list of the program and its arguments, such as \["node", "agent\.js"\]; there is',
        ),
        ({"rollout": TURNS, "environment": agent(command=[])}, r"environment\.agent\.command"),
        ({"rollout": TURNS, "environment": agent(command=[" "])}, r"agent\.command: expected the program first"),
        (
            {"rollout": TURNS, "environment": agent(pass_variables=["A=B"])},
            r"expected the name of an environment variable",
        ),
        (
            {"rollout": TURNS, "environment": {"kind": "agent", "agent": {"url": "http://agents.example/run"}}},
            r"environment\.agent\.url http://agents\.example/run: not a loopback address",
        ),
        (
            {"rollout": TURNS, "environment": agent(listen="10.0.0.1:80")},
            r"agent\.listen 10\.0\.0\.1:80: not a loopback",
        ),
        (
            {"rollout": {**TURNS, "generators": 2}, "environment": agent(listen="127.0.0.1:80")},
            r"agent\.listen 127\.0\.0\.1:80: several processes on this machine generate",
        ),
        (
            {"rollout": TURNS, "environment": agent(advertise="policy:80")},
            r"agent\.advertise policy:80: the process that generates listens on a free port",
        ),
    ],
)
def test_a_config_of_an_agent_that_contradicts_itself(sections: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        config(**sections)


TRAFFIC: dict[str, Any] = {
    "data": {},
    "algorithm": {"estimator": "reinforce_plus_plus"},
    "rollout": {**TURNS, "generators": 1, "max_off_policy_steps": 1, "in_flight_updates": True},
    "environment": {"kind": "traffic", "traffic": {"operator_keys_file": "operators.keys"}},
    "reward": {"source": "none"},
}


def test_users_take_the_place_of_prompts_and_of_an_environment() -> None:
    served = config(**TRAFFIC)
    assert (served.has_traffic, served.has_environment_service) == (True, False)


@pytest.mark.parametrize(
    ("section", "settings", "expected"),
    [
        ("data", {"prompts": "p.jsonl"}, r"data\.prompts: not used with environment\.kind traffic"),
        ("algorithm", {"estimator": "remax"}, r"algorithm\.estimator remax: needs a second, greedy answer"),
        ("rollout", {"samples_per_prompt": 2}, r"each session of a user is one trajectory"),
        ("rollout", {"in_flight_updates": False}, r"rollout\.in_flight_updates true"),
        ("environment", {"traffic": {}}, r"traffic\.operator_keys_file: missing"),
        ("environment", {"agent": {"command": ["a"]}}, r"agent\.command: not used with kind traffic"),
        (
            "algorithm",
            {"estimator": "grpo"},
            r"estimator grpo: .*a session of a user has one; set an estimator that compares none",
        ),
        ("environment", {"agent": {"listen": "10.0.0.1:80"}}, r"agent\.listen 10\.0\.0\.1:80: not a loopback"),
        ("services", {"environment": {"address": "host:5"}}, r"services\.environment\.address: not used with"),
    ],
)
def test_a_config_of_traffic_that_contradicts_itself(section: str, settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        config(**TRAFFIC | {section: {**TRAFFIC.get(section, {}), **settings}})


def test_a_deployment_may_set_the_address_of_endpoints_for_all_runs() -> None:
    assert not config(environment={"agent": {"listen": "0.0.0.0:8090"}}).has_agents
