"""Settings of torch in a service process: deterministic algorithms, and the settings for a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.e2e.commands import Command
from tests.training.conftest import MakeConfig

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
    (tmp_path / "process.py").write_text(PROCESS)
    command = Command(sys.executable, tmp_path / "process.py", *paths, cwd=tmp_path)
    try:
        result = command.wait()
    finally:
        command.clean_up()
    assert result.code == 0, result.err
    settings = [line.split() for line in result.out.splitlines()]
    assert settings == [
        ["True", "False", "True", "None", "None"],
        ["False", "False", "False", ":4096:8", "expandable_segments:True"],
    ]
