"""Settings of rollout.engine: checks before the start, and the engine that is created."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.contract.generation import StructuredOutput
from quartet.data.evaluation import greedy_sampling, run_sampling
from quartet.engines.engine import find_engine
from quartet.errors import ConfigError
from quartet.run_directory.identity import fixed_settings
from tests.unit.preflight.files import check_inputs, save_tokenizer

URL = "grpc://127.0.0.1:8001"
LORA = {"rank": 4}
PASSWORD = "not-to-be-told"  # pragma: allowlist secret - an example


def config(engine: str = "triton", lora: dict[str, Any] | None = None, **changes: Any) -> Config:
    tree: dict[str, Any] = {
        "data": {"prompts": "p"},
        "actor": {"model": "a", "lora": lora},
        "reward": {"model": "r"},
        "rollout": {"engine": engine, **changes.pop("rollout", {})},
    }
    return parse_config(tree | changes, "test")


SERVER = {"url": "http://127.0.0.1:8000", "weights_directory": "/w"}
SPECULATIVE = {"speculative": {"num_speculative_tokens": 4}}


@pytest.mark.parametrize(("engine", "lora"), [("torch", None), ("vllm", LORA)])
def test_only_an_adapter_of_the_torch_engine_can_be_merged(engine: str, lora: dict[str, Any] | None) -> None:
    assert config("torch", LORA, rollout={"merge_adapter": True}).rollout.merge_adapter
    with pytest.raises(ConfigError, match=r"rollout\.merge_adapter: only for engine torch with actor\.lora"):
        config(engine, lora, rollout={"merge_adapter": True, "generators": 1})


@pytest.mark.parametrize("url", [URL, "grpc://localhost:1", "grpc://[::1]:8001", "grpcs://triton.example:8001"])
def test_a_server_must_be_on_loopback_or_use_tls(url: str) -> None:
    triton = config(lora=LORA, rollout={"triton": {"url": url}}).rollout.triton
    assert triton is not None
    assert triton.encrypted == url.startswith("grpcs")
    assert f"{url.split(':')[0]}://{triton.address}" == url


def test_plaintext_beyond_loopback_must_be_allowed() -> None:
    far = {"triton": {"url": "grpc://triton.example:8001"}}
    with pytest.raises(ConfigError, match=r"rollout\.triton\.url .*not a loopback address.*grpcs://"):
        config(lora=LORA, rollout=far)
    assert config(lora=LORA, rollout=far, security={"allow_plaintext": True}).rollout.triton is not None


@pytest.mark.parametrize(
    "url",
    [
        "http://h:1",
        "h:1",
        "grpc://h",
        "grpc://:1",
        "grpc://h:x",
        f"grpc://u:{PASSWORD}@h:1",
        "grpc://h:1/x",
        "grpc://h:99999",
        "grpc://h:0",
    ],
)
def test_a_malformed_server_address_is_refused(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"rollout\.triton\.url: expected grpc://HOST:PORT, or grpcs://HOST:PORT for TLS"
    ) as refused:
        config(lora=LORA, rollout={"triton": {"url": url}})
    assert PASSWORD not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"rollout\.triton: missing; engine triton needs it"),
        ({"rollout": {"triton": {"url": URL}}}, r"weights lora: .*actor\.lora is null"),
        (
            {
                "rollout": {"triton": {"url": URL, "weights": "static"}},
                "algorithm": {"rollout_correction": {"level": "none"}},
            },
            r"weights static: .*set algorithm\.rollout_correction\.level, .* or algorithm\.old_log_probs rollout with level none",
        ),
        (
            {"rollout": {"triton": {"url": URL, "weights": "static"}, "top_p": 0.9}},
            r"weights static: .*log-probs of the sampled distribution.*set rollout\.top_k 0 and rollout\.top_p 1",
        ),
        (
            {"lora": LORA, "rollout": {"triton": {"url": URL}, "stop_strings": ["a"]}},
            r"rollout\.stop_strings: not with engine triton",
        ),
        (
            {"engine": "torch", "rollout": {"stop_strings": ["a", ""]}},
            r"rollout\.stop_strings: '': expected 1 to 64 characters",
        ),
        ({"engine": "torch", "rollout": {"stop_strings": ["a"] * 17}}, r"rollout\.stop_strings: 17 stop strings"),
        ({"lora": LORA, "rollout": {"triton": {"url": URL}, "min_p": 0.1}}, r"rollout\.min_p 0\.1: .*Triton"),
        (
            {"engine": "tensorrt-llm", "rollout": {"generators": 1, "min_p": 0.1}},
            r"rollout\.min_p 0\.1: .*TRTLLMSampler",
        ),
        (
            {"lora": LORA, "rollout": {"triton": {"url": URL}, "presence_penalty": 0.5}},
            r"rollout\.presence_penalty 0\.5: not with engine triton; set presence_penalty 0, or",
        ),
        (
            {"engine": "tensorrt-llm", "rollout": {"generators": 1, "frequency_penalty": 0.5}},
            r"rollout\.frequency_penalty 0\.5: not with engine tensorrt-llm",
        ),
        (
            {
                "engine": "sglang-server",
                "rollout": {"generators": 1, "repetition_penalty": 1.1, "sglang_server": SERVER},
            },
            r"rollout\.repetition_penalty 1\.1: SGLang applies it to tokens of the response only",
        ),
        (
            {"engine": "vllm", "rollout": {"generators": 1, "structured_output": {"regex": "a+"}}},
            r"rollout\.structured_output: engine vllm runs without a tokenizer; set rollout\.engine vllm-server",
        ),
        (
            {"engine": "torch", "rollout": {"structured_output": {"regex": "a+"}}},
            r"rollout\.structured_output: engine torch cannot keep a form",
        ),
        (
            {"engine": "torch", "rollout": {"structured_output": {"regex": "a+", "grammar": "b"}}},
            r"rollout\.structured_output.*regex and grammar: expected one of",
        ),
        ({"engine": "torch", "rollout": {"structured_output": {}}}, r"no key: expected one of json_schema, regex"),
        ({"engine": "torch", "rollout": {"structured_output": {"regex": ""}}}, r"regex: 0 characters; expected 1"),
        (
            {"engine": "vllm", "rollout": {"generators": 1, "min_p": 0.1, "vllm": SPECULATIVE}},
            r"rollout\.min_p 0\.1: vLLM has no min_p with speculative decoding; set min_p 0",
        ),
        (
            {
                "engine": "vllm",
                "rollout": {"vllm": {"speculative": {**SPECULATIVE["speculative"], "prompt_lookup_min": 6}}},
            },
            r"rollout\.vllm\.speculative.*prompt_lookup_min 6: expected at most prompt_lookup_max 5",
        ),
        ({"engine": "torch", "rollout": {"vllm": SPECULATIVE}}, r"rollout\.vllm: not used with engine torch"),
        ({"engine": "torch", "rollout": {"repetition_penalty": 0}}, r"rollout\.repetition_penalty"),
        ({"engine": "torch", "rollout": {"presence_penalty": 2.5}}, r"rollout\.presence_penalty"),
        (
            {"engine": "torch", "rollout": {"triton": {"url": URL}}},
            r"rollout\.triton: not used with engine torch; set engine triton",
        ),
        (
            {"engine": "torch", "rollout": {"tensorrt_llm": {}}},
            r"rollout\.tensorrt_llm: not used with engine torch; set engine tensorrt-llm",
        ),
    ],
)
def test_inconsistent_engine_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**settings)


def test_static_weights_need_no_adapter() -> None:
    config(rollout={"triton": {"url": URL, "weights": "static"}})


def test_static_weights_may_have_ratios_against_the_engine_instead_of_importance_weights() -> None:
    algorithm = {"old_log_probs": "rollout", "rollout_correction": {"level": "none"}}
    config(rollout={"triton": {"url": URL, "weights": "static"}}, algorithm=algorithm)


def test_a_run_may_resume_with_another_server_address_but_not_another_engine() -> None:
    here, there, static = (
        fixed_settings(config(lora=LORA, rollout={"triton": {"url": url, "weights": weights}}))
        for url, weights in ((URL, "lora"), ("grpcs://other:1", "lora"), (URL, "static"))
    )
    assert here == there
    assert here != static


SERVERS = pytest.mark.parametrize("engine", ["vllm-server", "sglang-server"])


def server_config(engine: str, url: str = "http://127.0.0.1:8000", **changes: Any) -> Config:
    """Return a config whose engine is an HTTP server."""
    server = {"url": url, "weights_directory": "/dev/shm/w", **changes.pop("server", {})}
    return config(engine, rollout={"generators": 1, engine.replace("-", "_"): server}, **changes)


@SERVERS
@pytest.mark.parametrize(
    "url", ["http://localhost:8000", "http://[::1]:8000/", "https://vllm.example", "https://h:1/p"]
)
def test_an_engine_server_is_on_loopback_or_uses_tls(engine: str, url: str) -> None:
    section = getattr(server_config(engine, url).rollout, engine.replace("-", "_"))
    assert section.encrypted == url.startswith("https")
    with pytest.raises(ConfigError, match=r"_server\.url .*not a loopback address.*https://"):
        server_config(engine, "http://far.example:8000")
    server_config(engine, "http://far.example:8000", security={"allow_plaintext": True})


@SERVERS
@pytest.mark.parametrize(
    "url", ["grpc://h:1", "h:1", "http://", "http://h:x", "http://h:99999", f"http://u:{PASSWORD}@h"]
)
def test_a_malformed_engine_server_address_is_refused(engine: str, url: str) -> None:
    with pytest.raises(ConfigError, match=r"_server\.url: expected http://HOST:PORT, or https://") as refused:
        server_config(engine, url)
    assert PASSWORD not in str(refused.value)


@SERVERS
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"server": {"weights": "lora"}}, r"weights lora: .*actor\.lora is null"),
        ({"lora": LORA}, r"weights folder: .*actor\.lora trains an adapter"),
        ({"server": {"weights": "static"}}, r"_server\.weights: .*'folder' or 'lora'"),
        ({"server": {"weights_directory": None}}, r"_server\.weights_directory: .*path"),
    ],
)
def test_inconsistent_settings_of_an_engine_server_are_refused(
    engine: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        server_config(engine, **changes)


@SERVERS
def test_an_engine_server_needs_its_section_and_only_its_engine_has_one(engine: str) -> None:
    section = engine.replace("-", "_")
    with pytest.raises(ConfigError, match=rf"rollout\.{section}: missing; engine {engine} needs it"):
        config(engine, rollout={"generators": 1})
    with pytest.raises(ConfigError, match="a server holds the weights of one generator"):
        config(engine, rollout={"generators": 2, section: {"url": "http://127.0.0.1:1", "weights_directory": "w"}})
    with pytest.raises(ConfigError, match=rf"rollout\.{section}: not used with engine torch"):
        config("torch", rollout={section: {"url": "http://127.0.0.1:1", "weights_directory": "w"}})


@SERVERS
def test_a_run_may_resume_with_an_engine_server_elsewhere(engine: str) -> None:
    here, there = (fixed_settings(server_config(engine, url)) for url in ("http://127.0.0.1:1", "https://far"))
    assert here == there


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the settings of a config whose files exist, without tensors."""
    monkeypatch.setattr("quartet.preflight.check_contents", lambda models: [])
    for name, architecture in (("policy", "LlamaForCausalLM"), ("reward", "LlamaForSequenceClassification")):
        (tmp_path / name).mkdir()
        description = f'{{"architectures": ["{architecture}"], "id2label": {{"0": "score"}}}}'
        (tmp_path / name / "config.json").write_text(description)
        (tmp_path / name / "model.safetensors").write_bytes(b"\x02" + 7 * b"\0" + b"{}")
        save_tokenizer(tmp_path / name)
    (tmp_path / "prompts.jsonl").write_text('{"text": "a"}\n')
    return {
        "data": {"prompts": tmp_path / "prompts.jsonl"},
        "actor": {"model": str(tmp_path / "policy"), "lora": LORA},
        "reward": {"model": str(tmp_path / "reward")},
    }


