"""Deterministic algorithms of torch in a service process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.training.conftest import MakeConfig

ROOT = Path(__file__).parents[2]

# Prints the settings of torch and exits when the service would load its model.
PROCESS = """
import sys
import torch
from quartet.services import factories as roles
from quartet.services.__main__ import main

def print_settings(*_):
    print(torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
    raise SystemExit

roles.build_model_role = print_settings
main(sys.argv[1:])
"""


def test_a_service_enables_deterministic_algorithms_without_filling_memory(make: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(make().to_yaml())
    command = [sys.executable, "-c", PROCESS, "actor", "--config", str(path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["True", "False"], result.stderr
