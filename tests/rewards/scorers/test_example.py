"""The example of a scorer over HTTP."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from tests.rewards.scorers.conftest import Build
from tests.rewards.scorers.faults import responses
from tests.rewards.scorers.sources import section

SCRIPT = Path(__file__).parents[3] / "examples/rewards/scorer.py"


def test_the_example_scores_responses(build: Build) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(SCRIPT), str(port)])
    try:
        end = time.monotonic() + 30
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < end
            time.sleep(0.02)
        source = build(section("openrlhf", f"http://127.0.0.1:{port}", timeout_seconds=10.0))
        batch = responses().batch
        scores = source.score(batch)
        expected = [len(set(ids.tolist())) / 10 for ids in batch.sequences()]
        np.testing.assert_allclose(scores.total, np.array(expected, np.float32), atol=0, rtol=0)
    finally:
        process.kill()
        process.wait()
