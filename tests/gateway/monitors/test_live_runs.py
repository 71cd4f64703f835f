"""Progress, processes and buffer of an active run, also after a process is lost."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from quartet.buffer.connection import connect
from quartet.buffer.rollout_stream import RolloutStream
from quartet.config.deployment import SecurityConfig
from quartet.contract.control import RunState
from quartet.contract.status import MODEL_ROLES, Role
from quartet.gateway.monitors.run_progress import RunMonitor
from quartet.gateway.readers.run_catalog import RunCatalog
from quartet.rpc.security.allow_list import GATEWAY
from quartet.rpc.security.certificates import Authority
from quartet.rpc.security.credentials import Credentials
from quartet.rpc.server import Server
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.control.progress import ProgressBoard
from quartet.services.orchestrator.servicer import OrchestratorServicer
from tests.gateway.live_runs import eventually, start_live_run
from tests.gateway.serving import TIMEOUT, Gateway, config_of, create_run, serving
from tests.training.conftest import MakeConfig
from tests.training.runs import ActiveRun, Fleet


@pytest.fixture(scope="module")
def active(make: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ActiveRun, Fleet]]:
    with start_live_run(make, tmp_path_factory.mktemp("live"), "live") as result:
        result[0].control.pause()
        yield result


@pytest.fixture(scope="module")
def gateway(active: tuple[ActiveRun, Fleet]) -> Iterator[Gateway]:
    with serving(active[0].config.run.directory) as result:
        yield result


def test_the_event_stream_follows_the_progress_of_a_run(active: tuple[ActiveRun, Fleet], gateway: Gateway) -> None:
    run, _ = active
    eventually(lambda: run.board.current().phase, lambda phase: phase == "paused")
    with gateway.stream("live") as stream:
        first = next(iter(stream))
        assert (first.kind, first.data["state"], first.data["total_steps"]) == ("progress", "paused", 400)
        run.control.resume()
        step = first.data["step"]
        events = stream.until("step", step=step + 2)
        stream.until("progress", state="training")
        assert [event.data["step"] for event in events if event.kind == "step"][-2:] == [step + 1, step + 2]
        run.control.pause()
        last = stream.until("progress", state="paused")[-1]
        assert last.data["step"] >= step + 2
        assert last.identity is None
    detail = gateway.client.get("/runs/live").json()
    assert detail["live"]
    assert detail["progress"]["step"] == last.data["step"]


def test_a_lost_service_is_unreachable_until_it_returns(active: tuple[ActiveRun, Fleet], gateway: Gateway) -> None:
    _, services = active

    def health() -> dict[str, str]:
        return {item["role"]: item["health"] for item in gateway.client.get("/runs/live/services").json()}

    def unreachable(data: Any) -> list[str]:
        return [item["role"] for item in data["services"] if item["health"] == "unreachable"]

    all_processes = {*MODEL_ROLES, "orchestrator", "redis"}
    # On a busy machine, a process may not answer within the seconds of a poll.
    eventually(health, lambda health: health == dict.fromkeys(all_processes, "serving"))
    with gateway.stream("live") as stream:
        first = stream.until("services", lambda data: {item["health"] for item in data["services"]} == {"serving"})[-1]
        assert {item["role"] for item in first.data["services"]} == all_processes
        services.lose(Role.REWARD)
        stream.until("services", lambda data: unreachable(data) == ["reward"])
        services.start(Role.REWARD)
        stream.until("services", lambda data: {item["health"] for item in data["services"]} == {"serving"})


def test_every_replica_of_a_service_is_listed(active: tuple[ActiveRun, Fleet], gateway: Gateway) -> None:
    run, _ = active
    path = RunFiles(run.config.run_directory).services
    before = path.read_text()
    content = json.loads(before)
    path.write_text(json.dumps({**content, "reward": [content["reward"], content["reference"]]}))
    try:
        listed = [item for item in gateway.client.get("/runs/live/services").json() if item["role"] == "reward"]
    finally:
        path.write_text(before)
    assert [(item["address"], item["health"]) for item in listed] == [
        (content["reward"], "serving"),
        (content["reference"], "not_serving"),
    ]
    assert "a process of another role listens there" in listed[1]["detail"]


def test_services_report_identity_and_load(gateway: Gateway) -> None:
    def actor() -> dict[str, Any]:
        services = gateway.client.get("/runs/live/services").json()
        return next(item for item in services if item["role"] == "actor")

    # Two polls in a row that the actor answers in time, and whose health it knows.
    result = eventually(actor, lambda info: info["load"] is not None and info["health"] == "serving")
    assert (result["device"], result["dtype"], result["detail"]) == ("cpu", "float32", "")
    assert result["parameters"] > 0
    assert result["policy_version"] >= 1
    assert result["step"] >= 1
    assert result["busy_seconds"]["generate"] > 0
    assert 0 <= result["load"] <= 1


def test_the_buffer_shows_stored_experience(active: tuple[ActiveRun, Fleet], gateway: Gateway) -> None:
    run, _ = active
    eventually(lambda: run.board.current().phase, lambda phase: phase == "paused")
    url = run.config.buffer.url
    assert url is not None
    stream = RolloutStream(connect(url), url, "live")
    # A paused run may have trajectories of the next step in the stream.
    result = eventually(
        lambda: gateway.client.get("/runs/live/buffer").json(), lambda result: result["rollouts"] == stream.depth()
    )
    assert result["reachable"]
    assert result["memory_bytes"] > 0
    # The experience of each committed step is kept until a checkpoint covers it.
    assert result["experience_steps"] == list(range(1, run.board.current().step + 1))


def test_the_end_of_a_run_is_reported(make: MakeConfig, tmp_path: Path) -> None:
    with serving(tmp_path) as gateway, start_live_run(make, tmp_path, "short", steps=2) as (active, _):
        with gateway.stream("short") as stream:
            next(iter(stream))
            active.finish()
            RunFiles(active.config.run_directory).services.unlink()
            last = stream.until("progress", state="finished", step=2)[-1]
            assert last.data["error"] == ""
        result = gateway.client.get("/runs/short").json()
        assert (result["live"], result["state"], result["progress"]) == (False, "finished", None)
        assert gateway.client.get("/runs/short/services").json() == []


def test_a_hanging_orchestrator_delays_one_caller_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quartet.gateway.monitors.run_progress.TIMEOUT_SECONDS", 1.0)
    files, orchestrator = create_run(tmp_path, steps=1), HangingOrchestrator()
    server = Server([orchestrator], "127.0.0.1:0")
    files.write_services({Role.ORCHESTRATOR: (server.address,)})
    monitor = RunMonitor(RunCatalog(tmp_path))
    try:
        assert monitor.progress("some") is not None
        monkeypatch.setattr("quartet.gateway.monitors.run_progress.MAX_AGE_SECONDS", 0.0)
        orchestrator.num_requests = 0
        orchestrator.proceed.clear()
        with ThreadPoolExecutor(6) as callers:
            first = callers.submit(monitor.progress, "some")
            assert orchestrator.is_waiting.wait(TIMEOUT)
            # Callers during the wait get the last known progress.
            result = list(callers.map(lambda _: monitor.progress("some"), range(5)))
            assert {progress.state for progress in result if progress is not None} == {"training"}
            assert first.result() is not None
        # A later caller uses the new progress without another request.
        assert monitor.progress("some").state == "recovering"  # type: ignore[union-attr]
        assert orchestrator.num_requests == 1
    finally:
        orchestrator.proceed.set()
        monitor.close()
        server.stop(0.0)


def test_a_run_with_certificates_is_active_for_a_gateway_of_any_runs(tmp_path: Path) -> None:
    authority = Authority(timedelta(days=1))
    for process in (Role.ORCHESTRATOR, GATEWAY):
        authority.issue(tmp_path / "certificates" / process, [f"{process}.quartet"])
    security = SecurityConfig(certificates=tmp_path / "certificates")
    config = config_of(tmp_path / "runs", "some", security=security.model_dump())
    files = RunFiles(config.run_directory)
    files.write_config(config.to_yaml())
    server = Server([HangingOrchestrator()], "127.0.0.1:0", Credentials(Role.ORCHESTRATOR, security))
    files.write_services({Role.ORCHESTRATOR: (server.address,)})
    try:
        with serving(tmp_path / "runs") as gateway:
            run = gateway.client.get("/runs/some").json()
            assert (run["live"], run["state"]) == (True, "training")
            services = gateway.client.get("/runs/some/services").json()
            assert [(item["role"], item["health"]) for item in services] == [("orchestrator", "serving")]
        # Without a certificate of its own, the gateway says why it cannot tell.
        (tmp_path / "certificates" / GATEWAY).rename(tmp_path / "elsewhere")
        with closing(RunMonitor(RunCatalog(tmp_path / "runs"))) as monitor:
            assert monitor.progress("some") is None
            assert re.fullmatch(r"security\.certificates: .*tls\.crt cannot be read .*", monitor.latest("some").error)
    finally:
        server.stop(0.0)


class HangingOrchestrator(OrchestratorServicer):
    """An orchestrator that hangs until ``proceed`` is set."""

    def __init__(self) -> None:
        board = ProgressBoard("some", 4)
        board.update(state=RunState.TRAINING, step=1)
        super().__init__(board, None, None)  # type: ignore[arg-type]  # No command is sent.
        self.num_requests = 0
        self.proceed = threading.Event()
        self.proceed.set()
        self.is_waiting = threading.Event()

    def GetProgress(self, request: Any, context: Any) -> Any:
        self.num_requests += 1
        if not self.proceed.is_set():
            self.is_waiting.set()
        self.proceed.wait(TIMEOUT)
        return super().GetProgress(request, context)


def test_a_run_with_killed_processes_is_not_active(tmp_path: Path, unused_address: str) -> None:
    files = create_run(tmp_path, steps=2)
    files.services.write_text(json.dumps({"actor": unused_address, "orchestrator": unused_address}))
    with serving(tmp_path) as gateway:
        result = gateway.client.get("/runs/some").json()
        assert (result["live"], result["state"], result["step"]) == (False, "idle", 2)
        services = gateway.client.get("/runs/some/services").json()
        assert {item["health"] for item in services} == {"unreachable"}
        assert len(services) == 2
        # The config names no Redis.
        assert gateway.client.get("/runs/some/buffer").json()["reachable"] is False
        assert gateway.client.get("/runs/other/services").status_code == 404


@pytest.fixture
def unused_address() -> Iterator[str]:
    """An address at which connections are refused."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{sock.getsockname()[1]}"
