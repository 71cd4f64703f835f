"""Scorers over HTTP: requests in each dialect, batches, concurrency, keys, TLS, limits, retries and the circuit breaker."""

from __future__ import annotations

import datetime
import ipaddress
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from structlog.testing import capture_logs

from quartet.config.rewards import HttpRewardConfig
from quartet.contract.trajectory import Outcome
from quartet.errors import AccessRefused, Cancelled, ConfigError, MismatchError, ServiceFailed
from quartet.rewards.dialects import DIALECTS as READ
from tests.ports import free_port
from tests.rewards.scorers.conftest import Build
from tests.rewards.scorers.faults import responses
from tests.rewards.scorers.http_server import DIALECTS, ScorerServer
from tests.rewards.scorers.sources import HTTP, section
from tests.waiting import LIMIT, wait_until

BATCH = responses().batch
EXPECTED = responses().scores
LABELS = [json.dumps({"label": f"label {index}", "answer": index}) for index in range(7)]


@pytest.mark.parametrize("kind", HTTP)
def test_requests_have_exactly_the_keys_of_the_dialect(kind: str, build: Build) -> None:
    with ScorerServer(DIALECTS[kind]).running() as server:
        build(section(kind, server.url, batch_size=3)).score(BATCH, LABELS)
        sizes = [len(server.dialect.texts(body)) for _, body in server.requests]
    row = {"label", "answer"} if kind == "nemo-gym" else set()
    for path, body in server.requests:
        assert path == server.dialect.path
        assert set(body) == server.dialect.keys | row
    assert sorted(sizes) == ([1] * 7 if kind in ("slime", "nemo-gym") else [1, 3, 3])


def test_openrlhf_gets_query_with_special_tokens_prompts_and_labels(build: Build) -> None:
    with ScorerServer(DIALECTS["openrlhf"]).running() as server:
        build(section("openrlhf", server.url, label_field="answer")).score(BATCH, LABELS)
    [(_, body)] = server.requests
    assert body["query"][1] == "w31 w31 w21 w9"
    assert body["prompts"][1] == "w31 w31"
    assert body["labels"] == list(range(7))


def test_a_label_that_a_line_lacks_is_empty(build: Build) -> None:
    with ScorerServer(DIALECTS["openrlhf"]).running() as server:
        build(section("openrlhf", server.url)).score(BATCH)
    assert server.requests[0][1]["labels"] == [""] * 7


def test_slime_takes_a_number_or_the_key_of_an_object() -> None:
    plain = HttpRewardConfig(dialect="slime", urls=("http://127.0.0.1:9",))
    keyed = HttpRewardConfig(dialect="slime", urls=("http://127.0.0.1:9",), reward_key="score")
    read = READ["slime"].scores
    assert (read(0.5, 1, plain), read({"score": 2}, 1, keyed)) == ([0.5], [2.0])
    with pytest.raises(ValueError, match="the score is a dict of 1, expected a finite number"):
        read({"score": 2}, 1, plain)
    with pytest.raises(ValueError, match="expected an object with score"):
        read(0.5, 1, keyed)


def test_nemo_gym_gets_an_openai_response_and_the_columns_of_the_line(build: Build) -> None:
    with ScorerServer(DIALECTS["nemo-gym"]).running() as server:
        build(section("nemo-gym", server.url, max_concurrency=1, seed_session=True)).score(BATCH, LABELS)
    paths = [path for path, _ in server.requests]
    assert paths == ["/seed_session", "/verify"] * 7
    body = server.requests[1][1]
    assert body["answer"] == 0
    assert body["responses_create_params"] == {"input": [{"role": "user", "content": "w30"}]}
    assert body["response"]["output"][0]["content"][0] == {"type": "output_text", "text": "w20", "annotations": []}


