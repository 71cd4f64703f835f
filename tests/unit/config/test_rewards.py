"""The reward section: one kind of source, with its own section and no other."""

from __future__ import annotations

from typing import Any

import pytest

from quartet.config.deployment import OutcomesConfig
from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.contract.trajectory import FAILURES
from quartet.errors import ConfigError

HTTP = {"dialect": "openrlhf", "urls": ["http://127.0.0.1:5000/get_reward"]}
TRITON = {"url": "grpc://127.0.0.1:8001"}
SERVICE = {"address": "127.0.0.1:9000"}
JUDGE = {"url": "http://127.0.0.1:8000/v1", "model": "m", "rubric": "Score it."}
WITH_PASSWORD = "http://user:secret@127.0.0.1"  # pragma: allowlist secret - an example that is refused
SECTIONS: dict[str, Any] = {"http": HTTP, "triton": TRITON, "service": SERVICE, "judge": JUDGE}


def config_of(reward: dict[str, Any], **sections: Any) -> Config:
    tree = {"data": {"prompts": "p.jsonl"}, "actor": {"model": "m"}, "reward": reward, **sections}
    return parse_config(tree, "test")


def refusal(reward: dict[str, Any], **sections: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        config_of(reward, **sections)
    return str(refused.value)


@pytest.mark.parametrize("kind", SECTIONS)
def test_a_source_needs_its_own_section_and_refuses_the_others(kind: str) -> None:
    config = config_of({"source": kind, kind: SECTIONS[kind]})
    assert config.reward.remote is not None
    assert config.critic_model == "m"
    assert not config.reward.has_model_only
    assert f"{kind}: missing; source {kind} needs it" in refusal({"source": kind})
    for other, section in SECTIONS.items():
        if other != kind:
            text = refusal({"source": kind, kind: SECTIONS[kind], other: section})
            assert f"{other}: not used with source {kind}; set source {other}, or remove it" in text


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"source": "http", "http": {**HTTP, "urls": []}}, "urls"),
        ({"source": "http", "http": {**HTTP, "urls": ["ftp://x"]}}, "expected http://HOST:PORT"),
        ({"source": "http", "http": {**HTTP, "urls": [WITH_PASSWORD]}}, "without a password"),
        ({"source": "http", "http": {**HTTP, "dialect": "vllm-classify"}}, "model: missing; dialect vllm-classify"),
        ({"source": "http", "http": {**HTTP, "model": "m"}}, "model: not used with dialect openrlhf"),
        ({"source": "http", "http": {**HTTP, "seed_session": True}}, "seed_session: not used with dialect openrlhf"),
        ({"source": "judge", "judge": {**JUDGE, "min_score": 10}}, "min_score 10: expected less than max_score 10"),
        ({"source": "judge", "judge": {**JUDGE, "template": "{prompt}"}}, "template: expected {response} in the text"),
        ({"source": "judge", "judge": {**JUDGE, "rubric": " "}}, "rubric: expected a text"),
        ({"source": "triton", "triton": {"url": "http://127.0.0.1:8000"}}, "expected grpc://HOST:PORT"),
        ({"source": "service", "service": {"address": "127.0.0.1:0"}}, "expected HOST:PORT with the port"),
        (
            {"source": "function", "function": "a:b", "signature": "trl", "batched": True},
            "batched: not used with signature trl",
        ),
        ({"source": "function", "function": "a:b", "timeout": 3}, "timeout"),
        *(
            (
                {"source": "ensemble", "parts": [{"name": "a", "source": kind, "optional": True, kind: section}]},
                f"optional: not with source {kind}, whose refusal may be an error",
            )
            for kind, section in {**SECTIONS, "model": "m"}.items()
        ),
        (
            {"source": "ensemble", "arguments": {"a": 1}, "parts": [{"name": "a", "source": "model", "model": "m"}]},
            "arguments: not used with source ensemble; set it in the parts",
        ),
    ],
)
def test_contradictions_are_refused(reward: dict[str, Any], message: str) -> None:
    assert message in refusal(reward)


@pytest.mark.parametrize(
    ("reward", "key"),
    [
        ({"source": "http", "http": {**HTTP, "urls": [*HTTP["urls"], "http://scorer:5000"]}}, "reward.http.urls[1]"),
        ({"source": "triton", "triton": {"url": "grpc://triton:8001"}}, "reward.triton.url"),
        ({"source": "judge", "judge": {**JUDGE, "url": "http://judge/v1"}}, "reward.judge.url"),
        ({"source": "service", "service": {"address": "scorer:9000"}}, "reward.service.address"),
        (
            {
                "source": "ensemble",
                "parts": [{"name": "a", "source": "judge", "judge": {**JUDGE, "url": "http://x/v1"}}],
            },
            "reward.parts.a.judge.url",
        ),
    ],
)
def test_plaintext_is_for_loopback_only(reward: dict[str, Any], key: str) -> None:
    text = refusal(reward)
    assert key in text
    assert "not a loopback address, and calls are not encrypted" in text
    config_of(reward, security={"allow_plaintext": True})


def test_a_function_may_be_an_optional_part() -> None:
    part = {"name": "a", "source": "function", "function": "a:b", "signature": "trl", "optional": True}
    assert config_of({"source": "ensemble", "parts": [part]}).reward.parts[0].optional


def test_certificates_encrypt_a_service() -> None:
    config_of({"source": "service", "service": {"address": "scorer:9000"}}, security={"certificates": "certs"})


def test_the_time_limit_of_a_batch_covers_every_attempt() -> None:
    limits = {"timeout_seconds": 10, "max_attempts": 3, "backoff_seconds": 1, "circuit_breaker_seconds": 2}
    http = {**HTTP, **limits, "max_concurrency": 4}
    # Three attempts of 12 s, and pauses of up to 1.5 and 3 s; eight responses in two rounds.
    assert config_of({"source": "http", "http": http}).reward.source_seconds(8) == 2 * (3 * 12 + 4.5)
    function = {"source": "function", "function": "a:b", "timeout_seconds": 2}
    assert config_of(function).reward.source_seconds(8) == 16
    assert config_of({**function, "signature": "trl"}).reward.source_seconds(8) == 2
    assert config_of({"model": "m"}).reward.source_seconds(8) == 0


def test_every_failure_has_an_action() -> None:
    assert set(OutcomesConfig.model_fields) == set(FAILURES)
    outcomes = config_of({"model": "m"}, recovery={"outcomes": {"timeout": {"action": "stop"}}}).recovery.outcomes
    assert [outcomes.action(each) for each in ("timeout", "scorer_error", "refused")] == ["stop", "retry", "replace"]
    assert "action" in refusal({"model": "m"}, recovery={"outcomes": {"timeout": {"action": "ignore"}}})
    assert "ok" in refusal({"model": "m"}, recovery={"outcomes": {"ok": {"action": "retry"}}})


def test_only_models_and_triton_get_no_fields_of_the_prompt() -> None:
    assert not config_of({"model": "m"}).reward.needs_fields
    assert not config_of({"source": "triton", "triton": TRITON}).reward.needs_fields
    for kind in ("http", "judge", "service"):
        assert config_of({"source": kind, kind: SECTIONS[kind]}).reward.needs_fields
