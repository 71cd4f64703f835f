"""Access rules over real connections, for every method and every kind of caller."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from quartet import __version__, v1
from quartet.config.deployment import SecurityConfig
from quartet.contract.status import Role, ServiceStatus
from quartet.errors import AccessRefused, ConfigError, ServiceUnavailable
from quartet.rpc.health import HealthListener, HealthServicer, problem
from quartet.rpc.security.allow_list import CALLERS, GATEWAY, OPERATOR, PROCESSES, PROMETHEUS, RANK_CALLERS, REDIS
from quartet.rpc.security.certificates import Authority
from quartet.rpc.security.credentials import Credentials
from quartet.rpc.server import Server
from quartet.rpc.service_channel import ServiceChannel
from quartet.v1 import status_pb2, status_pb2_grpc

MODULES = [import_module(f"quartet.v1.{path.stem}") for path in sorted(Path(next(iter(v1.__path__))).glob("*_pb2.py"))]
SERVICES = [service for module in MODULES for service in module.DESCRIPTOR.services_by_name.values()]
METHODS = {
    f"{service.full_name}/{method.name}": method.server_streaming for service in SERVICES for method in service.methods
}
HEALTH = {"grpc.health.v1.Health/Check": False, "grpc.health.v1.Health/Watch": True}
TOKEN = "a-token-of-these-services"
HANDSHAKE = 5.0


class AllServices:
    """A servicer with every method. A permitted call fails as unimplemented, a refused call with another status."""

    role = Role.ACTOR

    def register(self, server: grpc.Server) -> None:
        for service in SERVICES:
            if service.name != "StatusService":
                module = import_module(
                    f"quartet.v1.{service.file.name.rpartition('/')[2].removesuffix('.proto')}_pb2_grpc"
                )
                servicer = getattr(module, f"{service.name}Servicer")()
                getattr(module, f"add_{service.name}Servicer_to_server")(servicer, server)

    def status(self) -> ServiceStatus:
        return ServiceStatus(role=Role.ACTOR)

    def abandoned(self) -> tuple[str, float]:
        return "", 0.0

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of all processes, an expired one, one of another authority, and one of a process with two roles."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = Authority(timedelta(days=1))
    for process in PROCESSES:
        authority.issue(folder / process, [f"{process}.quartet"])
    authority.issue(folder / "both", ["critic.quartet", "reward.quartet"])
    authority.issue(folder / "expired", ["orchestrator.quartet", "operator.quartet"], timedelta(minutes=-1))
    authority.issue(folder / "unknown", ["orchestrator.example", "orchestrator"])
    Authority(timedelta(days=1)).issue(folder / "forged", ["orchestrator.quartet", "operator.quartet"])
    # Trusts our authority, but presents a certificate that another authority signed.
    shutil.copy(folder / "actor" / "ca.crt", folder / "forged" / "ca.crt")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    server = Server([AllServices()], "127.0.0.1:0", Credentials("actor", SecurityConfig(certificates=folder)))
    yield server
    server.stop(0)


def code(channel: grpc.Channel, method: str, metadata: Any = None) -> grpc.StatusCode:
    """Return the status code of an empty request to the method."""
    try:
        if {**METHODS, **HEALTH}[method]:
            next(iter(channel.unary_stream(f"/{method}")(b"", timeout=HANDSHAKE, metadata=metadata)))
        else:
            channel.unary_unary(f"/{method}")(b"", timeout=HANDSHAKE, metadata=metadata)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_every_method_has_a_permitted_caller_and_no_unknown_method_is_listed() -> None:
    assert CALLERS.keys() == {*METHODS, *HEALTH}
    assert all(callers and callers <= set(PROCESSES) for callers in CALLERS.values())


@pytest.mark.parametrize("process", [*PROCESSES, "unknown"])
def test_a_process_may_call_only_its_permitted_methods(server: Server, folder: Path, process: str) -> None:
    with Credentials(process, SecurityConfig(certificates=folder)).channel(Role.ACTOR, server.address) as channel:
        results = {method: code(channel, method) for method in CALLERS}
    permitted = {method for method, status in results.items() if status is not grpc.StatusCode.PERMISSION_DENIED}
    assert permitted == {method for method, callers in CALLERS.items() if process in callers}
    assert {results[method] for method in permitted} <= {grpc.StatusCode.OK, grpc.StatusCode.INTERNAL}


def test_only_the_actor_may_call_its_ranks_and_only_to_generate(folder: Path) -> None:
    credentials = Credentials("actor", SecurityConfig(certificates=folder))
    rank = Server([AllServices()], "127.0.0.1:0", credentials, allowed=RANK_CALLERS)
    permitted = set()
    for process in PROCESSES:
        with Credentials(process, SecurityConfig(certificates=folder)).channel(Role.ACTOR, rank.address) as channel:
            results = {method: code(channel, method) for method in CALLERS}
        permitted |= {
            (process, method) for method, status in results.items() if status is not grpc.StatusCode.PERMISSION_DENIED
        }
    rank.stop(0)
    assert permitted == {("actor", "quartet.v1.GenerationService/Generate")}


def test_services_call_others_only_for_scores_episodes_and_weights() -> None:
    score, weights = "quartet.v1.RewardService/Score", "quartet.v1.WeightService/GetWeights"
    names = ("Reset", "Step", "RestoreSession", "CloseSession", "RunAgent")
    episodes = {f"quartet.v1.EnvironmentService/{name}" for name in names}
    silent = {Role.REFERENCE, Role.CRITIC, Role.ENVIRONMENT, PROMETHEUS, REDIS}
    assert not any(silent & callers for callers in CALLERS.values())
    assert CALLERS[score] == {Role.ORCHESTRATOR, Role.REWARD}
    assert methods_of(Role.REWARD) == {score, "quartet.v1.StatusService/GetStatus"}
    assert methods_of(Role.ACTOR) == episodes
    assert methods_of(Role.GENERATOR) == episodes | {weights}
    assert {method for method, callers in CALLERS.items() if callers == {Role.ORCHESTRATOR}} == {
        method
        for method in METHODS.keys() - {score} - episodes
        if not method.startswith(("quartet.v1.Status", "quartet.v1.Orchestrator", "quartet.v1.Weight"))
    }
    assert CALLERS[weights] == {Role.GENERATOR}
    assert CALLERS["quartet.v1.OrchestratorService/Stop"] == {GATEWAY, OPERATOR}


def methods_of(role: Role) -> set[str]:
    return {method for method, callers in CALLERS.items() if role in callers}


@pytest.mark.parametrize("caller", ["without a certificate", "in plaintext", "expired", "forged"])
def test_callers_without_a_valid_certificate_cannot_call_any_method(server: Server, folder: Path, caller: str) -> None:
    options = [("grpc.ssl_target_name_override", "actor.quartet"), ("grpc.enable_http_proxy", 0)]
    if caller == "in plaintext":
        channel = grpc.insecure_channel(server.address, options)
    elif caller == "without a certificate":
        trusted = grpc.ssl_channel_credentials((folder / "actor" / "ca.crt").read_bytes())
        channel = grpc.secure_channel(server.address, trusted, options)
    else:
        presented = grpc.ssl_channel_credentials(
            *((folder / caller / name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt"))
        )
        channel = grpc.secure_channel(server.address, presented, options)
    with channel:
        assert {code(channel, method) for method in CALLERS} == {grpc.StatusCode.UNAVAILABLE}


def test_a_caller_refuses_a_process_of_another_role(server: Server, folder: Path) -> None:
    channel = ServiceChannel(
        Role.CRITIC, server.address, Credentials(Role.ORCHESTRATOR, SecurityConfig(certificates=folder))
    )
    with pytest.raises(ServiceUnavailable, match=r"critic at .*(actor\.quartet|Hostname)"):
        channel.status(HANDSHAKE)
    channel.close()


def test_a_process_with_two_roles_accepts_calls_for_both(folder: Path) -> None:
    server = Server([AllServices()], "127.0.0.1:0", Credentials("both", SecurityConfig(certificates=folder)))
    try:
        for role in (Role.CRITIC, Role.REWARD):
            with Credentials(GATEWAY, SecurityConfig(certificates=folder)).channel(role, server.address) as channel:
                assert code(channel, "quartet.v1.StatusService/GetStatus") is grpc.StatusCode.OK
    finally:
        server.stop(0)


@pytest.fixture(params=[False, True], ids=["plaintext", "TLS"])
def guarded(folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Server, SecurityConfig]]:
    """A server that requires a token, with and without TLS."""
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    security = SecurityConfig(token_file=file, certificates=folder if request.param else None)
    server = Server([AllServices()], "127.0.0.1:0", Credentials("actor", security))
    yield server, security
    server.stop(0)


@pytest.mark.parametrize(
    "wrong", [None, "", "Bearer ", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", TOKEN, f"bearer {TOKEN}"]
)
def test_without_the_token_every_method_is_refused(guarded: tuple[Server, SecurityConfig], wrong: str | None) -> None:
    server, security = guarded
    no_token = Credentials(Role.ORCHESTRATOR, security.model_copy(update={"token_file": None}))
    metadata = None if wrong is None else [("authorization", wrong)]
    with no_token.channel(Role.ACTOR, server.address) as channel, capture_logs() as logs:
        assert {code(channel, method, metadata) for method in CALLERS} == {grpc.StatusCode.UNAUTHENTICATED}
    assert len(logs) == len(CALLERS)
    assert TOKEN not in str(logs)


def test_with_the_token_calls_streams_and_health_checks_succeed(guarded: tuple[Server, SecurityConfig]) -> None:
    server, security = guarded
    credentials = Credentials(Role.ORCHESTRATOR, security)
    channel = ServiceChannel(Role.ACTOR, server.address, credentials)
    assert channel.status().version == __version__
    status = status_pb2_grpc.StatusServiceStub(channel.grpc_channel)
    pending = channel.start(
        status.GetStatus, status_pb2.GetStatusRequest(), 5, "GetStatus", lambda response: response.version
    )
    assert pending.result() == __version__
    health = health_pb2_grpc.HealthStub(channel.grpc_channel)
    updates = health.Watch(health_pb2.HealthCheckRequest(), timeout=5, metadata=credentials.metadata)
    assert next(iter(updates)).status == health_pb2.HealthCheckResponse.SERVING
    assert channel.responds(5)
    channel.close()


def test_a_refusal_names_the_setting_to_check(guarded: tuple[Server, SecurityConfig]) -> None:
    server, security = guarded
    channel = ServiceChannel(
        Role.ACTOR, server.address, Credentials(OPERATOR, security.model_copy(update={"token_file": None}))
    )
    with pytest.raises(AccessRefused, match=r"GetStatus: refused \(the token .*missing.*check security\.token_file"):
        channel.status()
    channel.close()


def test_the_health_port_serves_only_health_checks(folder: Path) -> None:
    credentials = Credentials("actor", SecurityConfig(certificates=folder))
    server = Server([AllServices()], "127.0.0.1:0", credentials, health_listen="127.0.0.1:0")
    assert server.health_address is not None
    try:
        assert not problem(server.health_address)
        with grpc.insecure_channel(server.health_address) as channel:
            statuses = {method: code(channel, method) for method in CALLERS}
        assert statuses.pop("grpc.health.v1.Health/Check") is grpc.StatusCode.OK
        assert set(statuses.values()) == {grpc.StatusCode.UNIMPLEMENTED}
        command = [sys.executable, "-m", "quartet.rpc.health", server.health_address]
        assert subprocess.run(command, timeout=30, check=False).returncode == 0
    finally:
        server.stop(0)
    gone = subprocess.run(command, timeout=30, check=False, capture_output=True, text=True)
    assert gone.returncode == 1
    assert gone.stderr.startswith(f"error: health {server.health_address}: no response: UNAVAILABLE: ")


def test_a_process_that_does_not_serve_is_named_with_a_cause() -> None:
    servicer = HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    listener = HealthListener(servicer, "127.0.0.1:0")
    try:
        assert problem(listener.address) == "reports NOT_SERVING: it loads its model or ends; see its log"
    finally:
        listener.stop()


@pytest.mark.parametrize("missing", ["tls.crt", "tls.key", "ca.crt"])
def test_missing_certificate_files_are_named(folder: Path, tmp_path: Path, missing: str) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "critic" / missing).unlink()
    with pytest.raises(ConfigError, match=rf"security\.certificates: .*critic.{missing} cannot be read"):
        Credentials("critic", SecurityConfig(certificates=tmp_path / "copy"))


@pytest.mark.parametrize("token", ["", "short", "with spaces in it, so none", "x" * 5000])
def test_a_weak_token_is_refused_and_not_quoted(tmp_path: Path, token: str) -> None:
    (tmp_path / "token").write_text(token)
    with pytest.raises(ConfigError, match=r"^security\.token_file .*expected") as error:
        Credentials("critic", SecurityConfig(token_file=tmp_path / "token"))
    assert not token or token not in str(error.value)


def test_with_certificates_a_process_listens_beyond_loopback(folder: Path) -> None:
    server = Server([AllServices()], "0.0.0.0:0", Credentials("actor", SecurityConfig(certificates=folder)))
    try:
        port = server.address.rpartition(":")[2]
        caller = Credentials(GATEWAY, SecurityConfig(certificates=folder))
        with caller.channel(Role.ACTOR, f"127.0.0.1:{port}") as channel:
            assert code(channel, "quartet.v1.StatusService/GetStatus") is grpc.StatusCode.OK
    finally:
        server.stop(0)


def test_invalid_certificates_are_refused_before_the_server_listens(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "actor", tmp_path / "actor")
    security = SecurityConfig(certificates=tmp_path)
    for name, content in (
        ("tls.key", (folder / "critic" / "tls.key").read_bytes()),
        ("tls.crt", b"-----BEGIN CERTIFICATE-----\nbm9uZQ==\n-----END CERTIFICATE-----\n"),
        ("ca.crt", b"-----BEGIN CERTIFICATE-----\nbm9uZQ==\n-----END CERTIFICATE-----\n"),
    ):
        before = (tmp_path / "actor" / name).read_bytes()
        (tmp_path / "actor" / name).write_bytes(content)
        with pytest.raises(ConfigError, match=r"^security\.certificates: .*cannot be used \(.*creates a new folder$"):
            Credentials("actor", security)
        (tmp_path / "actor" / name).write_bytes(before)
    Credentials("actor", security)
    with pytest.raises(ConfigError, match=r"expired.tls\.crt has expired \(20"):
        Credentials("expired", SecurityConfig(certificates=folder))


def test_waiting_ends_at_once_if_the_service_refuses_access(guarded: tuple[Server, SecurityConfig]) -> None:
    server, security = guarded
    channel = ServiceChannel(
        Role.ACTOR, server.address, Credentials(OPERATOR, security.model_copy(update={"token_file": None}))
    )
    with pytest.raises(AccessRefused):
        channel.wait_until_ready(600, known=True)
    channel.close()


def test_incomplete_health_requests_do_not_block_probes(folder: Path) -> None:
    credentials = Credentials("actor", SecurityConfig(certificates=folder))
    server = Server([AllServices()], "127.0.0.1:0", credentials, health_listen="127.0.0.1:0")
    assert server.health_address is not None
    never = threading.Event()

    def unfinished() -> Iterator[bytes]:
        never.wait(60)
        yield b""

    try:
        with grpc.insecure_channel(server.health_address) as channel:
            check = channel.stream_unary("/grpc.health.v1.Health/Check")
            pending = [check.future(unfinished(), timeout=60) for _ in range(8)]
            assert not problem(server.health_address)
            for call in pending:
                call.cancel()
    finally:
        never.set()
        server.stop(0)
