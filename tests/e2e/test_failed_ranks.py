"""A service whose rank 1 fails: the service and its callers name the rank and its error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from quartet.config.loading import load_config
from quartet.contract.trajectory import TokenBatch
from quartet.errors import OutOfMemory
from quartet.rpc.clients import ReferenceClient
from tests.e2e.commands import settings

PROGRAM = """
import os, sys, torch
import {module} as module
original = module.{function}
def failing(model, *arguments, **options):
    workers = arguments[{workers}]
    if workers.rank == 1:
        raise {error}
    return original(model, *arguments, **options)
module.{function} = failing
from quartet.services.__main__ import main
os._exit(main())
"""
LOAD = PROGRAM.format(
    module="quartet.models.workers.sharding", function="shard_model", workers=0, error="RuntimeError('wrong shard')"
)
SCORING = PROGRAM.format(
    module="quartet.services.reference.reference",
    function="response_log_probs",
    workers=-1,
    error="torch.OutOfMemoryError('20 GiB')",
)


def start(program: str, config: Path) -> subprocess.Popen[str]:
    options = [
        "reference",
        "--config",
        str(config),
        *settings("services.reference.processes=2"),
        "--listen=127.0.0.1:0",
    ]
    return subprocess.Popen(
        [sys.executable, "-c", program, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_a_rank_that_fails_while_it_loads_the_model_is_named(config: Path) -> None:
    with start(LOAD, config) as process:
        try:
            output, _ = process.communicate(timeout=240)
        finally:
            process.kill()
    assert process.returncode == 1
    last = output.strip().splitlines()[-1]
    assert last.startswith("error: rank 1 of 2 (process ")
    assert last.endswith("): ended with status 1: RuntimeError: wrong shard")


@pytest.mark.slow
def test_a_call_that_exceeds_the_memory_of_another_rank_names_it(config: Path) -> None:
    batch = TokenBatch(np.arange(12, dtype=np.int32) % 8, np.array([3, 3], np.int32), np.array([3, 3], np.int32))
    with start(SCORING, config) as process:
        try:
            assert process.stdout is not None
            ready = next(line for line in process.stdout if "event='ready'" in line and "address=" in line)
            address = ready.partition("address='")[2].partition("'")[0]
            client = ReferenceClient(address, load_config(config, [], []).timeouts)
            with pytest.raises(
                OutOfMemory, match=r"rank 1 of 2 .*: OutOfMemory: .* lower the role's micro_batch_tokens"
            ):
                client.log_probs(batch, 1.0).result()
        finally:
            process.kill()