def test_a_line_may_bring_its_own_parameters_of_the_response_but_not_the_response(build: Build) -> None:
    own = {"input": [{"role": "user", "content": "own"}]}
    lines = [json.dumps({"responses_create_params": own, "response": "cheated"})] * 7
    with ScorerServer(DIALECTS["nemo-gym"]).running() as server:
        build(section("nemo-gym", server.url)).score(BATCH, lines)
    for _, body in server.requests:
        assert body["responses_create_params"] == own
        assert isinstance(body["response"], dict)


def test_requests_in_flight_are_limited_and_run_concurrently(build: Build) -> None:
    with ScorerServer(DIALECTS["slime"], delay=0.05).running() as server:
        build(section("slime", server.url, max_concurrency=3)).score(BATCH)
        assert server.most_in_flight == 3


def test_several_servers_share_the_requests(build: Build) -> None:
    with ScorerServer(DIALECTS["slime"]).running() as one, ScorerServer(DIALECTS["slime"]).running() as two:
        reward = section("slime", one.url)
        reward["http"]["urls"] = [f"{one.url}/rm", f"{two.url}/rm"]
        scores = build(reward).score(BATCH)
    np.testing.assert_array_equal(scores.total, EXPECTED)
    assert {len(one.requests), len(two.requests)} == {3, 4}


