"""Settings of torch in a service process: deterministic algorithms, and the settings for a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from quartet.config.root import Config
from tests.training.conftest import MakeConfig

ROOT = Path(__file__).parents[2]

# Prints the settings of torch and exits when the service would load its model.
PROCESS = """
import os
import sys
import torch
from quartet.services import factories as roles
from quartet.services.__main__ import main

def print_settings(*_):
    print(torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
    print(torch.backends.cuda.cudnn_sdp_enabled(), *map(os.environ.get, ("CUBLAS_WORKSPACE_CONFIG", "PYTORCH_ALLOC_CONF")))
    raise SystemExit

roles.build_model_role = print_settings
main(sys.argv[1:])
"""


def settings_of(config: Config, path: Path) -> list[str]:
    path.write_text(config.to_yaml())
    command = [sys.executable, "-c", PROCESS, "actor", "--config", str(path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout, result.stderr
    return result.stdout.split()


def test_a_service_enables_deterministic_algorithms_without_filling_memory(make: MakeConfig, tmp_path: Path) -> None:
    assert settings_of(make(), tmp_path / "config.yaml") == ["True", "False", "True", "None", "None"]


def test_a_service_on_a_gpu_is_fast_outside_updates_and_keeps_no_fragments(make: MakeConfig, tmp_path: Path) -> None:
    config = make(services={"actor": {"devices": [0]}})
    expected = ["False", "False", "False", ":4096:8", "expandable_segments:True"]
    assert settings_of(config, tmp_path / "config.yaml") == expected
