"""Runs with an environment, in a process that the launcher starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.commands import settings
from tests.e2e.conftest import Call, Run, step_metrics, train, weights

TURNS = settings(
    "rollout.max_turns=2",
    "rollout.max_turn_tokens=6",
    "rollout.max_response_tokens=24",
    "environment.class_name=quartet.environments.examples:WordPuzzle",
    "environment.arguments={turns: 2}",
    "environment.num_workers=2",
    "gateway.enabled=false",
)


@pytest.fixture(scope="module")
def with_turns(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = train(tmp_path_factory.mktemp("turns"), config, *TURNS)
    assert run.result.code == 0, run.result
    return run


def test_a_run_has_turns_observations_and_rewards_of_the_environment(with_turns: Run) -> None:
    rows = [
        json.loads(line) for line in (with_turns.directory / "trajectories/step-000001.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 8
    for row in rows:
        roles = [segment["role"] for segment in row["segments"]]
        # The word's places come first, and after each turn that is not the last.
        assert roles == ["observation", "policy", "observation", "policy"]
        assert row["segments"][0]["text"] == "___"
        assert "environment" in row["parts"]
    assert "event='ready'" in (with_turns.directory / "logs/environment.log").read_text()


@pytest.mark.slow  # test_agents.py has the same with agents, and test_generators.py without certificates.
def test_generators_with_certificates_train_the_same_policy(
    with_turns: Run, call: Call, config: Path, tmp_path: Path
) -> None:
    assert call("certificates", tmp_path / "certificates").code == 0
    options = settings(
        "rollout.generators=2",
        "services.generator.num_threads=1",
        f"security.certificates={tmp_path / 'certificates'}",
    )
    run = train(tmp_path, config, *TURNS, *options)
    assert run.result.code == 0, run.result
    assert weights(run.directory) == weights(with_turns.directory)
    logs = [(run.directory / "logs" / f"generator-{index}.log").read_text() for index in range(2)]
    assert all("event='ready'" in log for log in logs)
    assert "restarted" not in (run.directory / "logs" / "launcher.log").read_text()
    assert step_metrics(run) == step_metrics(with_turns)


# tests/environments/test_host.py has the cause, tests/launcher/test_service.py shows it to the user.
@pytest.mark.slow
def test_a_class_that_cannot_be_imported_ends_the_command_with_its_cause(config: Path, tmp_path: Path) -> None:
    run = train(tmp_path, config, *TURNS, *settings("environment.class_name=quartet.environments.examples:Missing"))
    assert run.result.code == 2
    assert "environment.class_name quartet.environments.examples:Missing: module" in run.result.err
    assert "has no Missing" in run.result.err