@pytest.mark.skipif(importlib.util.find_spec("tritonclient") is not None, reason="the package is here")
@pytest.mark.slow
def test_a_missing_package_is_reported_with_installation_advice(checkpoints: dict[str, Any]) -> None:
    tree = checkpoints | {"rollout": {"engine": "triton", "prompts_per_step": 1, "triton": {"url": URL}}}
    with pytest.raises(
        ConfigError, match=r"rollout\.engine triton: the package tritonclient is not installed; "
    ) as refused:
        check_inputs(parse_config(tree, "test"))
    assert str(refused.value).endswith("set rollout.engine torch")
    # Elsewhere it may be.
    elsewhere = {"services": {"actor": {"address": "far:1"}}, "buffer": {"url": "redis://far"}}
    check_inputs(parse_config(tree | elsewhere, "test"))


def test_the_actor_does_not_host_an_engine_of_a_generator_process(checkpoints: dict[str, Any]) -> None:
    tree = checkpoints | {"rollout": {"engine": "tensorrt-llm"}}
    with pytest.raises(ConfigError, match=r"rollout\.engine tensorrt-llm: runs in generators; set rollout\.generators"):
        check_inputs(parse_config(tree, "test"))
    assert find_engine("tensorrt-llm").share is None


def test_an_unreadable_certificate_authority_is_reported(tmp_path: Path) -> None:
    triton = {"url": "grpcs://h:1", "certificate_authority_file": str(tmp_path / "absent.crt")}
    share = find_engine("triton").share
    assert share is not None
    with pytest.raises(ConfigError, match=r"rollout\.triton\.certificate_authority_file: .*absent\.crt cannot be read"):
        share(config(lora=LORA, rollout={"triton": triton}), MagicMock(), None)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"engine": "triton", "rollout": {"triton": {"url": URL}}, "lora": LORA}, "engine triton"),
        ({"engine": "torch", "algorithm": {"rollout_correction": {"level": "none"}}}, "rollout_correction.level"),
        ({"engine": "torch", "rollout": {"max_off_policy_steps": 33}}, "rollout.max_off_policy_steps"),
    ],
)
def test_off_policy_steps_need_an_engine_with_separate_weights_and_a_correction(
    changes: dict[str, Any], word: str
) -> None:
    rollout = {"max_off_policy_steps": 1, **changes.pop("rollout", {})}
    with pytest.raises(ConfigError, match=word):
        config(**changes, rollout=rollout)


