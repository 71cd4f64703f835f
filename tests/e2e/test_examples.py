"""The examples with verifiers and environments: each starts as its README says, and learns."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from benchmarks.learning_curves import EXAMPLES, prepare
from quartet.verifiers.errors import SandboxFailed
from quartet.verifiers.sandbox.selection import open_sandbox
from tests.e2e.commands import QUARTET, Command, settings


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("example", "steps", "gain"),
    [
        ("arithmetic", 25, 0.12),
        ("code", 8, 0.12),
        ("guessing", 15, 0.08),
        ("calculator", 8, 0.15),
        ("puzzle", 25, 0.03),
    ],
)
def test_an_example_learns_in_its_first_steps(example: str, steps: int, gain: float, tmp_path: Path) -> None:
    if example == "code":
        try:
            open_sandbox()
        except SandboxFailed as error:
            pytest.skip(str(error))
    prepare(example, tmp_path)
    options = settings(
        "run.name=example",
        f"run.steps={steps}",
        f"actor.model={tmp_path / example / 'policy'}",
        f"data.prompts={tmp_path / example / 'prompts.jsonl'}",
        "gateway.enabled=false",
    )
    config = Path(EXAMPLES[example].config).absolute()
    command = Command(QUARTET, "train", config, *options, cwd=tmp_path, environment={"OMP_NUM_THREADS": "1"})
    try:
        result = command.wait(800)
    finally:
        command.clean_up()
    assert result.code == 0, result
    assert result.leftovers == []
    rows = [json.loads(line) for line in (tmp_path / "runs/example/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(row["failed_trajectories"] == 0 for row in rows)
    scores = [row["score_mean"] for row in rows]
    part = steps // 3
    assert statistics.fmean(scores[-part:]) > statistics.fmean(scores[:part]) + gain
