"""Agents with the official client of OpenAI whose episodes have several branches: a run, and processes that are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.commands import QUARTET, Command, settings
from tests.e2e.conftest import Run, step_metrics, train, weights

AGENT = Path(__file__).with_name("agent_command.py")
STEPS, EPISODES, TURNS = 2, 2, 3
"""Each episode is a process that imports the client, which takes a second or two."""
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    template = tmp_path_factory.mktemp("agent") / "template.jinja"
    template.write_text(TEMPLATE)
    return settings(
        f"run.steps={STEPS}",
        "rollout.max_turns=4",
        "rollout.max_response_tokens=40",
        f"rollout.prompts_per_step={EPISODES // 2}",
        "data.max_prompt_tokens=60",
        "environment.kind=agent",
        f"environment.agent.command=[{sys.executable},{AGENT}]",
        f"environment.chat_template={template}",
        "reward={source: none}",
        "algorithm.estimator=grpo",
        "rollout.samples_per_prompt=2",
        "telemetry.tokens_every_steps=1",
        "gateway.enabled=false",
    )


@pytest.fixture(scope="module")
def finished(config: Path, options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = train(tmp_path_factory.mktemp("agents"), config, *options)
    assert run.result.code == 0, run.result
    return run


def rows(run: Run, step: int) -> list[dict[str, Any]]:
    path = run.directory / f"trajectories/step-{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_trains_the_branches_of_its_agents(finished: Run) -> None:
    for step in range(1, STEPS + 1):
        for row in rows(finished, step):
            *_, last = further = row["further_branches"]
            # A special token in an answer, which random models write, begins a branch more.
            assert last["prompt"].endswith("answers\nassistant: ")
            segments = [*row["segments"], *(segment for branch in further for segment in branch["segments"])]
            policy = [segment for segment in segments if segment["role"] == "policy"]
            assert len(policy) == TURNS
            assert row["score"] == pytest.approx(sum(segment["reward"] for segment in policy))
    assert all(3 >= metrics["branches_mean"] >= 2 for metrics in finished.metrics)
    # The agent's rewards reach the policy.
    assert any(metrics["grad_norm_actor"] > 0 for metrics in finished.metrics)


def test_no_key_reaches_a_file_of_the_run(finished: Run) -> None:
    files = [path for path in finished.directory.rglob("*") if path.is_file()]
    assert {"actor.log", "environment.log", "metrics.jsonl"} <= {path.name for path in files}
    assert not [path for path in files if re.search(rb"quartet-[A-Za-z0-9_-]{43}", path.read_bytes())]


@pytest.mark.parametrize("role", ["actor", pytest.param("environment", marks=pytest.mark.slow)])
def test_a_process_that_is_killed_in_the_middle_of_episodes_changes_no_bit(
    finished: Run, config: Path, options: list[str], tmp_path: Path, role: str
) -> None:
    """Its agents are at their third request. The first two answers come from the records."""
    hook = tmp_path / "hook"
    command = Command(
        *(QUARTET, "train", config, *options, *settings("environment.agent.pass_variables=[AGENT_HOOK]")),
        cwd=tmp_path,
        environment={"AGENT_HOOK": str(hook)},
    )
    try:
        command.wait_for(hook.exists)
        os.kill(command.child(role), signal.SIGKILL)
        result = command.wait()
    finally:
        command.clean_up()
    assert result.code == 0, result
    run = Run(result, tmp_path / "runs" / "tiny")
    assert f"{role}: killed by SIGKILL; restarted" in result.out
    assert weights(run.directory) == weights(finished.directory)
    assert step_metrics(run) == step_metrics(finished)
    turns = re.findall(
        r"event='turns of episodes' .* generated=(\d+) recorded=(\d+)", (run.directory / "logs/actor.log").read_text()
    )
    generated, recorded = (sum(map(int, numbers)) for numbers in zip(*turns, strict=True))
    assert recorded > 0
    # Those of the call that was killed are in no line.
    assert generated <= STEPS * EPISODES * TURNS
