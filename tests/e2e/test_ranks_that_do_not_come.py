"""Ranks that end before the group has met: rank 0 ends with their error and does not wait for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.commands import settings

PROGRAM = """
import os, sys
import torch.distributed as dist
import quartet.models.workers.rendezvous as rendezvous

def fail(*arguments):
    raise RuntimeError("no such device")

if sys.argv.pop(1) == "rendezvous":
    rendezvous._join_round = fail
else:
    original = dist.init_process_group
    dist.init_process_group = lambda *values, **named: fail() if named["rank"] == 1 else original(*values, **named)

from quartet.services.__main__ import main

code = main()
sys.stderr.flush()
os._exit(code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["rendezvous", "process group"])
def test_a_start_ends_with_the_error_of_a_rank_that_does_not_come(place: str, config: Path, tmp_path: Path) -> None:
    options = settings(
        "services.reference.processes=2", "services.reference.num_threads=1", "timeouts.load_seconds=200"
    )
    command = ["reference", "--config", str(config), "--listen", "127.0.0.1:0", *options]
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, place, *command],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: rank 1 of 2 (process ")
    assert last.endswith("): ended with status 1: RuntimeError: no such device")
