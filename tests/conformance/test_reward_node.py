"""The reward service in JavaScript of examples/reward-node: its conformance, and a run that it scores."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from quartet.child_processes import tied_to_parent
from quartet.config import load_config
from quartet.conformance import CheckOutcome, Limits, Target, as_text, checks_of, run_checks
from quartet.models.weights.tokenizer import load_tokenizer, tokenizer_fingerprint
from quartet.run_directory.run_files import RunFiles
from quartet.types import Role
from tests.training.conftest import _one_thread, make, toy_task, toy_task_tree  # noqa: F401
from tests.training.runs import orchestrator, services

EXAMPLE = Path(__file__).parents[2] / "examples/reward-node"
pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (EXAMPLE / "node_modules").is_dir(),
    reason="needs Node and its packages; run make reward-node",
)


@contextmanager
def reward_node(tokenizer: Path, *options: str) -> Iterator[str]:
    """Start the service, and yield its address."""
    command = ["node", "server.js", "--tokenizer", str(tokenizer), "--listen", "127.0.0.1:0", *options]
    process = subprocess.Popen(
        tied_to_parent(command), cwd=EXAMPLE, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "listening on" in line, line
        yield line.split()[-1]
    finally:
        process.terminate()
        process.wait(20)
        assert process.stdout is not None
        process.stdout.close()


def test_the_service_conforms_and_its_report_is_the_one_in_the_example(toy_task: Any) -> None:  # noqa: F811
    with (
        reward_node(toy_task.policy / "tokenizer.json") as address,
        closing(Target(Role.REWARD, address, Limits())) as target,
    ):
        results = run_checks(target, checks_of(Role.REWARD))
        report = as_text(target, results)
        status = target.status()
    assert not [result for result in results if result.outcome is CheckOutcome.FAILED], report
    assert status.tokenizer_fingerprint == tokenizer_fingerprint(load_tokenizer(toy_task.policy))
    stored = (EXAMPLE / "conformance.txt").read_text(encoding="utf-8").splitlines()
    assert [line[:120] for line in report.splitlines()[:-1]] == [line[:120] for line in stored[:-1]]


def test_the_service_scores_a_run(make: Any) -> None:  # noqa: F811
    plain = make(algorithm={"estimator": "rloo"}, rollout={"samples_per_prompt": 2}, run={"steps": 3})
    with reward_node(Path(plain.actor.model) / "tokenizer.json") as address, services(plain) as addressed:
        overrides = [
            f"services.{role}.address={getattr(addressed.services, role).addresses[0]}"
            for role in (Role.ACTOR, Role.REFERENCE)
        ]
        files = RunFiles(plain.run_directory)
        with orchestrator(load_config(files.config, [*overrides, f"services.reward.address={address}"])) as running:
            run = running.finish()
    assert run.code == 0, run.progress.error
    rows = [row for step in (1, 2, 3) for row in run.trajectories(step)]
    assert len(rows) == 24
    for row in rows:
        assert 0 <= row["score"] <= 1, row
        if not any(word in row["response"].lower() for word in ("superb", "lovely", "great", "perfect")):
            assert row["score"] == 0
