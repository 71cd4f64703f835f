"""The client of a vLLM server, against a real one on the CPU."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from quartet.contract.generation import SamplingParameters
from quartet.engines.vllm_server import VLLMServerEngine
from quartet.errors import (
    AccessRefused,
    Cancelled,
    ConfigError,
    MismatchError,
    ServiceFailed,
    ServiceUnavailable,
)
from tests.engines.faulty_proxy import Fault, proxy
from tests.engines.http_servers import VLLMServer, connect_vllm
from tests.engines.remote_policy import (
    EOS,
    adapted,
    change_adapter,
    greedy,
    log_probs,
    policy,
    requests,
    run,
    tokens,
    weight_set,
)
from tests.waiting import LIMIT, wait_until

LONG = SamplingParameters(1900, ignore_eos=True)
"""Responses that take seconds."""


@pytest.fixture
def server(vllm_server: VLLMServer) -> VLLMServer:
    """Return the session's vLLM server."""
    return vllm_server


@pytest.fixture
def engine(server: VLLMServer) -> Iterator[VLLMServerEngine]:
    """Return an engine that holds policy(1)."""
    result = connect_vllm(server)
    weights = weight_set(policy(1))
    result.load_weights(weights, weights.tensors)
    yield result
    result.close()


def test_log_probs_are_those_of_the_policy_at_the_temperature(engine: VLLMServerEngine) -> None:
    for temperature in (0.0, 0.7, 1.0):
        for response in run(engine, requests(8), temperature=temperature):
            assert response.log_probs is not None
            expected = log_probs(policy(1), response, temperature or 1.0)
            assert np.allclose(response.log_probs, expected, atol=1e-3)


def test_truncated_sampling_reports_no_log_probs(engine: VLLMServerEngine) -> None:
    assert {response.log_probs for response in run(engine, requests(4), top_p=0.6)} == {None}
    assert {response.log_probs for response in run(engine, requests(4), top_k=5)} == {None}
    assert {response.log_probs for response in run(engine, requests(4), min_p=0.2)} == {None}


def test_new_weights_reset_the_prefix_cache(server: VLLMServer, engine: VLLMServerEngine) -> None:
    batch = requests(8, length=100)  # several blocks of the cache
    body = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "stop_token_ids": [EOS], "detokenize": False}

    def without_salt() -> list[list[int]]:
        answers = [
            server.post("/inference/v1/generate", {"token_ids": request.prompt_ids.tolist(), "sampling_params": body})
            for request in batch
        ]
        return [answer["choices"][0]["token_ids"] for answer in answers]

    assert without_salt() == greedy(policy(1), batch)
    policy(2).save_pretrained(server.folder / "other")
    server.post("/pause?mode=wait&clear_cache=false")
    arguments = {"weights_path": str(server.folder / "other")}
    server.post("/collective_rpc", {"method": "reload_weights", "kwargs": arguments})
    server.post("/resume")
    expected = greedy(policy(2), batch)
    assert without_salt() != expected  # the reset was forgotten
    weights = weight_set(policy(2))
    engine.load_weights(weights, weights.tensors)
    assert without_salt() == expected
    assert tokens(run(engine, batch, temperature=0.0)) == expected


def test_only_the_present_policy_version_is_kept_on_disk(server: VLLMServer, engine: VLLMServerEngine) -> None:
    for seed in (2, 3):
        weights = weight_set(policy(seed))
        engine.load_weights(weights, weights.tensors)
    folders = [
        folder for owner in (server.folder / "weights").iterdir() for folder in owner.iterdir() if folder.is_dir()
    ]
    assert [folder.name for folder in folders] == [weights.digest.hex()]
    assert {file.name for file in folders[0].iterdir()} >= {"config.json", "model.safetensors"}
    engine.close()
    assert not list((server.folder / "weights").iterdir())


def test_adapters_are_loaded_by_their_digest(server: VLLMServer) -> None:
    engine, model = connect_vllm(server, weights="lora"), adapted(policy(0), seed=5)
    base = weight_set(policy(0))
    full = connect_vllm(server)
    full.load_weights(base, base.tensors)
    assert engine.properties.weights == "adapter"
    batch = requests(12)
    for seed in (5, 6):
        change_adapter(model, seed)
        weights = weight_set(model)
        engine.load_weights(weights, weights.tensors)
        expected = greedy(model, batch)
        assert tokens(run(engine, batch, temperature=0.0)) == expected
        assert expected != greedy(policy(0), batch)
    server.post("/v1/unload_lora_adapter", {"lora_name": f"quartet-{weights.digest.hex()}"})
    with pytest.raises(ServiceFailed, match="no longer has the adapter"):
        run(engine, batch)
    engine.close()
    full.close()


