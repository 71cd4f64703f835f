"""Files in the working directory with the names of libraries are never imported instead of these libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.commands import settings
from tests.e2e.conftest import Service, Start
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
    start: Start, config: Path, shadowed: Path, frozen: Service
) -> None:
    function = settings("reward.source=function", "reward.model=null", "reward.function=mine:length", "run.steps=1")
    trained = start("train", config, *function, *frozen.serving("reference"), fresh=True).wait()
    assert trained.code == 0, trained
    logs = "".join(path.read_text() for path in (shadowed / "runs/tiny/logs").glob("*.log"))
    assert "taken for a library" not in logs + trained.out + trained.err


@pytest.mark.parametrize("module", [("quartet.services", "reward"), ("quartet.gateway",)])
def test_a_process_started_directly_imports_the_real_libraries(
    module: tuple[str, ...], config: Path, shadowed: Path
) -> None:
    command = [sys.executable, "-m", *module, "--config", str(config), "--config", "absent.yaml"]
    result = subprocess.run(command, cwd=shadowed, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert result.returncode == 2, result
    assert "config absent.yaml: cannot be read" in result.stderr
