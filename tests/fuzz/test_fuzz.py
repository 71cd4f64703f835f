"""A short fuzzing campaign, and tests that a campaign detects defects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest

from quartet.contract.status import Role, ServiceStatus
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.server import Server
from quartet.services.reference.servicer import ReferenceServicer
from tests.fuzz.campaign import Campaign
from tests.fuzz.environment import FuzzEnvironment, Target
from tests.fuzz.methods import all_methods
from tests.fuzz.monitoring import Monitor, ResourceUsage, resource_usage
from tests.fuzz.mutations import mutated
from tests.fuzz.seeds import SEEDS, ServiceState

REQUESTS = 400


def test_every_method_has_a_valid_request() -> None:
    assert SEEDS.keys() == all_methods().keys()
    assert "/quartet.v1.GenerationService/Generate" in SEEDS
    assert "/grpc.health.v1.Health/Check" in SEEDS


def test_every_method_returns_an_allowed_status_for_any_message(environment: FuzzEnvironment) -> None:
    campaign = Campaign(environment, REQUESTS)
    campaign.run()
    assert campaign.failures == []
    assert campaign.problems == []
    assert sum(campaign.responses.values()) == REQUESTS
    assert {path for path, _ in campaign.responses} == all_methods().keys()
    # Only a generator loads weights.
    assert campaign.responses["/quartet.v1.GenerationService/UpdateWeights", "OK"]
    assert campaign.responses["/quartet.v1.WeightService/GetWeights", "OK"]
    # Few requests may miss methods that succeed only in certain states, or do so because of the deadline on a slow machine.
    assert len(campaign.unreached()) <= len(all_methods()) // 4, list(campaign.table())


class Failing:
    """A model with a defect."""

    def status(self) -> ServiceStatus:
        return ServiceStatus(role=Role.REFERENCE)

    def log_probs(self, *_: Any) -> Any:
        raise KeyError("an unforeseen error")


def test_the_campaign_finds_a_defect_and_can_replay_it(tmp_path: Path, redis_url: str) -> None:
    server = Server([ReferenceServicer(Failing(), ComputeThread(), 1)], "127.0.0.1:0")  # type: ignore[arg-type]
    try:
        campaign = Campaign(FuzzEnvironment(tmp_path, redis_url, [Target(Role.REFERENCE, server.address)]), 60)
        campaign.run()
        assert {(failure.method, failure.code) for failure in campaign.failures} == {
            ("/quartet.v1.ReferenceService/LogProbs", "INTERNAL")
        }
        failure = json.loads((tmp_path / "failures" / "0001.json").read_text())
        with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as replayed:
            channel.unary_unary(failure["method"], None, None)(bytes.fromhex(failure["request"]), timeout=5)
        assert replayed.value.code() is grpc.StatusCode.INTERNAL
    finally:
        server.stop(0.0)


class Hanging(Failing):
    """A model that does not return until the test ends."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def log_probs(self, *_: Any) -> Any:
        self.end.wait()
        raise KeyError("the test is over")


def test_the_campaign_finds_a_method_that_stops_responding(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Hanging()
    server = Server([ReferenceServicer(model, ComputeThread(), 1)], "127.0.0.1:0")  # type: ignore[arg-type]
    monkeypatch.setattr("tests.fuzz.campaign.DEADLINE", 0.05)
    try:
        campaign = Campaign(FuzzEnvironment(tmp_path, redis_url, [Target(Role.REFERENCE, server.address)]), 8)
        campaign.run()
    finally:
        model.end.set()
        server.stop(0.0)
    hangs = "/quartet.v1.ReferenceService/LogProbs: a valid request at the end returned DEADLINE_EXCEEDED"
    assert any(problem.startswith(hangs) for problem in campaign.problems), campaign.problems


def test_the_campaign_finds_a_process_that_ends_or_grows(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert resource_usage(ended.pid, 0) is None
    usage = resource_usage(os.getpid(), 7)
    assert usage is not None
    assert usage.sent == 7
    assert usage.memory > 10
    monitor = Monitor([], lambda: 0)
    monitor.samples["actor"] = [ResourceUsage(30, 100.0, 10, 20), ResourceUsage(90, 131.0, 10, 20)]
    monitor.samples["critic"] = [ResourceUsage(30, 100.0, 10, 20), ResourceUsage(90, 129.0, 12, 29)]
    monitor.samples["reward"] = [ResourceUsage(30, 100.0, 10, 20), ResourceUsage(90, 101.0, 12, 20)]
    _, problems = monitor.growth(100)
    assert [problem.split(",")[0] for problem in problems] == [
        "actor: grew from 100 to 131 MiB",
        "critic: grew from 20 to 29 open files",
    ]


def test_the_campaign_finds_a_process_that_does_not_respond() -> None:
    monitor = Monitor([Target(Role.ACTOR, "127.0.0.1:1")], lambda: 5)
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        assert "did not respond: UNAVAILABLE" in monitor._check(Target(Role.ACTOR, "127.0.0.1:1"), channel)


def test_the_campaign_finds_a_file_outside_the_run_directory(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "outside").mkdir()
    root = tmp_path / "runs" / "fuzz"
    root.mkdir(parents=True)
    environment = FuzzEnvironment(tmp_path, redis_url, [Target(Role.ACTOR, "", root)])
    (root / "quartet-fuzz-escaped").touch()
    assert environment.misplaced_files() == []
    for path in (tmp_path / "outside" / "anything", tmp_path / "runs" / "quartet-fuzz-escaped"):
        path.touch()
        assert environment.misplaced_files() == [str(path)]
        path.unlink()


def test_the_seed_determines_the_requests() -> None:
    def requests_of(seed: str) -> list[bytes]:
        random = Random(seed)
        return [mutated(random, make(random, ServiceState()), [b"other"]) for make in SEEDS.values() for _ in range(20)]

    assert requests_of("1") == requests_of("1")
    assert requests_of("1") != requests_of("2")
