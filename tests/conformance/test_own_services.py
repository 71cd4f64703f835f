"""The project's own services pass every check: real processes with tiny models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from quartet.codec.generation import WeightUpdate
from quartet.config.deployment import TimeoutsConfig
from quartet.conformance.check import CheckOutcome
from quartet.conformance.report import line_of
from quartet.conformance.runner import AGENT, checks_of, run_checks
from quartet.conformance.target import Limits, Target
from quartet.contract.status import MODEL_ROLES, Role
from quartet.rpc.clients import GenerationClient
from tests.fuzz.environment import config_tree, generator_config_tree, published_policies, service_process
from tests.fuzz.seeds import RUN

ALLOWED_SKIPS = {"tls.required", "tls.client_certificate", "tls.token", "score.failure"}
"""Without certificates, and for a reward model, which cannot fail."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("conformance")


@pytest.fixture(scope="module")
def address(folder: Path, redis_url: str) -> Iterator[str]:
    """The address of a process with the four model roles."""
    config = config_tree(folder, redis_url)
    Path(config["run"]["directory"], config["run"]["name"]).mkdir(parents=True)
    with service_process(folder, config, list(MODEL_ROLES)) as (_, ready):
        yield ready()["address"]


def require_conformance(
    role: str,
    address: str,
    redis_url: str,
    allowed_skips: set[str] = ALLOWED_SKIPS,
    only: Callable[[str], bool] = lambda _: True,
    **limits: Any,
) -> None:
    """Require that a service passes the checks whose names ``only`` selects."""
    with closing(
        Target(
            Role.ENVIRONMENT if role == AGENT else Role(role),
            address,
            Limits(allow_changes=True, buffer_url=redis_url, **limits),
        )
    ) as target:
        results = run_checks(target, [check for check in checks_of(role) if only(check.id)])
        report = "\n".join(map(line_of, results))
    assert not [result for result in results if result.outcome is CheckOutcome.FAILED], report
    assert {result.check.id for result in results if result.outcome is CheckOutcome.SKIPPED} <= allowed_skips, report


FORGETS = (
    "{% for message in messages %}[{{ message.content[-2:] if message.role == 'assistant' and not loop.last else "
    "message.content }}]{% endfor %}{% if add_generation_prompt %}[{% endif %}"
)
"""A chat template that keeps the end of earlier turns only, so that most turns begin a branch."""


def is_fast(check: str) -> bool:
    """Return whether a check of a model takes less than about a tenth of a second."""
    area, _, name = check.partition(".")
    return area in FAST_UPDATES or (area not in ("update", "restore", "save", "generate") and name not in SLOW)


SLOW = {"many", "status", "deadline", "cancel", "large_message", "concurrent"}
FAST_UPDATES = {"restore"}


@pytest.mark.parametrize("role", MODEL_ROLES)
def test_a_model_service_passes_the_fast_checks(role: Role, address: str, redis_url: str) -> None:
    require_conformance(role, address, redis_url, only=is_fast)


@pytest.mark.slow
@pytest.mark.parametrize("role", MODEL_ROLES)
def test_a_model_service_conforms(role: Role, address: str, redis_url: str) -> None:
    require_conformance(role, address, redis_url)


@contextmanager
def generator(folder: Path, redis_url: str) -> Iterator[str]:
    """Start a generator, and load weights into it."""
    with (
        service_process(folder, generator_config_tree(folder, redis_url), [Role.GENERATOR]) as (_, ready),
        published_policies(folder) as policies,
    ):
        address = ready()["address"]
        with closing(GenerationClient(address, TimeoutsConfig())) as client:
            sources = ((Role.ACTOR, policies.address),)
            client.update_weights(WeightUpdate(RUN, 1, 0, policies.digests[0], sources)).result()
        yield address


@pytest.mark.slow
def test_a_generator_conforms(folder: Path, redis_url: str) -> None:
    config_tree(folder, redis_url)
    with generator(folder, redis_url) as address:
        require_conformance(Role.GENERATOR, address, redis_url, ALLOWED_SKIPS | {"generate.log_probs"})


def test_an_environment_conforms(folder: Path, redis_url: str) -> None:
    config = config_tree(folder, redis_url)
    config["rollout"]["max_turns"] = 4
    template = folder / "forgets.jinja"
    template.write_text(FORGETS)
    config["environment"] = {
        "class_name": "tests.conformance.game:Game",
        "num_workers": 2,
        "observations": "chat",
        "chat_template": str(template),
    }
    with service_process(folder, config, [Role.ENVIRONMENT]) as (_, ready):
        require_conformance(Role.ENVIRONMENT, ready()["address"], redis_url, failing_fields='{"level": -1}')


AGENTS = {
    "command": [sys.executable, "-P", "-m", "tests.environments.agent_functions"],
    "function": "tests.environments.agent_functions:two_turns",
}


# Both are runs of one AgentHost. tests/environments/test_agents.py has functions.
@pytest.mark.parametrize("kind", ["command", pytest.param("function", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_service_of_agents_conforms(kind: str, folder: Path, redis_url: str) -> None:
    config = config_tree(folder, redis_url)
    config["rollout"]["max_turns"] = 4
    config["environment"] = {"kind": "agent", "agent": {kind: AGENTS[kind]}}
    with service_process(folder, config, [Role.ENVIRONMENT]) as (_, ready):
        require_conformance(AGENT, ready()["address"], redis_url, fields='{"text": "hi"}', failing_fields="{}")
