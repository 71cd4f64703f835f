"""Environment variables for a process that computes on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quartet.system import compute_environment
from quartet.system.compute_environment import MKL_STRICT, SPIN_COUNT, set_cpu_environment

WAIT_POLICY = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": str(SPIN_COUNT)}


@pytest.fixture
def processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that names the processor, of AMD."""
    path = tmp_path / "cpuinfo"
    path.write_text("vendor_id\t: AuthenticAMD\n")
    monkeypatch.setattr(compute_environment, "CPU_INFO", path)
    return path


def test_waiting_threads_sleep_after_a_short_spin(processor: Path) -> None:
    environment: dict[str, str] = {}

    set_cpu_environment(environment)

    assert environment == WAIT_POLICY


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_a_wait_policy_of_the_user_is_kept(name: str, processor: Path) -> None:
    environment = {name: "given"}

    set_cpu_environment(environment)

    assert environment == {name: "given"}


def test_mkl_is_reproducible_on_intel_processors_only(processor: Path) -> None:
    own = {"MKL_CBWR": "given"}
    processor.write_text("vendor_id\t: GenuineIntel\n")
    environment: dict[str, str] = {}

    set_cpu_environment(environment)
    set_cpu_environment(own)

    assert environment == {**WAIT_POLICY, "MKL_CBWR": MKL_STRICT}
    assert own["MKL_CBWR"] == "given"
    processor.unlink()
    assert not compute_environment.is_intel(), "not Linux"


@pytest.mark.skipif(not compute_environment.is_intel(), reason="for other processors, MKL has no such setting")
@pytest.mark.parametrize(
    ("module", "arguments"),
    [("quartet.services.__main__", ["actor", "--config", "missing.yaml"]), ("quartet.cli.main", ["--version"])],
)
def test_services_and_commands_set_it_themselves(module: str, arguments: list[str]) -> None:
    code = f"""
import os, sys
from {module} import main
sys.argv = ["program", *{arguments!r}]
try:
    main()
finally:
    print("MKL_CBWR", os.environ.get("MKL_CBWR"), flush=True)
"""
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}

    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)

    assert f"MKL_CBWR {MKL_STRICT}" in result.stdout, result.stderr
