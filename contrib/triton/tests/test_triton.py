"""The Triton engine with a real server that fails, returns invalid output, hangs, crashes, needs certificates, or is absent."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.trajectory import FinishReason, TokenBatch, Trajectory, TrajectoryId
from quartet.contract.update import Experience, OptimizationSettings, PolicyLossSettings, RolloutCorrection
from quartet.engines.engine import Policy
from quartet.errors import (
    ComputationFailed,
    MismatchError,
    QuartetError,
    ServiceFailed,
    ServiceUnavailable,
)
from quartet.models.training.optimizer import create_optimizer
from quartet.models.training.updates import update_policy
from quartet.rpc.security.certificates import Authority
from quartet.weight_transfer.tensors import WeightSet
from tests.engines.conftest import change_adapter, policy, score
from tests.engines.test_contract import greedy, requests, run, tokens
from tests.engines.triton_engines import engine_of
from tests.engines.triton_server import Model, TritonServer, free_port


@pytest.fixture
def own_server(checkpoint: Path, server: TritonServer, tmp_path: Path) -> Iterator[Callable[..., TritonServer]]:
    """Start a server that a test may stop. The fixture ``server`` skips the test without the wheel."""
    del server
    started = []

    def start(*models: Model, tls: Path | None = None) -> TritonServer:
        started.append(TritonServer(tmp_path / f"own-{len(started)}", checkpoint, models, tls))
        started[-1].folder.mkdir()
        started[-1].start()
        return started[-1]

    yield start
    for each in started:
        each.stop()


def with_fault(token: int) -> list[GenerationRequest]:
    """Return a valid request, and one whose first token causes a fault in the server."""
    return [*requests(1), GenerationRequest(TrajectoryId("run", 0, 99, 0), np.array([token, 3, 4], np.int32))]


@pytest.mark.parametrize(
    ("token", "error", "message"),
    [
        (59, ServiceFailed, "the model failed: out of memory"),
        (58, ComputationFailed, "response to run/0/99/0: 0 tokens"),
        (56, ComputationFailed, "ends after 1 of 10 tokens without a stop token"),
        (55, ComputationFailed, "log-probs that are not finite, too low"),
        (0, ComputationFailed, "response to run/0/99/0: more than 10 tokens"),
    ],
    ids=["error", "nothing", "cut", "nan", "endless"],
)
def test_an_invalid_response_of_the_server_is_an_error(
    server: TritonServer, subject: Policy, tmp_path: Path, token: int, error: type[QuartetError], message: str
) -> None:
    engine = engine_of(server, "current", subject, tmp_path)
    with pytest.raises(error, match=message):
        run(engine, with_fault(token), subject)
    assert len(run(engine, requests(4), subject)) == 4


def test_text_that_does_not_match_its_tokens_is_an_error(server: TritonServer, subject: Policy, tmp_path: Path) -> None:
    with pytest.raises(ComputationFailed, match="tokenized text does not decode to the same text"):
        run(engine_of(server, "garbled", subject, tmp_path), requests(2), subject)


def test_a_server_without_a_response_is_unavailable(server: TritonServer, subject: Policy, tmp_path: Path) -> None:
    engine = engine_of(server, "current", subject, tmp_path, timeout=0.5)
    with pytest.raises(ServiceUnavailable, match=r"no response for 0\.5 s; raise rollout\.triton\.timeout"):
        run(engine, with_fault(57), subject)


def test_a_model_that_crashes_is_an_error(
    own_server: Callable[..., TritonServer], subject: Policy, tmp_path: Path
) -> None:
    engine = engine_of(own_server(Model("current")), "current", subject, tmp_path, timeout=5.0)
    with pytest.raises((ServiceFailed, ServiceUnavailable)):
        run(engine, with_fault(60), subject)


def test_a_killed_server_is_unavailable_and_is_used_again_after_its_restart(
    own_server: Callable[..., TritonServer], subject: Policy, tmp_path: Path
) -> None:
    server = own_server(Model("current"))
    engine = engine_of(server, "current", subject, tmp_path)
    running = engine.generate(requests(32), SamplingParameters(40), 0, lambda: False)
    next(running)
    server.stop(signal.SIGKILL)
    with pytest.raises(ServiceUnavailable, match="start the server, or correct"):
        list(running)
    with pytest.raises(ServiceUnavailable, match=r"rollout\.triton\.url"):
        run(engine, requests(2), subject)
    server.start(server.port)
    # The server has lost the adapter. The first request of every generation sends it.
    result = run(engine, requests(4), subject, temperature=0.0)
    assert tokens(result) == [greedy(subject, request) for request in requests(4)]


def test_the_error_names_an_unreachable_server(subject: Policy, tmp_path: Path, checkpoint: Path) -> None:
    pytest.importorskip("tritonclient.grpc")
    unreachable = TritonServer(tmp_path, checkpoint, ())
    unreachable.port = free_port()
    with pytest.raises(ServiceUnavailable, match=rf"model current of Triton at 127\.0\.0\.1:{unreachable.port}: "):
        run(engine_of(unreachable, "current", subject, tmp_path), requests(1), subject)


@pytest.mark.parametrize(("model", "message"), [("absent", "unknown model"), ("seedless", "no random_seed")])
def test_a_model_with_other_inputs_is_a_mismatch(
    server: TritonServer, subject: Policy, tmp_path: Path, model: str, message: str
) -> None:
    with pytest.raises(MismatchError, match=message) as refused:
        run(engine_of(server, model, subject, tmp_path), requests(1), subject)
    assert "rollout.triton.model names the model" in str(refused.value)


def test_max_in_flight_does_not_change_the_tokens(server: TritonServer, subject: Policy, tmp_path: Path) -> None:
    few, many = (engine_of(server, "current", subject, tmp_path, max_in_flight=limit) for limit in (2, 32))
    assert tokens(run(few, requests(9), subject)) == tokens(run(many, requests(9), subject))


def test_the_mismatch_of_static_weights_is_reported_and_corrected(
    server: TritonServer, subject: Policy, tmp_path: Path
) -> None:
    engine = engine_of(server, "current", subject, tmp_path, weights="static")
    result = run(engine, requests(24), subject, temperature=1.0)
    assert subject.adapter is not None
    with subject.adapter.off():
        base = score(subject, TokenBatch.of(result), 1.0)
    assert np.allclose(np.concatenate([t.log_probs for t in result]), base, atol=1e-3)

    metrics = update_metrics(subject, result)
    assert metrics["rollout_mismatch_kl"] > 0.01
    assert 0.1 < metrics["importance_weight"] < 1.0


def test_with_sent_adapters_the_mismatch_is_only_rounding(
    server: TritonServer, subject: Policy, tmp_path: Path
) -> None:
    metrics = update_metrics(
        subject, run(engine_of(server, "current", subject, tmp_path), requests(24), subject, temperature=1.0)
    )
    assert metrics["rollout_mismatch_kl"] < 1e-6
    assert metrics["importance_weight"] == pytest.approx(1.0, abs=1e-4)


CORRECTION = RolloutCorrection("token", upper=2.0)


def update_metrics(subject: Policy, result: list[Trajectory]) -> dict[str, float]:
    """Return the metrics of an update without optimizer steps."""
    batch = TokenBatch.of(result)
    count = int(batch.response_lengths.sum())
    flat = {name: np.zeros(count, np.float32) for name in ("reference_log_probs", "values", "advantages", "returns")}
    experience = Experience(
        "run", 1, 0, tuple(str(t.id) for t in result), batch, np.zeros(len(result), np.float32),
        log_probs=np.concatenate([t.log_probs for t in result]), actor_mask=np.ones(count, np.float32), **flat,
    )  # fmt: skip
    optimizer = create_optimizer(subject.model, 1e-3, (0.9, 0.95), 1e-8, 0.0)
    settings = OptimizationSettings(num_epochs=0, num_mini_batches=1, learning_rate=1e-3, max_grad_norm=1.0, seed=0)
    return update_policy(
        subject.model, optimizer, experience, settings, PolicyLossSettings(rollout_correction=CORRECTION), 4096
    )


@pytest.mark.parametrize(
    ("model", "sampling", "message"),
    [
        ("silent", {}, r"reports no log-probs \(dialect tokens\); set rollout\.triton\.weights lora"),
        ("text", {}, r"reports no log-probs \(dialect llmapi\)"),
        ("vllm", {"temperature": 0.7}, r"at temperature 1 only, not at 0\.7; set rollout\.temperature 1"),
        ("current", {"top_k": 5}, r"that top_k and top_p truncate"),
        ("vllm", {"temperature": 1.0, "top_p": 0.5}, r"that top_k and top_p truncate"),
    ],
)
def test_static_weights_need_log_probs_of_the_sampled_distribution(
    server: TritonServer, subject: Policy, tmp_path: Path, model: str, sampling: dict[str, float], message: str
) -> None:
    engine = engine_of(server, model, subject, tmp_path, weights="static")
    with pytest.raises(MismatchError, match=message):
        run(engine, requests(1), subject, **sampling)
    # Greedy responses are for evaluations, which need none.
    assert len(run(engine, requests(2), subject, temperature=0.0)) == 2


def test_log_probs_of_a_truncated_distribution_come_from_the_trainer(
    server: TritonServer, subject: Policy, tmp_path: Path
) -> None:
    engine = engine_of(server, "current", subject, tmp_path)
    for top_k, reported in ((0, True), (5, False)):
        responses = list(engine.generate(requests(2), SamplingParameters(10, temperature=0.8, top_k=top_k), 0))
        assert all((response.log_probs is not None) is reported for response in responses)


@pytest.mark.parametrize(
    ("model", "weights", "expected"),
    [
        ("current", "lora", ("triton (tokens, lora)", True, "whole", "adapter")),
        ("silent", "lora", ("triton (tokens, lora)", True, "none", "adapter")),
        ("text", "lora", ("triton (llmapi, lora)", False, "none", "adapter")),
        ("vllm", "static", ("triton (vllm, static)", True, "none", "static")),
    ],
)
def test_the_engine_declares_what_the_served_model_guarantees(
    server: TritonServer, subject: Policy, tmp_path: Path, model: str, weights: str, expected: tuple[Any, ...]
) -> None:
    engine = engine_of(server, model, subject, tmp_path, weights=weights)
    before = engine.properties  # Without a call, so that a status does not depend on the server.
    assert (before.name, before.seeded, before.log_probs, before.weights) == ("triton", False, "none", expected[3])
    run(engine, requests(1), subject, temperature=0.0)
    declared = engine.properties
    assert (declared.name, declared.seeded, declared.log_probs, declared.weights) == expected
    assert (declared.batch_invariant, declared.digest) == (False, "none")


@pytest.fixture
def served_policy(subject: Policy) -> Policy:
    """Return the policy with the weights of the server: its adapter changes nothing."""
    with torch.no_grad():
        for name, parameter in subject.model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    return subject


def test_vllms_backend_returns_the_exact_tokens_and_log_probs(
    server: TritonServer, served_policy: Policy, tmp_path: Path
) -> None:
    engine, batch = engine_of(server, "vllm", served_policy, tmp_path, weights="static"), requests(12)
    result = run(engine, batch, served_policy, temperature=0.0)
    assert tokens(result) == [greedy(served_policy, request) for request in batch]
    first = run(engine, batch, served_policy, temperature=1.0)
    expected = score(served_policy, TokenBatch.of(first), 1.0)
    assert np.allclose(np.concatenate([t.log_probs for t in first]), expected, atol=1e-3)
    assert tokens(run(engine, batch[3:6], served_policy, temperature=1.0)) == tokens(first)[3:6]
    assert tokens(run(engine, batch, served_policy, temperature=1.0, seed=1)) != tokens(first)
    assert {t.finish_reason for t in run(engine, requests(30), served_policy, temperature=1.0)} == set(FinishReason)
    assert {len(t.response_ids) for t in run(engine, batch, served_policy, temperature=1.0, ignore_eos=True)} == {10}


def test_vllms_backend_stops_cancelled_requests(server: TritonServer, subject: Policy, tmp_path: Path) -> None:
    engine = engine_of(server, "vllm", subject, tmp_path, weights="static")
    before = server.count("tokens")
    running = engine.generate(requests(32), SamplingParameters(50, temperature=1.0, ignore_eos=True), 0, lambda: False)
    next(running)
    getattr(running, "close")()  # noqa: B009
    run(engine, requests(1), subject, temperature=1.0, max_response_tokens=1)
    assert server.count("tokens") - before < 32 * 50 / 4


@pytest.mark.parametrize(
    ("token", "error", "message"),
    [
        (59, ServiceFailed, "the model failed: out of memory"),
        (58, ComputationFailed, "response to run/0/99/0: 0 tokens"),
        (56, ComputationFailed, "finish_reason 'abort'; expected stop or length"),
        (55, ComputationFailed, "log-probs that are not finite, too low"),
        (60, ComputationFailed, "one token id each; expected those of logprobs 0"),
        (0, ComputationFailed, "tokenized the prompt to 4 tokens instead of 3"),
    ],
    ids=["error", "nothing", "cut", "nan", "several", "miscount"],
)
def test_an_invalid_response_of_vllms_backend_is_an_error(
    server: TritonServer, subject: Policy, tmp_path: Path, token: int, error: type[QuartetError], message: str
) -> None:
    engine = engine_of(server, "vllm", subject, tmp_path, weights="static")
    with pytest.raises(error, match=message):
        run(engine, with_fault(token), subject, temperature=1.0)
    assert len(run(engine, requests(4), subject, temperature=1.0)) == 4


def test_vllms_backend_takes_no_adapters(server: TritonServer, subject: Policy, tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=r"from a file when it starts.*set rollout\.engine vllm"):
        run(engine_of(server, "vllm", subject, tmp_path), requests(1), subject)


def test_an_adapter_is_sent_once_per_generation(server: TritonServer, subject: Policy, tmp_path: Path) -> None:
    engine = engine_of(server, "current", subject, tmp_path)
    before = server.count("adapters")
    for generation in (1, 2):
        run(engine, requests(12), subject)
        assert server.count("adapters") == before + generation


def test_two_policies_on_one_server_do_not_mix(server: TritonServer, tmp_path: Path) -> None:
    one, other = policy(3), policy(4)
    batch = requests(6)
    for subject in (one, other, one):
        engine = engine_of(server, "current", subject, tmp_path)
        assert tokens(run(engine, batch, subject, temperature=0.0)) == [greedy(subject, request) for request in batch]


def test_only_the_newest_adapter_is_on_disk(server: TritonServer, subject: Policy, tmp_path: Path) -> None:
    engine = engine_of(server, "text", subject, tmp_path)
    run(engine, requests(2), subject)
    change_adapter(subject.model, 5)
    engine.load_weights(WeightSet(1, b"", {}), [])
    run(engine, requests(2), subject)
    assert len(list((tmp_path / "engine").iterdir())) == 1
    engine.close()
    assert not (tmp_path / "engine").exists()


def test_server_and_client_authenticate_with_certificates(
    own_server: Callable[..., TritonServer], subject: Policy, tmp_path: Path
) -> None:
    folder = tmp_path / "certificates"
    authority = Authority(timedelta(days=1))
    authority.issue(folder / "server", ["127.0.0.1"])
    authority.issue(folder / "actor", ["actor.quartet"])
    server = own_server(Model("current"), tls=folder / "server")
    files = {
        name: (folder / "actor" / file).read_bytes()
        for name, file in (("authority", "ca.crt"), ("certificate", "tls.crt"), ("key", "tls.key"))
    }
    batch = requests(2)
    result = run(
        engine_of(server, "current", subject, tmp_path, encrypted=True, **files), batch, subject, temperature=0.0
    )
    assert tokens(result) == [greedy(subject, request) for request in batch]
    for incomplete in ({"encrypted": True, "authority": files["authority"]}, {"encrypted": False}):
        with pytest.raises(ServiceUnavailable):
            run(engine_of(server, "current", subject, tmp_path, timeout=3.0, **incomplete), batch, subject)


def test_generations_leave_no_threads(server: TritonServer, subject: Policy, tmp_path: Path) -> None:
    engine = engine_of(server, "current", subject, tmp_path)

    def cut_short() -> None:
        running = engine.generate(requests(8), SamplingParameters(10), 0, lambda: False)
        next(running)
        getattr(running, "close")()  # noqa: B009

    for generation in (lambda: run(engine, requests(4), subject), cut_short):
        generation()
        before = threading.active_count()
        for _ in range(5):
            generation()
        assert threading.active_count() <= before + 1
