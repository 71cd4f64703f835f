"""A slice of ``make fuzz-rpc``, and that it finds what it looks for."""

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

from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.server import Server
from quartet.services.reference.servicer import ReferenceServicer
from quartet.types import Role, ServiceStatus
from tests.fuzz.campaign import Campaign
from tests.fuzz.ground import Ground, Target
from tests.fuzz.methods import all_methods
from tests.fuzz.mutations import mutated
from tests.fuzz.seeds import SEEDS, Standing
from tests.fuzz.watching import Look, Watch, look

REQUESTS = 1000


def test_there_is_a_valid_request_for_every_method() -> None:
    assert SEEDS.keys() == all_methods().keys()
    assert "/quartet.v1.ActorService/Generate" in SEEDS
    assert "/grpc.health.v1.Health/Check" in SEEDS


def test_every_method_responds_properly_to_any_message(ground: Ground) -> None:
    campaign = Campaign(ground, REQUESTS)
    campaign.run()
    assert campaign.failures == []
    assert campaign.problems == []
    assert sum(campaign.answers.values()) == REQUESTS
    assert {path for path, _ in campaign.answers} == all_methods().keys()
    # Most get deep: which of those that depend on a moment do is another matter in so few.
    assert len(campaign.unreached()) <= 4, list(campaign.table())


class Failing:
    """A core with a defect."""

    def status(self) -> ServiceStatus:
        return ServiceStatus(role=Role.REFERENCE)

    def log_probs(self, *_: Any) -> Any:
        raise KeyError("an unforeseen error")


def test_the_campaign_finds_a_defect_and_can_replay_it(tmp_path: Path, redis_url: str) -> None:
    server = Server([ReferenceServicer(Failing(), ComputeThread(), 1)], "127.0.0.1:0")  # type: ignore[arg-type]
    try:
        campaign = Campaign(Ground(tmp_path, redis_url, [Target(Role.REFERENCE, server.address)]), 60)
        campaign.run()
        assert {(failure.method, failure.code) for failure in campaign.failures} == {
            ("/quartet.v1.ReferenceService/LogProbs", "INTERNAL")
        }
        kept = json.loads((tmp_path / "failures" / "0001.json").read_text())
        with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as again:
            channel.unary_unary(kept["method"], None, None)(bytes.fromhex(kept["request"]), timeout=5)
        assert again.value.code() is grpc.StatusCode.INTERNAL
    finally:
        server.stop(0.0)


class Hanging(Failing):
    """A core that never comes to an end while the test runs."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def log_probs(self, *_: Any) -> Any:
        self.end.wait()
        raise KeyError("the test is over")


def test_the_campaign_finds_a_method_that_stops_responding(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = Hanging()
    server = Server([ReferenceServicer(core, ComputeThread(), 1)], "127.0.0.1:0")  # type: ignore[arg-type]
    monkeypatch.setattr("tests.fuzz.campaign.DEADLINE", 0.05)
    try:
        campaign = Campaign(Ground(tmp_path, redis_url, [Target(Role.REFERENCE, server.address)]), 8)
        campaign.run()
    finally:
        core.end.set()
        server.stop(0.0)
    hangs = "/quartet.v1.ReferenceService/LogProbs: a proper request at the end was answered DEADLINE_EXCEEDED"
    assert any(problem.startswith(hangs) for problem in campaign.problems), campaign.problems


def test_the_campaign_finds_a_process_that_ends_or_grows(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert look(ended.pid, 0) is None
    here = look(os.getpid(), 7)
    assert here is not None
    assert here.sent == 7
    assert here.memory > 10
    watch = Watch([], lambda: 0)
    watch.looks["actor"] = [Look(30, 100.0, 10, 20), Look(90, 131.0, 10, 20)]
    watch.looks["critic"] = [Look(30, 100.0, 10, 20), Look(90, 129.0, 12, 29)]
    watch.looks["reward"] = [Look(30, 100.0, 10, 20), Look(90, 101.0, 12, 20)]
    _, problems = watch.growth(100)
    assert [problem.split(",")[0] for problem in problems] == [
        "actor: grew from 100 to 131 MiB",
        "critic: grew from 20 to 29 open files",
    ]


def test_the_campaign_finds_a_process_that_does_not_respond() -> None:
    watch = Watch([Target(Role.ACTOR, "127.0.0.1:1")], lambda: 5)
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        assert "did not answer: UNAVAILABLE" in watch._answers(Target(Role.ACTOR, "127.0.0.1:1"), channel)


def test_the_campaign_finds_a_file_outside_the_run_directory(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "outside").mkdir()
    root = tmp_path / "runs" / "fuzz"
    root.mkdir(parents=True)
    ground = Ground(tmp_path, redis_url, [Target(Role.ACTOR, "", root)])
    (root / "quartet-fuzz-escaped").touch()
    assert ground.strayed() == []
    for place in (tmp_path / "outside" / "anything", tmp_path / "runs" / "quartet-fuzz-escaped"):
        place.touch()
        assert ground.strayed() == [str(place)]
        place.unlink()


def test_the_seed_determines_the_requests() -> None:
    def drawn(seed: str) -> list[bytes]:
        random = Random(seed)
        return [mutated(random, make(random, Standing()), [b"other"]) for make in SEEDS.values() for _ in range(20)]

    assert drawn("1") == drawn("1")
    assert drawn("1") != drawn("2")
