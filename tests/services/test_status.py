"""Status and health of the services: identity, work done, and fast responses while the models compute."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import structlog
import transformers
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quartet import __version__
from quartet.buffer.connection import connect
from quartet.buffer.rollout_stream import RolloutStream
from quartet.config.root import Config
from quartet.contract.generation import SamplingParameters
from quartet.contract.status import MODEL_ROLES, Role, ServiceStatus
from quartet.contract.trajectory import Prompt
from quartet.errors import ConfigError, MismatchError, ServiceFailed, ServiceUnavailable
from quartet.rpc import service_channel
from quartet.v1 import status_pb2, status_pb2_grpc
from tests.services.model_services import TIMEOUTS, Services, start_generation
from tests.unit.models import tiny

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
BATCH = tiny.batch([3, 2], [4, 7])
CALLS: dict[Role, tuple[str, Callable[[Any], Any]]] = {
    Role.ACTOR: ("log_probs", lambda client: client.log_probs(BATCH, 1.0)),
    Role.CRITIC: ("values", lambda client: client.values(BATCH).result()),
    Role.REWARD: ("score", lambda client: client.score(BATCH).result()),
    Role.REFERENCE: ("log_probs", lambda client: client.log_probs(BATCH, 1.0).result()),
}


@pytest.mark.parametrize("role", MODEL_ROLES)
def test_a_service_reports_its_model(role: Role, clients: dict[Role, Any], checkpoints: dict[str, Path]) -> None:
    status: ServiceStatus = clients[role].wait_until_ready()
    directory = checkpoints["reward" if role in (Role.REWARD, Role.CRITIC) else "llama"]
    kind = transformers.AutoModelForCausalLM
    if directory == checkpoints["reward"]:
        kind = transformers.AutoModelForSequenceClassification
    weights = kind.from_pretrained(directory).parameters()
    assert (status.role, status.model) == (role, str(directory))
    assert (status.device, status.dtype, status.threads) == ("cpu", "float32", 1)
    assert status.parameters == sum(weight.numel() for weight in weights) > 10_000
    assert status.vocabulary_size == tiny.VOCABULARY
    assert (status.policy_version, status.step, status.run) == (0, 0, "")


def test_equal_tokenizers_have_equal_fingerprints(
    clients: dict[Role, Any], services: Services, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    fingerprints = {client.wait_until_ready().tokenizer_fingerprint for client in clients.values()}
    assert len(fingerprints) == 1
    assert len(next(iter(fingerprints))) == 64
    tiny.causal("llama").save_pretrained(tmp_path)
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(tmp_path)
    other = services.start(Role.REFERENCE, make_config(reference={"model": str(tmp_path)}))
    assert other.wait_until_ready().tokenizer_fingerprint not in fingerprints


@pytest.mark.parametrize("role", MODEL_ROLES)
def test_busy_seconds_count_each_kind_of_request(
    role: Role, services: Services, make_config: Callable[..., Config]
) -> None:
    client = services.start(role, make_config())
    assert client.wait_until_ready().busy_seconds == {}
    kind, call = CALLS[role]
    totals = [0.0]
    for _ in range(3):
        start = time.perf_counter()
        call(client)
        duration = time.perf_counter() - start
        busy = client.wait_until_ready().busy_seconds
        assert set(busy) == {kind}
        assert 0 < busy[kind] - totals[-1] <= duration
        totals.append(busy[kind])


def health(channel: grpc.Channel, service: str, timeout: float = 5.0) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout).status)


@pytest.mark.parametrize("role", MODEL_ROLES)
def test_health_is_serving_for_the_process_and_its_service_and_unknown_for_others(
    role: Role, clients: dict[Role, Any]
) -> None:
    channel = clients[role].channel.grpc_channel
    assert health(channel, "") == SERVING
    assert health(channel, f"quartet.v1.{role.capitalize()}Service") == SERVING
    with pytest.raises(grpc.RpcError) as error:
        health(channel, "quartet.v1.OtherService")
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


def test_all_roles_of_one_process_respond(services: Services, make_config: Callable[..., Config]) -> None:
    config = make_config()
    roles = (Role.REWARD, Role.REFERENCE)
    server = services.serve(*(services.build(role, config) for role in roles))
    for role in roles:
        client = services.client(role, server)
        assert client.wait_until_ready().role is role
        CALLS[role][1](client)
        assert health(client.channel.grpc_channel, f"quartet.v1.{role.capitalize()}Service") == SERVING
    stub = status_pb2_grpc.StatusServiceStub(client.channel.grpc_channel)
    response = stub.GetStatus(status_pb2.GetStatusRequest(), timeout=5)
    assert response.version == __version__
    assert [status.role for status in response.roles] == [status_pb2.ROLE_REWARD, status_pb2.ROLE_REFERENCE]


def test_another_service_at_an_address_is_a_mismatch_error(clients: dict[Role, Any], services: Services) -> None:
    address = clients[Role.REWARD].channel.address
    client = services.client(Role.CRITIC, type("At", (), {"address": address})())
    expected = rf"services\.critic\.address {address}: expected the critic, got the reward service"
    with pytest.raises(MismatchError, match=expected) as error:
        client.wait_until_ready()
    assert isinstance(error.value, ConfigError)


def start_long_generation(actor: Any, stream: RolloutStream, timeout: float) -> Any:
    """Start a generation of 4000 trajectories and wait until its first ones are in the stream."""
    actor.timeouts = TIMEOUTS.model_copy(update={"generate_seconds": timeout})
    prompts = [Prompt(index, np.array([5, 6, 7], np.int32)) for index in range(8)]
    sampling = SamplingParameters(max_response_tokens=40, ignore_eos=True)
    generation = start_generation(actor, "long", prompts, sampling, samples=500)
    while stream.depth() == 0:
        assert not generation.done()
    return generation


def wait_until_generation_ends(actor: Any) -> float:
    """Return the seconds until the compute thread ends the generation. From then on the busy time stands still."""
    start = time.monotonic()
    while actor.wait_until_ready().busy_seconds != actor.wait_until_ready().busy_seconds:
        assert time.monotonic() - start < 20, "the generation continues although its call was cancelled"
    return time.monotonic() - start


@pytest.fixture
def long_stream(redis_url: str) -> RolloutStream:
    stream = RolloutStream(connect(redis_url), redis_url, "long")
    stream.reset()
    return stream


def test_health_and_status_respond_during_generation_and_a_cancelled_generation_stops_early(
    services: Services, make_config: Callable[..., Config], long_stream: RolloutStream
) -> None:
    actor = services.start(Role.ACTOR, make_config())
    actor.wait_until_ready()
    generation = start_long_generation(actor, long_stream, timeout=300)
    slowest = 0.0
    for _ in range(10):
        start = time.perf_counter()
        assert health(actor.channel.grpc_channel, "quartet.v1.ActorService") == SERVING
        assert actor.wait_until_ready().role is Role.ACTOR
        slowest = max(slowest, time.perf_counter() - start)
    assert not generation.done()
    assert slowest < 1.0
    generation.cancel()
    wait_until_generation_ends(actor)
    assert 0 < long_stream.depth() < 3000
    assert len(actor.log_probs(BATCH, 1.0)) == 11


def test_a_generation_past_its_deadline_stops_early_and_the_service_continues(
    services: Services, make_config: Callable[..., Config], long_stream: RolloutStream
) -> None:
    actor = services.start(Role.ACTOR, make_config())
    actor.wait_until_ready()
    generation = start_long_generation(actor, long_stream, timeout=2.0)
    with pytest.raises(ServiceFailed, match=r"actor at .*: Generate: no response within 2 s"):
        generation.result()
    wait_until_generation_ends(actor)
    assert 0 < long_stream.depth() < 3000
    assert len(actor.log_probs(BATCH, 1.0)) == 11


def test_a_wait_for_a_service_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_channel, "LOG_AFTER", 0.0)
    monkeypatch.setattr(service_channel, "FOREIGN_AFTER", 0.0)
    channel = service_channel.ServiceChannel(Role.CRITIC, "127.0.0.1:1")
    with (
        structlog.testing.capture_logs() as logs,
        pytest.raises(ServiceUnavailable, match="no Quartet service responded"),
    ):
        channel.wait_until_ready(0.3)
    channel.close()
    waiting = [line for line in logs if line["event"] == "waiting for a service"]
    assert [(line["service"], line["address"]) for line in waiting] == [(Role.CRITIC, "127.0.0.1:1")], "logged once"
