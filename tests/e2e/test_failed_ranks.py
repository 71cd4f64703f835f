"""A service whose rank 1 fails: the service and its callers name the rank and its error."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from quartet.config.loading import load_config
from quartet.contract.trajectory import TokenBatch
from quartet.errors import OutOfMemory
from quartet.rpc.clients import ReferenceClient
from tests.e2e.commands import Command, settings

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
code = main()
sys.stderr.flush()
os._exit(code)
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


def start(program: str, config: Path, folder: Path) -> Command:
    (folder / "failing.py").write_text(program)
    options = ["reference", "--config", config, *settings("services.reference.processes=2"), "--listen=127.0.0.1:0"]
    return Command(sys.executable, "failing.py", *options, cwd=folder)


def test_a_rank_that_fails_while_it_loads_the_model_is_named(config: Path, tmp_path: Path) -> None:
    command = start(LOAD, config, tmp_path)
    try:
        result = command.wait()
    finally:
        command.clean_up()
    assert result.code == 1
    last = result.err.strip().splitlines()[-1]
    assert last.startswith("error: rank 1 of 2 (process ")
    assert last.endswith("): ended with status 1: RuntimeError: wrong shard")


@pytest.mark.slow
def test_a_call_that_exceeds_the_memory_of_another_rank_names_it(config: Path, tmp_path: Path) -> None:
    batch = TokenBatch(np.arange(12, dtype=np.int32) % 8, np.array([3, 3], np.int32), np.array([3, 3], np.int32))
    command = start(SCORING, config, tmp_path)
    try:
        ready = command.wait_for(lambda: re.search(r"event='ready' address='([\d.:]+)'", command.err))
        client = ReferenceClient(ready[1], load_config(config, [], []).timeouts)
        with pytest.raises(OutOfMemory, match=r"rank 1 of 2 .*: OutOfMemory: .* lower the role's micro_batch_tokens"):
            client.log_probs(batch, 1.0).result()
    finally:
        command.clean_up()
