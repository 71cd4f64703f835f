"""Reward sources over gRPC: ensembles of a model and functions, time-outs, crashes, and cleanup."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from quartet.codec.messages import to_message
from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.contract.trajectory import Outcome, TokenBatch
from quartet.errors import ConfigError, InvalidRequest, QuartetError, ServiceFailed
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.server import Server
from quartet.services.roles import build_model_role
from quartet.v1 import reward_pb2, reward_pb2_grpc, trajectory_pb2
from tests.rewards.processes import children
from tests.services.model_services import TIMEOUTS, Services
from tests.unit.models import tiny
from tests.waiting import wait_until

BATCH = tiny.batch([3, 2, 5], [4, 7, 1], seed=9)
SCORERS = """
import os, time
from pathlib import Path

def bonus(prompt, response, fields):
    print("scored")
    return len(prompt.split()) + fields.get("bonus", 0)

def count(prompts, responses, fields):
    return [len(prompts)] * len(prompts)

def moody(prompt, response, fields):
    mood = fields.get("mood")
    if mood == "slow":
        time.sleep(60)
    if mood == "gone":
        os._exit(3)
    if mood == "angry":
        raise RuntimeError("no mood for this")
    return mood or 1.0

def waits(prompt, response, fields):
    Path("waiting").touch()
    while not Path("go").exists():
        time.sleep(0.01)
    return 1.0

def process(prompt, response, fields):
    return os.getpid()
"""


@pytest.fixture(autouse=True)
def _functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the functions to a new working directory, from which they are imported."""
    (tmp_path / "scorers.py").write_text(SCORERS)
    monkeypatch.chdir(tmp_path)


def function(name: str, **settings: Any) -> dict[str, Any]:
    return {"source": "function", "function": f"scorers:{name}", **settings}


@pytest.fixture
def start(services: Services, make_config: Callable[..., Config]) -> Callable[..., Any]:
    """Start a reward service with these settings; return its client."""
    return lambda **reward: services.start(Role.REWARD, make_config(reward=reward))


@pytest.fixture
def ensemble(checkpoints: dict[str, Path]) -> dict[str, Any]:
    parts = [
        {"name": "model", "weight": 0.5, "model": str(checkpoints["reward"])},
        {"name": "bonus", "weight": -2.0, **function("bonus")},
        {"name": "count", **function("count", batched=True)},
    ]
    return {"source": "ensemble", "parts": parts}


def test_an_ensemble_returns_the_weighted_sum_and_its_parts(
    start: Callable[..., Any], ensemble: dict[str, Any], clients: dict[Role, Any]
) -> None:
    result = start(**ensemble).score(BATCH, ['{"bonus": 10}', "{}", '{"bonus": -1}']).result()
    model = clients[Role.REWARD].score(BATCH).result().total
    bonus, count = np.array([13.0, 2.0, 4.0]), np.array([3.0, 3.0, 3.0])
    assert result.parts["model"].tolist() == model.tolist()
    assert result.parts["bonus"].tolist() == bonus.tolist()
    assert result.parts["count"].tolist() == count.tolist()
    np.testing.assert_allclose(result.total, 0.5 * np.float64(model) - 2 * bonus + count, atol=1e-5, rtol=0)


def test_a_single_source_returns_no_parts(start: Callable[..., Any], clients: dict[Role, Any]) -> None:
    result = start(**function("bonus")).score(BATCH).result()
    assert (result.total.tolist(), result.parts) == ([3.0, 2.0, 5.0], {})
    assert clients[Role.REWARD].score(BATCH, ["{}"] * 3).result().parts == {}


def test_the_status_describes_the_sources(
    start: Callable[..., Any], ensemble: dict[str, Any], clients: dict[Role, Any], checkpoints: dict[str, Path]
) -> None:
    model = clients[Role.REWARD].wait_until_ready()
    combined = start(**ensemble).wait_until_ready()
    assert combined.model == "0.5*model + -2*bonus + 1*count"
    for name in ("parameters", "vocabulary_size", "max_sequence_tokens", "tokenizer_fingerprint", "device", "dtype"):
        assert getattr(combined, name) == getattr(model, name), name
    single = start(**function("bonus")).wait_until_ready()
    assert (single.model, single.parameters, single.vocabulary_size) == ("scorers:bonus", 0, tiny.VOCABULARY)
    assert (single.max_sequence_tokens, single.tokenizer_fingerprint) == (0, model.tokenizer_fingerprint)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (["{}"], "fields: expected none, or one for each of the 3 sequences, got 1"),
        (["{}"] * 4, "got 4"),
        (["{}", "null", "{}"], "fields[1]: found NoneType, expected a JSON object"),
        (["{}", "{}", "{"], "fields[2]: not JSON"),
    ],
)
@pytest.mark.parametrize("kind", ["model", "function", "ensemble"])
def test_malformed_fields_are_refused_and_a_valid_request_after_them_succeeds(
    kind: str,
    fields: list[str],
    expected: str,
    start: Callable[..., Any],
    ensemble: dict[str, Any],
    clients: dict[Role, Any],
) -> None:
    client = clients[Role.REWARD]
    if kind != "model":
        client = start(**(ensemble if kind == "ensemble" else function("bonus")))
    stub = reward_pb2_grpc.RewardServiceStub(client.channel.grpc_channel)
    request = reward_pb2.ScoreRequest(batch=to_message(trajectory_pb2.TokenBatch, BATCH), fields=fields)
    with pytest.raises(grpc.RpcError) as refused:
        stub.Score(request, timeout=30)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert expected in refused.value.details()
    assert len(client.score(BATCH).result().total) == 3


