"""The imports of whole processes: the base install without torch, and a start without slow libraries."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.unit.test_architecture import ROOT, modules

# Parts and modules that need the extra `train`.
TORCH_PARTS = {"quartet.ppo", "quartet.models", "quartet.rewards", "quartet.demo", "quartet.services"}
TORCH_MODULES = {
    "quartet.cli.inference.evaluate",
    "quartet.cli.checkpoint.export",
    "quartet.api.completions",
    "quartet.cli.inference.generate",
    "quartet.environments.host",
    "quartet.contrib.triton.engine",
    "quartet.contrib.triton.lora_tensors",
    "quartet.contrib.triton.tensors",
    # Measures a model of transformers.
    "quartet.planner.meta_model",
    # Train, after rows were checked.
    "quartet.supervised.checkpoints",
    "quartet.supervised.device",
    "quartet.supervised.stage",
    "quartet.supervised.trainers",
    # Only vLLM imports them.
    "quartet.engines.vllm_transfer",
    "quartet.engines.vllm_worker",
}
# Modules of these parts that can be imported without the extra.
BASE_MODULES = {
    "quartet.rewards.examples",
    "quartet.system.user_function",
    "quartet.system.user_function_child",
    "quartet.services.__main__",
}
TRAIN_PACKAGES = ("torch", "transformers", "peft", "tokenizers", "huggingface_hub", "accelerate")

IMPORT_EACH = """
import importlib, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

packages, names = sys.argv[1].split(","), sys.argv[2].split(",")
sys.meta_path.insert(0, Missing())
failed = False
for name in names:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed = True
        print(f"{name}: {error}")
sys.exit(failed)
"""


def import_without(packages: Sequence[str], names: Sequence[str]) -> str:
    """Import modules in a process without these packages. Return one line for each module that fails."""
    command = [sys.executable, "-c", IMPORT_EACH, ",".join(packages), ",".join(names)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def test_the_base_install_can_import_all_parts_without_torch() -> None:
    names = {
        name
        for name in modules()
        if not any(name == torch_part or name.startswith(f"{torch_part}.") for torch_part in TORCH_PARTS)
    }
    names = names - TORCH_MODULES | BASE_MODULES
    assert len(names) > 100
    assert import_without(TRAIN_PACKAGES, sorted(names)) == ""


def test_the_modules_of_config_check_import_without_slow_libraries() -> None:
    slow = ("grpc", "redis", "google.protobuf", "structlog", "cryptography", "huggingface_hub", "tokenizers")
    names = ["quartet.cli.main", "quartet.config", "quartet.preflight", "quartet.preflight.security_checks"]
    assert import_without(slow, names) == ""


@pytest.mark.slow
def test_the_orchestrator_imports_without_peft_and_modelling_code() -> None:
    """Without these imports, the process starts in half the time."""
    names = ["quartet.services.orchestrator.training_run", "quartet.services.orchestrator.servicer"]
    assert import_without(("peft", "sympy"), names) == ""


def test_a_missing_package_is_reported() -> None:
    assert "quartet.ppo.gae: No module named 'torch'" in import_without(TRAIN_PACKAGES, ["quartet.ppo.gae"])