def test_the_base_model_of_an_adapter_is_compared(server: VLLMServer, engine: VLLMServerEngine) -> None:
    lora = connect_vllm(server, weights="lora")
    weights = weight_set(adapted(policy(0), seed=5))  # the server holds policy(1)
    with pytest.raises(ServiceFailed, match="holds other values"):
        lora.load_weights(weights, weights.tensors)
    lora.close()


def test_the_engine_works_after_a_cancelled_generation(server: VLLMServer, engine: VLLMServerEngine) -> None:
    started = server.has_generated()
    with pytest.raises(Cancelled):
        list(engine.generate(requests(16), LONG, 0, started))
    assert len(run(engine, requests(4))) == 4
    wait_until(lambda: server.metric("vllm:num_requests_running") == 0)


def test_a_request_waits_for_its_turn(server: VLLMServer) -> None:
    narrow, weights = connect_vllm(server, max_in_flight=2), weight_set(policy(1))
    narrow.load_weights(weights, weights.tensors)
    assert len(run(narrow, requests(7))) == 7
    narrow.close()


def test_weights_that_another_client_changed_are_refused(server: VLLMServer, engine: VLLMServerEngine) -> None:
    other, weights = connect_vllm(server), weight_set(policy(2))
    other.load_weights(weights, weights.tensors)
    with pytest.raises(ServiceFailed, match="another client changed the weights"):
        run(engine, requests(4))
    other.close()


def test_generation_needs_weights(server: VLLMServer) -> None:
    empty = connect_vllm(server)
    with pytest.raises(ServiceFailed, match="holds no policy version"):
        run(empty, requests(1))
    empty.close()


def _ignore(*paths: str) -> Fault:
    """Return a fault: the server says that these calls succeed, and ignores them."""
    return lambda path, _: (200, b'{"results": [null], "success": true}') if path.startswith(paths) else None


def _half_loaded(path: str, body: bytes) -> tuple[int, bytes] | None:
    """Delete half of the checkpoint before the server reads it."""
    if path == "/collective_rpc":
        import safetensors.numpy

        file = Path(json.loads(body)["kwargs"]["weights_path"]) / "model.safetensors"
        tensors = safetensors.numpy.load_file(file)
        kept = {name: value for name, value in tensors.items() if name != "model.norm.weight" and "embed" not in name}
        safetensors.numpy.save_file(kept, file)
    return None


@pytest.mark.parametrize(
    ("fault", "when", "message"),
    [
        (_ignore("/collective_rpc"), "load", "holds other values than policy version 1"),
        (_half_loaded, "load", "holds other values than policy version 1"),
        (_ignore("/update_weight_version"), "generate", "another client changed the weights"),
        (lambda path, _: (200, b'{"success": false}') if "reset" in path else None, "load", "cannot reset its prefix"),
        (lambda path, _: (500, b"out of memory") if "collective" in path else None, "load", "cannot load the weights"),
        (lambda path, _: (200, b"data: {}\n\n") if "inference" in path else None, "generate", "malformed event"),
        (lambda path, _: (200, b"data: [DONE]\n\n") if "inference" in path else None, "generate", "without a reason"),
        (lambda path, _: (200, b"data: nonsense\n\n") if "inference" in path else None, "generate", "not JSON"),
        (
            lambda path, _: (200, b'data: {"error": {"message": "no memory"}}\n\n') if "inference" in path else None,
            "generate",
            "no memory",
        ),
    ],
    ids=["dropped", "half", "version", "cache", "failed", "malformed", "cut", "nonsense", "error"],
)
def test_a_faulty_server_is_refused_by_name(
    server: VLLMServer, monkeypatch: pytest.MonkeyPatch, fault: Fault, when: str, message: str
) -> None:
    monkeypatch.setattr("quartet.engines.vllm_server._CACHE_RESET_SECONDS", 0.2)
    active = False
    with proxy(server.url, lambda path, body: fault(path, body) if active else None) as url:
        engine, former, weights = connect_vllm(server, url), weight_set(policy(2)), weight_set(policy(3))
        engine.load_weights(former, former.tensors)
        active = True
        if when == "load":
            with pytest.raises(ServiceFailed, match=f"vLLM server at {url}.*{message}"):
                engine.load_weights(weights, weights.tensors)
            with pytest.raises(ServiceFailed, match="holds no policy version"):
                run(engine, requests(1))
        else:
            engine.load_weights(weights, weights.tensors)
            with pytest.raises(ServiceFailed, match=f"vLLM server at {url}.*{message}"):
                run(engine, requests(1))
        active = False
        engine.load_weights(weights, weights.tensors)  # and it works again
        assert tokens(run(engine, requests(4), temperature=0.0)) == greedy(policy(3), requests(4))
        engine.close()


