"""Settings of torch in a service process: deterministic algorithms, and the settings for a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.training.conftest import MakeConfig

ROOT = Path(__file__).parents[2]

# Prints the settings of torch when the service would load its model: a line for each config, from a fork that then ends.
PROCESS = """
import os
import sys
import torch
from quartet.services import roles
from quartet.services.__main__ import main

def print_settings(*_):
    print(
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cuda.cudnn_sdp_enabled(),
        *map(os.environ.get, ("CUBLAS_WORKSPACE_CONFIG", "PYTORCH_ALLOC_CONF")),
        flush=True,
    )
    os._exit(0)

roles.build_model_role = print_settings
for path in sys.argv[1:]:
    child = os.fork()
    if not child:
        main(["actor", "--config", path])
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_service_sets_torch_for_its_device(make: MakeConfig, tmp_path: Path) -> None:
    """Deterministic algorithms, without filled memory. A GPU is fast outside updates, and its memory has no fragments."""
    paths = []
    for name, config in {"cpu": make(), "gpu": make(services={"actor": {"devices": [0]}})}.items():
        paths.append(tmp_path / f"{name}.yaml")
        paths[-1].write_text(config.to_yaml())
    command = [sys.executable, "-c", PROCESS, *map(str, paths)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    settings = [line.split() for line in result.stdout.splitlines()]
    assert settings == [
        ["True", "False", "True", "None", "None"],
        ["False", "False", "False", ":4096:8", "expandable_segments:True"],
    ]
