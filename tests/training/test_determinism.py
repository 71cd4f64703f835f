"""Deterministic algorithms in a service process: the same work gives the same result."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.training.conftest import MakeConfig

ROOT = Path(__file__).parents[2]

# Ends where a service would load its model, with what torch is set to by then.
PROCESS = """
import sys
import torch
from quartet.services import factories as roles
from quartet.services.__main__ import main

def shown(*_):
    print(torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
    raise SystemExit

roles.build_model_role = shown
main(sys.argv[1:])
"""


def test_a_model_is_loaded_under_deterministic_algorithms_that_fill_no_memory(make: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(make().to_yaml())
    command = [sys.executable, "-c", PROCESS, "actor", "--config", str(path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.stdout.split() == ["True", "False"], ended.stderr
