"""A reward service process that two clients share: one floods it, and the other does not notice."""

from __future__ import annotations

import re
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from quartet.config.deployment import TimeoutsConfig
from quartet.contract.trajectory import TokenBatch
from quartet.errors import QuotaExceeded
from quartet.rpc.clients import RewardClient
from quartet.rpc.security.credentials import OPERATOR, Credentials
from tests.e2e.commands import Command, settings
from tests.services.model_services import replicas_of

TIMEOUTS = TimeoutsConfig(load_seconds=60, score_seconds=60)
FUNCTIONS = """
import time

def slow(prompt, response, fields):
    time.sleep(0.02)
    return float(len(response))
"""


@pytest.fixture
def service(config: Path, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Start a shared reward service. Yield its address and that of its metrics."""
    (tmp_path / "slow_scorers.py").write_text(FUNCTIONS)
    options = settings(
        "reward.model=null",
        "reward.source=function",
        "reward.function=slow_scorers:slow",
        "services.reward.sharing.max_pending_calls=2",
    )
    arguments = ("reward", "--config", config, "--listen", "127.0.0.1:0", *options)
    command = Command(sys.executable, "-m", "quartet.services", *arguments, cwd=tmp_path)
    try:
        ready = command.wait_for(
            lambda: re.search(r"event='ready' address='([\d.:]+)'.* metrics='([\d.:]+)'", command.err)
        )
        yield ready[1], ready[2]
    finally:
        command.clean_up()


def batch_of(sequences: int) -> TokenBatch:
    ids = np.random.default_rng(0).integers(3, 100, sequences * 8, np.int32)
    return TokenBatch(ids, np.full(sequences, 4, np.int32), np.full(sequences, 4, np.int32))


def test_a_flooding_client_is_refused_and_finishes_and_the_other_is_neither_refused_nor_late(
    service: tuple[str, str],
) -> None:
    address, metrics = service
    with (
        closing(RewardClient(address, TIMEOUTS, Credentials(OPERATOR, run="flood"))) as flood,
        closing(RewardClient(address, TIMEOUTS, Credentials(OPERATOR, run="normal"))) as normal,
    ):
        flood.wait_until_ready()
        expected = normal.score(batch_of(4)).result().total
        calls = [flood.score(batch_of(8)) for _ in range(8)]
        repeated = [replicas_of(flood).start(lambda client: client.score(batch_of(8))) for _ in range(8)]
        start = time.monotonic()
        # Every response of the flood takes 20 ms: 2.9 s together. Behind all of them, this call would end with the last one.
        assert normal.score(batch_of(4)).result().total.tolist() == expected.tolist()
        duration = time.monotonic() - start
        unfinished = sum(not call.done() for call in repeated)
        refused = []
        for call in calls:
            try:
                call.result()
            except QuotaExceeded as error:
                refused.append(error.retry_seconds)
        scores = [call.result().total.tolist() for call in repeated]
    assert unfinished >= 4, duration
    assert refused
    assert all(0 < seconds <= 30 for seconds in refused)
    assert scores == [scores[0]] * 8
    with urllib.request.urlopen(f"http://{metrics}/metrics") as response:
        text = response.read().decode()
    assert 'quartet_shared_refused_calls_total{run="normal"} 0.0' in text
    assert 'quartet_shared_scored_sequences_total{run="normal"} 8.0' in text
    assert re.search(r'quartet_shared_refused_calls_total{run="flood"} [1-9]', text)
