"""vLLM: a process that is killed leaves neither vLLM's processes nor its weights, and a stuck vLLM is an error."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quartet.contract.generation import SamplingParameters
from quartet.errors import EngineFailed
from tests.detached_engines.test_contract import load, requests, run
from tests.detached_engines.tiny_checkpoint import arrays, served_model

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: make engines", allow_module_level=True)

from quartet.engines.vllm import VLLMEngine, VLLMSettings
from tests.detached_engines.vllm_engine import BreakableVLLM

SECONDS = 30.0

# Starts vLLM with two ranks, prints the folder of the weights, and waits.
HOLDER = """
import sys, time
from pathlib import Path
from tests.detached_engines.test_contract import load
from tests.detached_engines.tiny_checkpoint import arrays
from tests.detached_engines.vllm_engine import vllm_engine

if __name__ == "__main__":
    engine = vllm_engine(Path(sys.argv[1]), tensor_parallel_size=2)
    load(engine, arrays(seed=1))
    print("FOLDER", engine._folder, flush=True)
    time.sleep(600)
"""


def descendants(process: int) -> set[str]:
    """Return the names of the processes below this one, see ``running``."""
    result: set[str] = set()
    parents = {process}
    while parents:
        children = {name for name, parent in _processes().items() if parent in parents}
        parents = {int(name.partition("/")[0]) for name in children - result}
        result |= children
    return result


def running(processes: set[str]) -> set[str]:
    """Return those that still run. A name has the process id and the start time, because ids are reused."""
    return processes & _processes().keys()


def _processes() -> dict[str, int]:
    """Return the parent of each process that runs, by its name."""
    result = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in ("Z", "X"):
            result[f"{stat.parent.name}/{fields[19]}"] = int(fields[1])
    return result


def test_a_killed_process_leaves_no_processes_and_the_next_one_deletes_its_weights(folder: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        weights = Path(next(line for line in holder.stdout if line.startswith("FOLDER")).split()[1])
        left = descendants(holder.pid)
        # The engine core and two workers, beside Python's own resource tracker.
        assert len(left) >= 3
        holder.kill()
        start = time.monotonic()
        while running(left):
            assert time.monotonic() - start < SECONDS, running(left)
            time.sleep(0.05)
    assert weights.exists()
    VLLMEngine(VLLMSettings(16), served_model(folder)).close()
    assert not weights.exists()


def test_a_stuck_engine_core_is_an_error_after_the_time_of_a_step(
    vllm: BreakableVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(vllm, arrays(seed=1))
    monkeypatch.setattr(vllm, "_settings", dataclasses.replace(vllm._settings, stall_seconds=1.0))
    core = vllm.core_process().pid
    os.kill(core, signal.SIGSTOP)
    try:
        with pytest.raises(EngineFailed, match=r"vLLM: is stuck: it has made no step for 1 s"):
            list(vllm.generate(requests(1), SamplingParameters(8), 0, lambda: False))
    finally:
        os.kill(core, signal.SIGCONT)
    monkeypatch.undo()
    assert len(run(vllm, requests(2))) == 2