def test_the_key_comes_from_a_file_and_is_in_no_message(build: Build, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("the-key-of-the-scorer\n")
    with ScorerServer(DIALECTS["openrlhf"], key="the-key-of-the-scorer").running() as server:
        source = build(section("openrlhf", server.url, api_key_file=str(file)))
        np.testing.assert_array_equal(source.score(BATCH).total, EXPECTED)
        file.write_text("another-key-of-the-scorer\n")
        with pytest.raises(
            AccessRefused, match=r"refuses access \(status 401\); check reward\.http\.api_key_file"
        ) as no:
            build(section("openrlhf", server.url, api_key_file=str(file))).score(BATCH)
    assert "another" not in str(no.value)


def test_a_missing_key_file_is_a_config_error(build: Build, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward\.http\.api_key_file .*/none: cannot be read"):
        build(section("openrlhf", "http://127.0.0.1:9", api_key_file=str(tmp_path / "none")))


def test_an_address_without_such_a_scorer_is_a_mismatch(build: Build) -> None:
    with ScorerServer(DIALECTS["slime"]).running() as server, pytest.raises(MismatchError, match="status 404"):
        build(section("openrlhf", server.url)).score(BATCH)


def certificate(folder: Path, days: int = 1) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1 that signs itself, and its key. It expires in ``days``."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "scorer")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=9))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "tls.crt", folder / "tls.key"
    paths[0].write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths


def test_https_needs_the_authority_of_the_scorer(build: Build, tmp_path: Path) -> None:
    files = certificate(tmp_path)
    with ScorerServer(DIALECTS["openrlhf"]).running(tls=files) as server:
        trusted = section("openrlhf", server.url, certificate_authority_file=str(files[0]), timeout_seconds=5.0)
        np.testing.assert_array_equal(build(trusted).score(BATCH).total, EXPECTED)
        with pytest.raises(AccessRefused, match=r"set reward\.http\.certificate_authority_file"):
            build(section("openrlhf", server.url, timeout_seconds=5.0)).score(BATCH)


def test_a_certificate_that_has_expired_says_so(build: Build, tmp_path: Path) -> None:
    files = certificate(tmp_path, days=-2)
    with ScorerServer(DIALECTS["openrlhf"]).running(tls=files) as server:
        trusted = section("openrlhf", server.url, certificate_authority_file=str(files[0]), timeout_seconds=5.0)
        with pytest.raises(AccessRefused, match="has a certificate that has expired; renew it"):
            build(trusted).score(BATCH)


def test_a_slow_scorer_is_no_fault(build: Build) -> None:
    with ScorerServer(DIALECTS["openrlhf"], delay=0.1).running() as server:
        np.testing.assert_array_equal(build(section("openrlhf", server.url)).score(BATCH).total, EXPECTED)


def test_a_scorer_that_is_not_there_is_no_fault_of_a_response(build: Build) -> None:
    source = build(section("openrlhf", f"http://127.0.0.1:{free_port()}"))
    with pytest.raises(ServiceFailed, match=r"reward\.http: http://127.* does not respond \(.*\); start the scorer"):
        source.score(BATCH)


def test_the_circuit_breaker_lets_one_request_try_for_all(build: Build) -> None:
    server = ScorerServer(DIALECTS["slime"], "overloaded", everywhere=True)
    with server.running():
        limits: dict[str, Any] = {"circuit_breaker_failures": 7, "circuit_breaker_seconds": 0.3, "max_attempts": 3}
        source = build(section("slime", server.url, **limits))
        with capture_logs() as logs, pytest.raises(ServiceFailed, match="status 503"):
            source.score(BATCH)
        # At once, and not for each request.
        assert [(line["event"], line["log_level"]) for line in logs] == [("scorer does not respond", "warning")]
        assert "status 503" in logs[0]["error"]
        # Two tries for all instead of two more requests for each response. On a busy machine, six more requests may be on their
        # way when the breaker opens, and a third try may be needed.
        assert 7 + 2 <= len(server.requests) <= 7 + 6 + 3, "requests went to a scorer behind an open circuit breaker"
        server.fault = ""
        started = time.monotonic()
        with capture_logs() as logs:
            np.testing.assert_array_equal(source.score(BATCH).total, EXPECTED)
        assert [line["event"] for line in logs] == ["scorer responds again"]
        assert time.monotonic() - started >= 0.3


def test_errors_of_single_responses_do_not_open_the_circuit_breaker(build: Build) -> None:
    server = ScorerServer(DIALECTS["slime"], "error")
    with server.running():
        limits: dict[str, Any] = {"circuit_breaker_failures": 1, "circuit_breaker_seconds": 60.0}
        source = build(section("slime", server.url, **limits))
        for _ in range(3):
            assert source.score(BATCH).outcomes.count(Outcome.SCORER_ERROR) == 2


def test_a_cancelled_caller_waits_no_longer(build: Build) -> None:
    with ScorerServer(DIALECTS["openrlhf"], "hang").running() as server:
        source = build(section("openrlhf", server.url, timeout_seconds=60.0))
        with pytest.raises(Cancelled):
            source.score(BATCH, cancelled=lambda: bool(server.requests))
        server.fault = ""
        np.testing.assert_array_equal(source.score(BATCH).total, EXPECTED)


def test_closing_ends_a_call(build: Build) -> None:
    with ScorerServer(DIALECTS["openrlhf"], "hang").running() as server:
        source = build(section("openrlhf", server.url, timeout_seconds=60.0))
        raised: list[BaseException] = []

        def score() -> None:
            try:
                source.score(BATCH)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=score)
        thread.start()
        wait_until(lambda: bool(server.requests))
        source.close()
        thread.join(LIMIT)
        assert [type(error) for error in raised] == [Cancelled]
        source.close()


def test_the_status_names_dialect_and_address(build: Build) -> None:
    status = build(section("openrlhf", "http://127.0.0.1:9")).status()
    assert status.model == "openrlhf at http://127.0.0.1:9/get_reward"
    assert (status.parameters, status.vocabulary_size) == (0, 61)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"data": [{"probs": []}]}, "a list of 0, expected a list of numbers"),
        ({"data": [{"probs": [1.0], "index": 1}]}, "index is 1, expected each of 0 to 0 once"),
        ({"data": [{"probs": [1.0], "index": True}]}, "index is True"),
        ({"data": {"probs": [1.0]}}, "expected a list of 1"),
        ({}, "expected an object with data"),
        ([], "a list of 0, expected an object with data"),
        ({"data": [[1.0]]}, "expected an object with probs"),
    ],
)
def test_malformed_entries_are_named(answer: Any, reason: str) -> None:
    config = HttpRewardConfig(dialect="vllm-classify", urls=("http://127.0.0.1:9",), model="rm")
    with pytest.raises(ValueError, match=reason):
        READ["vllm-classify"].scores(answer, 1, config)
