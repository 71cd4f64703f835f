"""Complete runs with a real Triton server, real gRPC services and a real Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quartet.demo.toy_task import ToyTask
from tests.engines.triton_server import Model, TritonServer
from tests.training.conftest import MakeConfig, make, toy_task, toy_task_tree
from tests.training.runs import fleet, orchestrator, run_to_completion

__all__ = ["make", "toy_task", "toy_task_tree"]
STEPS = 3


@pytest.fixture(scope="module")
def triton(server: TritonServer, toy_task: ToyTask, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Serve the initial policy of the run. The fixture ``server`` skips the tests without the wheel."""
    del server
    result = TritonServer(
        tmp_path_factory.mktemp("served"), Path(toy_task.policy), (Model("current"), Model("silent", log_probs="no"))
    )
    result.start()
    yield result
    result.stop()


def rollout(triton: TritonServer, **changes: Any) -> dict[str, Any]:
    return {"engine": "triton", "triton": {"url": f"grpc://127.0.0.1:{triton.port}", "model": "current", **changes}}


@pytest.mark.parametrize("model", ["current", "silent"])
def test_a_run_with_adapters_trains_on_samples_of_its_own_policy(
    make: MakeConfig, triton: TritonServer, model: str
) -> None:
    run = run_to_completion(
        make(
            run={"steps": STEPS},
            actor={"lora": {"rank": 4}, "learning_rate": 1e-2},
            rollout=rollout(triton, model=model),
        )
    )
    assert [step["step"] for step in run.metrics] == list(range(1, STEPS + 1))
    assert max(step["rollout_mismatch_kl"] for step in run.metrics) < 1e-6
    # The policy moved away from the reference, so the server did not keep the first adapter.
    assert run.metrics[0]["kl_mean"] == pytest.approx(0.0, abs=1e-3)
    assert abs(run.metrics[-1]["kl_mean"]) > 1e-3
    assert not (run.files.root / "engine").exists() or not list((run.files.root / "engine").iterdir())


def test_a_run_with_static_weights_reports_the_mismatch_of_its_policy(make: MakeConfig, triton: TritonServer) -> None:
    run = run_to_completion(make(run={"steps": STEPS}, rollout=rollout(triton, weights="static")))
    mismatch = [step["rollout_mismatch_kl"] for step in run.metrics]
    assert mismatch[0] < 1e-6
    assert mismatch[-1] > 1e-6
    assert run.metrics[-1]["importance_weight"] != 1.0


def test_a_run_waits_for_a_stopped_server(make: MakeConfig, triton: TritonServer) -> None:
    config = make(
        actor={"lora": {"rank": 4}}, rollout=rollout(triton), recovery={"max_recoveries": 100, "backoff_seconds": 0.1}
    )
    triton.stop()
    with fleet(config) as started, orchestrator(started.config) as active:
        while not active.board.current().recoveries:
            active.thread.join(0.02)
            assert active.thread.is_alive(), active.board.current()
        triton.start(triton.port)
        run = active.finish()
    assert run.code == 0, run.progress.error
    assert [step["step"] for step in run.metrics] == [1, 2]
