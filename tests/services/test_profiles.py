"""Profiles over gRPC: the recording of a compute thread by torch, its summary and its trace, and the recorder of a run."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quartet.contract.profile import ProfileSummary
from quartet.contract.status import Role, ServiceStatus
from quartet.errors import FailedPrecondition, InvalidRequest, ServiceUnavailable
from quartet.rpc.clients import ProfileClient
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.server import Server
from quartet.run_directory.run_files import PROFILE_SUMMARY, RunFiles
from quartet.services.orchestrator.control.run_control import RunControl
from quartet.services.orchestrator.telemetry.profile_recorder import ProfileRecorder
from quartet.services.profile import servicer as profile_servicer
from quartet.services.profile.servicer import ProfileServicer


class Caller:
    def time_remaining(self) -> float | None:
        return 60.0

    def add_callback(self, callback: Any) -> bool:
        return True


class Service:
    """A process that multiplies matrices."""

    role = Role.ACTOR

    def __init__(self) -> None:
        self.compute = ComputeThread()
        self.profiles = ProfileServicer(self.compute)
        self.server = Server([self], "127.0.0.1:0", register=self.profiles.register)

    def multiply(self) -> None:
        """Multiply on the compute thread, as a call of kind update."""
        matrix = torch.ones(64, 64)
        self.compute.run("update", Caller(), lambda _: [matrix @ matrix for _ in range(20)])

    def status(self) -> ServiceStatus:
        return ServiceStatus(Role.ACTOR)

    def register(self, server: Any) -> None:
        """Offer no method besides profiles."""

    def abandoned(self) -> tuple[str, float]:
        return "", 0.0

    def close(self) -> None:
        self.compute.close()


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    # A process that ends during a profile without os._exit crashes in torch.
    if service.profiles._profile is not None and not service.profiles._is_cut_off:
        service.compute.run("end", Caller(), lambda _: service.profiles._end(service.profiles._name))
    service.server.stop(0)


@pytest.fixture
def client(service: Service) -> Iterator[ProfileClient]:
    client = ProfileClient(Role.ACTOR, service.server.address, 60)
    yield client
    client.close()


def trace_of(content: bytes) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(gzip.decompress(content))["traceEvents"]
    return events


def test_a_profile_has_the_work_of_the_compute_thread_and_its_operators(
    service: Service, client: ProfileClient
) -> None:
    client.start("step-1").result()
    service.multiply()
    ended, summary, *chunks = client.take("step-1")
    assert ended is None
    assert isinstance(summary, ProfileSummary)
    assert summary.work_seconds.keys() == {"update"}
    assert {"aten::mm": 20}.items() <= {each.name: each.calls for each in summary.operators}.items()
    assert 0 < summary.compute_seconds <= summary.work_seconds["update"] <= summary.seconds
    assert summary.gap_seconds == pytest.approx(summary.work_seconds["update"] - summary.compute_seconds, abs=1e-3)
    names = [event["name"] for event in trace_of(b"".join(chunk for chunk in chunks if isinstance(chunk, bytes)))]
    assert names.count("aten::mm") == 20
    assert "quartet: update" in names


def test_a_second_profile_has_only_its_own_work(service: Service, client: ProfileClient) -> None:
    for name in ("step-1", "step-2"):
        client.start(name).result()
        service.multiply()
        _, summary, *_ = client.take(name)
        assert isinstance(summary, ProfileSummary)
        assert {each.name: each.calls for each in summary.operators}["aten::mm"] == 20


def test_a_profile_that_is_not_under_way_is_refused(service: Service, client: ProfileClient) -> None:
    with pytest.raises(FailedPrecondition, match="profile step-1: not under way"):
        list(client.take("step-1"))


def test_a_new_profile_replaces_that_of_an_orchestrator_that_has_died(service: Service, client: ProfileClient) -> None:
    client.start("step-1").result()
    client.start("step-7").result()
    with pytest.raises(FailedPrecondition, match="step-1"):
        list(client.take("step-1"))
    assert next(client.take("step-7")) is None


LIMITS: dict[str, Any] = {"MAX_SECONDS": 0.0, "resident_bytes": lambda: 2**50}


@pytest.mark.parametrize("limit", ["MAX_SECONDS", "resident_bytes"])
@pytest.mark.parametrize("in_a_call", [False, True])
def test_a_profile_ends_by_itself_at_its_limit(
    service: Service, client: ProfileClient, monkeypatch: pytest.MonkeyPatch, limit: str, in_a_call: bool
) -> None:
    monkeypatch.setattr(profile_servicer, "CHECK_SECONDS", 0.0)
    client.start("step-1").result()

    def reach_limit() -> None:
        monkeypatch.setattr(profile_servicer, limit, LIMITS[limit])

    def work(cancelled: Callable[[], bool]) -> None:
        matrix = torch.ones(64, 64)
        for _ in range(20):
            cancelled()
            matrix @ matrix
        reach_limit()
        cancelled()
        matrix @ matrix

    if in_a_call:
        service.compute.run("generate", Caller(), work)
    else:
        service.multiply()
        reach_limit()
    service.multiply()
    _, summary, *_ = client.take("step-1")
    assert isinstance(summary, ProfileSummary)
    assert summary.cut_off
    assert {each.name: each.calls for each in summary.operators}["aten::mm"] == 20


def test_a_trace_that_is_too_large_is_not_sent(
    service: Service, client: ProfileClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_servicer, "MAX_TRACE_BYTES", 10)
    client.start("step-1").result()
    assert [type(part) for part in client.take("step-1")] == [type(None), ProfileSummary]


class Run:
    """A run with a recorder, whose only service is ``service``, and one at an address where nothing listens if ``lost``."""

    def __init__(self, service: Service, folder: Path, lost: bool = False) -> None:
        self.files, self.notes = RunFiles(folder), list[str]()
        self.control = RunControl(self.files, persist=False)
        config: Any = SimpleNamespace(
            timeouts=SimpleNamespace(generate_seconds=30, update_seconds=30), run=SimpleNamespace(steps=9)
        )
        services = {"actor": service.server.address, **({"generator 127.0.0.1:1": "127.0.0.1:1"} if lost else {})}
        self.recorder = ProfileRecorder(config, self.files, self.control, self.notes.append, lambda: services)
        self._service = service

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.recorder.begin_step(step)
            self._service.multiply()
            self.recorder.end_step(step)

    def summary(self, step: int) -> dict[str, Any]:
        profile: dict[str, Any] = json.loads((self.files.profiles / f"step-{step:06d}" / PROFILE_SUMMARY).read_text())
        return profile


def test_the_next_steps_are_recorded_and_saved_with_the_run(service: Service, tmp_path: Path) -> None:
    run = Run(service, tmp_path)
    run.steps(1, 1)
    run.control.profile(2)
    assert run.recorder.is_boundary(1)
    run.steps(2, 2)
    assert not run.recorder.is_boundary(2)
    run.steps(3, 4)
    run.recorder.finish()
    profile = run.summary(2)
    assert (profile["step"], profile["last_step"], [*profile["step_seconds"]]) == (2, 3, ["2", "3"])
    [actor] = profile["services"]
    assert {each["name"]: each["calls"] for each in actor["summary"]["operators"]}["aten::mm"] == 2 * 20
    trace = (run.files.profiles / "step-000002" / actor["file"]).read_bytes()
    assert (actor["file"], actor["bytes"], actor["problem"]) == ("actor-0.json.gz", len(trace), "")
    assert [event["name"] for event in trace_of(trace)].count("aten::mm") == 2 * 20
    assert run.notes == [f"profile of steps 2 to 3: saved in {run.files.profiles / 'step-000002'}"]


def test_one_profile_at_a_time(service: Service, tmp_path: Path) -> None:
    run = Run(service, tmp_path)
    run.control.profile(1)
    with pytest.raises(FailedPrecondition, match="under way"):
        run.control.profile(1)
    run.recorder.begin_step(1)
    with pytest.raises(FailedPrecondition, match="under way"):
        run.control.profile(1)
    run.recorder.end_step(1)
    run.recorder.finish()
    run.control.profile(1)


@pytest.mark.parametrize("steps", [0, 11])
def test_the_number_of_steps_is_limited(service: Service, tmp_path: Path, steps: int) -> None:
    with pytest.raises(InvalidRequest, match=f"steps {steps}: expected 1 to 10"):
        Run(service, tmp_path).control.profile(steps)


def test_a_service_that_is_lost_is_missing_and_the_others_are_saved(service: Service, tmp_path: Path) -> None:
    run = Run(service, tmp_path, lost=True)
    run.control.profile(1)
    run.steps(1, 1)
    run.recorder.finish()
    actor, generator = run.summary(1)["services"]
    assert actor["file"] == "actor-0.json.gz"
    assert (generator["service"], generator["file"], generator["summary"]) == ("generator 127.0.0.1:1", None, None)
    assert generator["problem"]


def test_a_service_that_restarts_in_the_middle_is_incomplete(service: Service, tmp_path: Path) -> None:
    run = Run(service, tmp_path)
    run.control.profile(2)
    run.steps(1, 1)
    # A new process at this address would know of no profile.
    service.compute.run("forget", Caller(), lambda _: service.profiles._end("step-000001"))
    run.steps(2, 2)
    run.recorder.finish()
    [actor] = run.summary(1)["services"]
    assert (actor["file"], actor["summary"]) == (None, None)
    assert "not under way in this process, which has been restarted" in actor["problem"]


def test_the_end_of_a_run_ends_a_profile(service: Service, tmp_path: Path) -> None:
    run = Run(service, tmp_path)
    run.control.profile(5)
    run.steps(1, 2)
    run.recorder.finish()
    assert [*run.summary(1)["step_seconds"]] == ["1", "2"]
    assert run.summary(1)["services"][0]["file"]


def test_a_profile_that_cannot_be_written_is_a_note(service: Service, tmp_path: Path) -> None:
    run = Run(service, tmp_path)
    run.files.profiles.write_text("not a folder")
    run.control.profile(1)
    run.steps(1, 1)
    run.recorder.finish()
    assert len(run.notes) == 1
    assert "profile of step 1: not saved" in run.notes[0]
    run.control.profile(1)


def test_errors_of_the_service_are_those_of_its_calls() -> None:
    client = ProfileClient(Role.ACTOR, "127.0.0.1:1", 10)
    with pytest.raises(ServiceUnavailable):
        client.start("step-1").result()
    client.close()