@pytest.mark.parametrize(
    ("engine", "rollout", "lora", "word"),
    [
        (
            "tensorrt-llm",
            {},
            None,
            "engine tensorrt-llm takes new weights between generations only; set engine torch, vllm or sglang-server",
        ),
        ("torch", {"generators": 0}, None, r"the actor's own engine takes .* only; set rollout\.generators"),
        (
            "vllm",
            {"max_off_policy_steps": 0},
            None,
            "nothing is generated during an update; set max_off_policy_steps to 1",
        ),
        (
            "sglang-server",
            {"sglang_server": {"url": "http://127.0.0.1:8000", "weights_directory": "/w", "weights": "lora"}},
            LORA,
            r"SGLang keeps the adapter of a response until its end, .*actor\.lora null",
        ),
        ("vllm", {"vllm": {"release_memory": True}}, None, r"rollout\.vllm\.release_memory cannot free the GPU"),
    ],
)
def test_in_flight_updates_need_an_engine_that_takes_them_and_off_policy_steps(
    engine: str, rollout: dict[str, Any], lora: Any, word: str
) -> None:
    needed = {"in_flight_updates": True, "max_off_policy_steps": 1, "generators": 1}
    for name in ("torch", "vllm"):
        assert config(name, rollout=needed, lora=lora).rollout.in_flight_updates
    with pytest.raises(ConfigError, match=word):
        config(engine, lora=lora, rollout={**needed, **rollout})