def test_token_ids_outside_the_vocabulary_are_refused(start: Callable[..., Any], ensemble: dict[str, Any]) -> None:
    lengths = np.array([1], np.int32), np.array([1], np.int32)
    negative = TokenBatch(np.array([5, -1], np.int32), *lengths)
    with pytest.raises(InvalidRequest, match="found -1"):
        start(**function("bonus")).score(negative).result()
    outside = TokenBatch(np.array([5, tiny.VOCABULARY], np.int32), *lengths)
    with pytest.raises(InvalidRequest, match=r"0\.\.60"):
        start(**ensemble).score(outside).result()


@pytest.mark.parametrize(
    ("mood", "expected", "outcome"),
    [
        ('"slow"', ", sequence index 1: took longer than 1 s, and was ended", Outcome.TIMEOUT),
        ('"gone"', ", sequence index 1: its process ended with status 3", Outcome.SCORER_ERROR),
        ('"angry"', " raised RuntimeError at scorers.py:", Outcome.SCORER_ERROR),
        (
            '"good"',
            ", sequence index 1: returned a string of 4 characters, expected a finite number",
            Outcome.SCORER_ERROR,
        ),
        ("true", ", sequence index 1: returned True, expected a finite number", Outcome.SCORER_ERROR),
    ],
)
def test_the_failure_of_a_function_is_an_outcome_and_fails_no_other_response(
    mood: str, expected: str, outcome: Outcome, start: Callable[..., Any]
) -> None:
    client = start(**function("moody", timeout_seconds=1.0))
    scores = client.score(BATCH, ["{}", f'{{"mood": {mood}}}', "{}"]).result()
    assert scores.outcomes == (Outcome.OK, outcome, Outcome.OK)
    assert scores.details[1].startswith(f"reward.function scorers:moody{expected}")
    assert "\n" not in scores.details[1]
    assert np.isnan(scores.total).tolist() == [False, True, False]
    assert client.score(BATCH).result().total.tolist() == [1.0, 1.0, 1.0]


def test_a_function_that_cannot_be_imported_stops_the_start(
    services: Services, make_config: Callable[..., Config]
) -> None:
    before = children()
    with pytest.raises(ConfigError, match=r"reward.function nowhere:f: cannot be imported from .*ModuleNotFoundError"):
        services.build(Role.REWARD, make_config(reward={"source": "function", "function": "nowhere:f"}))
    assert children() == before


def test_a_slow_function_does_not_block_other_roles_of_the_process(
    services: Services, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    config, compute = make_config(reward=function("waits")), ComputeThread()
    roles = (Role.REWARD, Role.REFERENCE)
    server = services.serve(*(build_model_role(role, config, compute, threads=1) for role in roles))
    reward, reference = (services.client(role, server) for role in roles)
    scores = reward.score(BATCH)
    wait_until((tmp_path / "waiting").exists)
    assert len(reference.log_probs(BATCH, 1.0).result()) == 12
    assert not scores.done()
    (tmp_path / "go").touch()
    assert scores.result().total.tolist() == [1.0, 1.0, 1.0]


def test_scoring_stops_after_the_caller_has_gone(
    services: Services, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    server = services.serve(services.build(Role.REWARD, make_config(reward=function("waits"))))
    client = services.client(Role.REWARD, server, TIMEOUTS.model_copy(update={"score_seconds": 1.0}))
    scores = client.score(BATCH)
    wait_until((tmp_path / "waiting").exists)
    with pytest.raises(ServiceFailed, match="Score: no response within 1 s"):
        scores.result()
    (tmp_path / "waiting").unlink()
    (tmp_path / "go").touch()
    # Busy seconds stand still when the scoring has ended. It then made one call, and not one for each sequence.
    wait_until(lambda: client.wait_until_ready().busy_seconds == client.wait_until_ready().busy_seconds)
    assert not (tmp_path / "waiting").exists()


@pytest.mark.parametrize("scoring_active", [False, True])
def test_stopping_the_service_ends_the_processes_of_its_functions(
    scoring_active: bool,
    services: Services,
    make_config: Callable[..., Config],
    ensemble: dict[str, Any],
    tmp_path: Path,
) -> None:
    before, threads = children(), set(threading.enumerate())
    parts = [*ensemble["parts"], {"name": "waits", **function("waits")}]
    reward = build_model_role(Role.REWARD, make_config(reward={**ensemble, "parts": parts}), ComputeThread(), threads=1)
    server = Server([reward], "127.0.0.1:0")
    assert len(children() - before) == 3
    client = services.client(Role.REWARD, server)
    if scoring_active:
        scores = client.score(BATCH)
        wait_until((tmp_path / "waiting").exists)
    server.stop(0.1)
    wait_until(lambda: children() <= before)
    if scoring_active:
        with pytest.raises(QuartetError):
            scores.result()
    wait_until(
        lambda: not any(thread.name.startswith("function-output") for thread in {*threading.enumerate()} - threads)
    )