def _changed_config(change: Callable[[dict[str, Any]], None], server: VLLMServer) -> Fault:
    text = httpx2.get(f"{server.url}/server_info?config_format=json", timeout=LIMIT, trust_env=False).text
    answer = json.loads(text)
    change(answer["vllm_config"])
    return lambda path, _: (200, json.dumps(answer).encode()) if path.startswith("/server_info") else None


def test_settings_of_the_server_that_do_not_fit_are_refused(server: VLLMServer) -> None:
    def refused(fault: Fault, match: str, **changes: Any) -> None:
        with proxy(server.url, fault) as url, pytest.raises(ConfigError, match=match):
            connect_vllm(server, url, **changes)

    raw = _changed_config(lambda config: config["model_config"].update(logprobs_mode="raw_logprobs"), server)
    refused(raw, "--logprobs-mode processed_logprobs")
    half = _changed_config(lambda config: config["model_config"].update(dtype="torch.bfloat16"), server)
    refused(half, "computes in bfloat16, .*--dtype float32")
    refused(_changed_config(lambda config: config.update(lora_config=None), server), "--enable-lora", weights="lora")
    absent = (404, b'{"detail":"Not Found"}')
    refused(lambda path, _: absent if "server_info" in path else None, "VLLM_SERVER_DEV_MODE=1")
    text = b'{"error":{"message":"Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out."}}'
    refused(lambda path, _: (403, text) if "inference" in path else None, "start it with --enable-scale-out")


def test_a_server_without_development_routes_takes_adapters(server: VLLMServer, engine: VLLMServerEngine) -> None:
    def no_routes(path: str, _: bytes) -> tuple[int, bytes] | None:
        return None if path.startswith(("/v1", "/inference")) else (404, b'{"detail":"Not Found"}')

    def raw_log_probs(path: str, body: bytes) -> tuple[int, bytes] | None:
        if path.startswith("/inference") and b'"stream"' not in body:
            changed = json.loads(body)
            changed["sampling_params"]["temperature"] = 1.0
            return 200, json.dumps(server.post(path, changed)).encode()
        return no_routes(path, body)

    with proxy(server.url, no_routes) as url:
        lora, model = connect_vllm(server, url, weights="lora"), adapted(policy(1), seed=5)
        weights = weight_set(model)
        lora.load_weights(weights, weights.tensors)
        assert tokens(run(lora, requests(4), temperature=0.0)) == greedy(model, requests(4))
        lora.close()
    with proxy(server.url, raw_log_probs) as url, pytest.raises(ConfigError, match="log-probs before temperature"):
        connect_vllm(server, url, weights="lora")


def test_a_wrong_key_model_or_address_is_reported(server: VLLMServer, tmp_path: Path) -> None:
    wrong = tmp_path / "key"
    wrong.write_text("another-key-of-the-tests")
    with pytest.raises(AccessRefused, match=r"rollout\.vllm_server\.api_key_file"):
        connect_vllm(server, api_key_file=wrong)
    with pytest.raises(MismatchError, match=r"has no model 'huge', but tiny; rollout\.vllm_server\.model"):
        connect_vllm(server, model="huge")
    with pytest.raises(ServiceUnavailable, match=r"correct rollout\.vllm_server\.url"):
        connect_vllm(server, "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="certificate_authority_file"):
        connect_vllm(server, certificate_authority_file=wrong)


def test_a_server_that_dies_fails_the_generation(server: VLLMServer, engine: VLLMServerEngine) -> None:
    """Last: no other test can use the server afterwards."""
    started = server.has_generated()

    def kill_after_the_first_tokens() -> bool:
        if server.process.poll() is None and started():
            os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait()
        return False

    with pytest.raises(
        ServiceFailed, match=f"vLLM server at {server.url}: .*: the connection ended before the response"
    ):
        list(engine.generate(requests(16), LONG, 0, kill_after_the_first_tokens))
    with pytest.raises(ServiceUnavailable, match="does not respond"):
        run(engine, requests(1))