@pytest.mark.parametrize(
    ("group", "changes", "word"),
    [
        ("nccl", {}, "nccl: needs GPUs on both sides; set services.actor.devices and services.generator.devices"),
        ("gloo", {"security": {"certificates": "certificates"}}, "gloo: sends weights without TLS, which security"),
    ],
)
def test_a_process_group_needs_its_devices_and_an_allowance_beside_tls(
    group: str, changes: dict[str, Any], word: str
) -> None:
    rollout = {"process_group": group, "generators": 1}
    with pytest.raises(ConfigError, match=word):
        config("torch", rollout=rollout, **changes)
    allowed = {"certificates": "certificates", "allow_plaintext": True}
    assert config("torch", rollout={**rollout, "process_group": "gloo"}, security=allowed)
    devices = {"actor": {"devices": [0]}, "generator": {"devices": [1]}}
    assert config("torch", rollout={**rollout, "process_group": "nccl"}, services=devices)


TRT_SAMPLER = {"tensorrt_llm": {"sampler": "TRTLLMSampler"}}


@pytest.mark.parametrize(
    ("engine", "rollout", "message"),
    [
        ("vllm", {"top_p": 0.9}, r"engine vllm reports none with rollout\.top_p 0\.9; set top_p 1, or"),
        ("vllm", {"top_k": 50}, r"with rollout\.top_k 50; set top_k 0, or engine torch or sglang-server, or max_off"),
        ("vllm", {"min_p": 0.1, "in_flight_updates": True}, r"with rollout\.min_p 0\.1; set min_p 0"),
        ("vllm", {"top_p": 0.9, "top_k": 9}, r"with rollout\.top_p 0\.9, rollout\.top_k 9; set top_p 1, top_k 0, or"),
        ("vllm-server", {"top_p": 0.9, "vllm_server": SERVER}, "engine vllm-server reports none"),
        (
            "vllm",
            {"frequency_penalty": 0.5},
            r"with rollout\.frequency_penalty 0\.5; set frequency_penalty 0, or engine torch, or",
        ),
        ("vllm-server", {"repetition_penalty": 1.1, "vllm_server": SERVER}, r"rollout\.repetition_penalty 1\.1; set"),
        ("sglang-server", {"presence_penalty": 0.5, "sglang_server": SERVER}, "engine sglang-server reports none"),
        (
            "sglang-server",
            {"structured_output": {"regex": "a+"}, "sglang_server": SERVER},
            r"with rollout\.structured_output; set structured_output null, or engine torch, or",
        ),
        ("tensorrt-llm", {"top_k": 50}, r"engine tensorrt-llm reports none with rollout\.top_k 50"),
        (
            "tensorrt-llm",
            {"temperature": 0.7, **TRT_SAMPLER},
            r"with TRTLLMSampler and rollout\.temperature 0\.7; set temperature 1",
        ),
    ],
)
def test_off_policy_steps_need_an_engine_that_reports_log_probs(
    engine: str, rollout: dict[str, Any], message: str
) -> None:
    """The trainer has no older policy to compute them with, and with those of a newer one each weight would be 1."""
    needed = {"generators": 1, **rollout}
    with pytest.raises(ConfigError, match=r"rollout\.max_off_policy_steps 1: .* log-probs .*" + message):
        config(engine, rollout={"max_off_policy_steps": 1, **needed})
    needed.pop("in_flight_updates", None)
    assert config(engine, rollout=needed).rollout.max_off_policy_steps == 0


