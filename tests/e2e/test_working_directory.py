"""Files in the working directory with the names of libraries are never imported instead of these libraries."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quartet.system.child_processes import module_command
from quartet.system.failpoints import FOLDER_VARIABLE, VARIABLE
from tests.e2e.commands import settings
from tests.e2e.conftest import Start
from tests.waiting import LIMIT

LIBRARIES = ("redis", "numpy", "grpc", "yaml", "queue", "typing", "uvicorn", "torch", "pydantic", "pathlib")


@pytest.fixture
def shadowed(tmp_path: Path) -> Path:
    """A working directory with files named like libraries, and with a reward function."""
    for name in LIBRARIES:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('taken for a library')\n")
    (tmp_path / "mine.py").write_text("def length(prompt, response, fields): return float(len(response))\n")
    return tmp_path


def test_train_and_the_processes_of_a_run_import_the_real_libraries(
    start: Start, config: Path, shadowed: Path, tmp_path: Path
) -> None:
    """Nothing of this run is forked from the tests, so its services show their environment, too."""
    options = settings("reward.source=function", "reward.model=null", "reward.function=mine:length", "run.steps=1")
    # No critic and no reference: each process imports torch.
    options += settings("rollout.generators=1", "algorithm.estimator=reinforce_plus_plus", "algorithm.kl_coefficient=0")
    held = {VARIABLE: "orchestrator.sealed=hold@1", FOLDER_VARIABLE: str(tmp_path)}
    command = start("train", config, *options, environment=held, fresh=True)
    command.wait_for((tmp_path / "orchestrator.sealed.reached").exists)
    token = json.loads((shadowed / "runs/tiny/gateway.json").read_text())["token"]
    environment = Path(f"/proc/{command.child('actor')}/environ").read_bytes()
    assert FOLDER_VARIABLE.encode() in environment
    assert token.encode() not in environment, "a service has the gateway's token"
    (tmp_path / "orchestrator.sealed.go").touch()
    trained = command.wait()
    assert (trained.code, trained.err, trained.leftovers) == (0, "", []), trained
    logs = "".join(path.read_text() for path in (shadowed / "runs/tiny/logs").glob("*.log"))
    assert "role='generator' event='ready'" in logs
    assert "taken for a library" not in logs + trained.out


@pytest.mark.parametrize(
    "program",
    [
        [sys.executable, "-m", "quartet.services", "reward"],
        [sys.executable, "-m", "quartet.gateway"],
        module_command("quartet.services", "generator", python=Path(sys.executable)),
    ],
    ids=["reward", "gateway", "generator with its own Python"],
)
def test_a_process_started_directly_imports_the_real_libraries(
    program: list[str], config: Path, shadowed: Path
) -> None:
    command = [*program, "--config", str(config), "--config", "absent.yaml"]
    result = subprocess.run(command, cwd=shadowed, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert result.returncode == 2, result
    assert "config absent.yaml: cannot be read" in result.stderr
