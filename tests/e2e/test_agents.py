"""Runs with agents: commands of the environment service that call the processes that generate."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.e2e.commands import settings
from tests.e2e.conftest import Call, Run, step_metrics, train, weights

AGENT = Path(__file__).parents[1] / "environments/agent_functions.py"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def agent_settings(folder: Path) -> list[str]:
    """Return the settings of an agent that asks twice. Its template is written to ``folder``."""
    (folder / "template.jinja").write_text(TEMPLATE)
    return settings(
        "run.steps=2",
        "rollout.max_turns=3",
        "rollout.max_turn_tokens=6",
        "rollout.max_response_tokens=24",
        "reward.source=none",
        "reward.model=null",
        "environment.kind=agent",
        f"environment.chat_template={folder / 'template.jinja'}",
        f"environment.agent.command={json.dumps([sys.executable, str(AGENT), 'twice'])}",
        "gateway.enabled=false",
    )


@pytest.fixture(scope="module")
def with_agents(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("agents")
    run = train(folder, config, *agent_settings(folder))
    assert (run.result.code, run.result.leftovers) == (0, []), run.result
    return run


def test_a_run_has_the_turns_and_rewards_of_its_agents(with_agents: Run) -> None:
    rows = [
        json.loads(line) for line in (with_agents.directory / "trajectories/step-000001.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 8
    for row in rows:
        policy = [segment for segment in row["segments"] if segment["role"] == "policy"]
        assert len(policy) == 2
        assert row["score"] == float(len("".join(segment["text"] for segment in policy)))
    log = (with_agents.directory / "logs/environment.log").read_text()
    assert "event='ready'" in log
    # Neither the agents' keys nor their results are logged.
    assert "my key is quartet-***" in log
    assert '"reward"' not in log


@pytest.mark.slow
def test_generators_with_certificates_train_the_same_policy(
    with_agents: Run, call: Call, config: Path, tmp_path: Path
) -> None:
    assert call("certificates", tmp_path / "certificates").code == 0
    options = settings(
        "rollout.generators=2",
        "services.generator.num_threads=1",
        # All addresses: agents get the one from which the service is reached.
        "environment.agent.listen=0.0.0.0:0",
        f"security.certificates={tmp_path / 'certificates'}",
    )
    run = train(tmp_path, config, *agent_settings(tmp_path), *options)
    assert (run.result.code, run.result.leftovers) == (0, []), run.result
    assert weights(run.directory) == weights(with_agents.directory)
    assert step_metrics(run) == step_metrics(with_agents)