@pytest.mark.parametrize(
    ("engine", "rollout"),
    [
        ("torch", {"top_p": 0.9, "top_k": 50, "min_p": 0.1, "temperature": 0.7}),
        ("torch", {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}),
        ("sglang-server", {"top_p": 0.9, "sglang_server": SERVER}),
        ("vllm", {"temperature": 0.7}),
        ("vllm-server", {"temperature": 0.7, "vllm_server": SERVER}),
        ("tensorrt-llm", {"temperature": 0.7}),
        ("tensorrt-llm", TRT_SAMPLER),
    ],
)
def test_off_policy_steps_are_accepted_with_an_engine_that_reports_log_probs(
    engine: str, rollout: dict[str, Any]
) -> None:
    rollout = {"max_off_policy_steps": 2, "generators": 1, **rollout}
    assert config(engine, rollout=rollout).rollout.max_off_policy_steps == 2


def test_the_structured_output_is_that_of_all_requests() -> None:
    schema = {"type": "object", "required": ["answer"]}
    needed = {"generators": 1, "sglang_server": SERVER}
    rollout = config("sglang-server", rollout={"structured_output": {"json_schema": schema}, **needed}).rollout
    for sampling in (run_sampling(rollout), greedy_sampling(rollout)):
        assert sampling.structured_output == StructuredOutput("json_schema", json.dumps(schema))
    assert run_sampling(config("sglang-server", rollout=needed).rollout).structured_output is None


@pytest.mark.parametrize(
    ("engine", "rollout", "changes", "message"),
    [
        ("vllm-server", {"vllm_server": SERVER}, {}, "engine vllm-server does not report .*; set engine torch or vllm"),
        ("torch", {"max_turns": 2}, {}, r"rollout\.max_turns 2: .*; set max_turns 0"),
        (
            "vllm",
            {"in_flight_updates": True, "max_off_policy_steps": 1},
            {},
            r"rollout\.in_flight_updates: .*; set in_flight_updates false",
        ),
        (
            "vllm",
            {"vllm": {"prefix_caching": False}},
            {},
            r"rollout\.vllm\.prefix_caching false: .*; set prefix_caching true",
        ),
        ("vllm", {"vllm": SPECULATIVE}, {}, r"rollout\.vllm\.speculative: .*; remove it"),
        ("torch", {}, {"actor": {"model": "a", "compile": True}}, r"actor\.compile: .*; set compile false"),
        (
            "torch",
            {},
            {"services": {"actor": {"processes": 2, "parallel": {"tensor": 2}}}},
            r"services\.actor\.parallel\.tensor 2: .*; set tensor 1",
        ),
    ],
)
def test_router_replay_needs_an_engine_that_reports_experts_and_routers_that_take_them(
    engine: str, rollout: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    needed = {"router_replay": True, "generators": 1}
    for name in ("torch", "vllm"):
        assert config(name, rollout=needed).rollout.router_replay
    with pytest.raises(ConfigError, match=f"rollout.router_replay: {message}, or router_replay false"):
        config(engine, rollout={**needed, **rollout}, **changes)
