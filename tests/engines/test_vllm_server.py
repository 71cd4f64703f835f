"""The client of a vLLM server, against a real one on the CPU."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from quartet.config import VLLMServerConfig
from quartet.engines.vllm_server import VLLMServerEngine, create_vllm_server
from quartet.errors import (
    AccessRefused,
    Cancelled,
    ConfigError,
    InvalidRequest,
    MismatchError,
    ServiceFailed,
    ServiceUnavailable,
)
from quartet.types import GenerationRequest, SamplingParameters, TrajectoryId
from tests.engines.faulty_proxy import Fault, proxy
from tests.engines.remote_policy import (
    EOS,
    POSITIONS,
    VOCABULARY,
    adapted,
    change_adapter,
    greedy,
    log_probs,
    policy,
    requests,
    run,
    served,
    tokens,
    weight_set,
)

PYTHON = Path(os.environ.get("QUARTET_VLLM_PYTHON", "build/vllm-venv/bin/python"))
KEY = "a-key-of-the-tests"  # pragma: allowlist secret - only for the tests' server
START_SECONDS = 300.0
LONG = SamplingParameters(1900, ignore_eos=True)
"""Responses that take seconds."""


@dataclass(frozen=True)
class Server:
    """A vLLM server of the tests."""

    url: str
    process: subprocess.Popen[bytes]
    model: Path
    folder: Path

    def post(self, path: str, body: Any = None) -> Any:
        response = httpx2.post(
            self.url + path, json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=60, trust_env=False
        )
        assert response.is_success, response.text
        return response.json() if response.content.startswith(b"{") else None

    def metric(self, name: str) -> float:
        text = httpx2.get(f"{self.url}/metrics", timeout=30, trust_env=False).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name}{{"))

    def has_generated(self, count: int = 1) -> Callable[[], bool]:
        """Return a function that returns whether the server has generated this many tokens since."""
        before = self.metric("vllm:generation_tokens_total")
        return lambda: self.metric("vllm:generation_tokens_total") >= before + count


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a vLLM server with the development routes and LoRA."""
    if not PYTHON.exists():
        pytest.skip(f"needs an environment with vLLM: {PYTHON} does not exist; QUARTET_VLLM_PYTHON names its Python")
    folder = tmp_path_factory.mktemp("vllm")
    policy(0).save_pretrained(folder / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "--model": str(folder / "model"),
        "--served-model-name": "tiny",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "float32",
        "--max-model-len": str(POSITIONS),
        "--kv-cache-memory-bytes": str(64 * 2**20),
        "--block-size": "32",
        "--generation-config": "vllm",
        "--logprobs-mode": "processed_logprobs",
        "--max-lora-rank": "8",
        "--api-key": KEY,
    }
    flags = ["--skip-tokenizer-init", "--enforce-eager", "--enable-scale-out", "--enable-lora"]
    variables = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", *flags]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *(word for option in options.items() for word in option)],
            env={**os.environ, **variables},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    try:
        while not _is_healthy(url):
            assert process.poll() is None, (folder / "log").read_text()[-3000:]
            assert time.monotonic() < end, "the server does not start"
            time.sleep(0.5)
        yield Server(url, process, folder / "model", folder)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_healthy(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health", timeout=5, trust_env=False).is_success
    except httpx2.HTTPError:
        return False


def connect(server: Server, url: str | None = None, max_in_flight: int = 64, **changes: Any) -> VLLMServerEngine:
    """Return an engine for the server."""
    key = server.folder / "key"
    key.write_text(KEY)
    settings = {"weights_directory": server.folder / "weights", "api_key_file": key, "timeout_seconds": 30.0, **changes}
    return create_vllm_server(VLLMServerConfig(url=url or server.url, **settings), served(server.model), max_in_flight)


@pytest.fixture
def engine(server: Server) -> Iterator[VLLMServerEngine]:
    """Return an engine that holds policy(1)."""
    result = connect(server)
    weights = weight_set(policy(1))
    result.load_weights(weights, weights.tensors)
    yield result
    result.close()


def test_greedy_responses_are_those_of_the_loaded_weights(engine: VLLMServerEngine) -> None:
    batch = requests(24)
    expected = greedy(policy(1), batch)
    assert tokens(run(engine, batch, temperature=0.0)) == expected
    assert len({len(response) for response in expected}) > 1  # some end early
    assert expected != greedy(policy(0), batch)


def test_log_probs_are_those_of_the_policy_at_the_temperature(engine: VLLMServerEngine) -> None:
    for temperature in (0.0, 0.7, 1.0):
        for response in run(engine, requests(8), temperature=temperature):
            assert response.log_probs is not None
            expected = log_probs(policy(1), response, temperature or 1.0)
            assert np.allclose(response.log_probs, expected, atol=1e-3)


def test_truncated_sampling_reports_no_log_probs(engine: VLLMServerEngine) -> None:
    assert {response.log_probs for response in run(engine, requests(4), top_p=0.6)} == {None}
    assert {response.log_probs for response in run(engine, requests(4), top_k=5)} == {None}


def test_responses_depend_on_the_seed_and_not_on_the_batch(engine: VLLMServerEngine) -> None:
    batch = requests(10)
    first = tokens(run(engine, batch))
    assert tokens(run(engine, batch)) == first
    assert tokens(run(engine, batch[3:5])) == first[3:5]
    assert tokens(run(engine, batch, seed=1)) != first
    other = [GenerationRequest(TrajectoryId("run", 0, r.id.prompt, 1), r.prompt_ids) for r in batch]
    assert tokens(run(engine, other)) != first


def test_a_response_ends_with_its_stop_token_or_at_the_limit(engine: VLLMServerEngine) -> None:
    for response in run(engine, requests(40), max_response_tokens=8, temperature=1.0):
        stops = [index for index, token in enumerate(response.token_ids) if token == EOS]
        assert stops == ([len(response.token_ids) - 1] if stops else [])
        assert stops or len(response.token_ids) == 8
    assert {len(ids) for ids in tokens(run(engine, requests(12), ignore_eos=True))} == {12}


def test_new_weights_reset_the_prefix_cache(server: Server, engine: VLLMServerEngine) -> None:
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


def test_only_the_present_policy_version_is_kept_on_disk(server: Server, engine: VLLMServerEngine) -> None:
    for seed in (2, 3):
        weights = weight_set(policy(seed))
        engine.load_weights(weights, weights.tensors)
    folders = [folder for owner in (server.folder / "weights").iterdir() for folder in owner.iterdir()]
    assert [folder.name for folder in folders] == [weights.digest.hex()]
    assert {file.name for file in folders[0].iterdir()} >= {"config.json", "model.safetensors"}
    engine.close()
    assert not list((server.folder / "weights").iterdir())


def test_adapters_are_loaded_by_their_digest(server: Server) -> None:
    engine, model = connect(server, weights="lora"), adapted(policy(0), seed=5)
    base = weight_set(policy(0))
    full = connect(server)
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


def test_the_base_model_of_an_adapter_is_compared(server: Server, engine: VLLMServerEngine) -> None:
    lora = connect(server, weights="lora")
    weights = weight_set(adapted(policy(0), seed=5))  # the server holds policy(1)
    with pytest.raises(ServiceFailed, match="holds other values"):
        lora.load_weights(weights, weights.tensors)
    lora.close()


def test_the_engine_works_after_a_cancelled_generation(server: Server, engine: VLLMServerEngine) -> None:
    started = server.has_generated()
    with pytest.raises(Cancelled):
        list(engine.generate(requests(16), LONG, 0, started))
    assert len(run(engine, requests(4))) == 4
    deadline = time.monotonic() + 10
    while server.metric("vllm:num_requests_running"):
        assert time.monotonic() < deadline, "the server still runs cancelled requests"
        time.sleep(0.05)


def test_the_engine_works_after_a_caller_stops_reading(engine: VLLMServerEngine) -> None:
    running = engine.generate(requests(8), SamplingParameters(20), 0, lambda: False)
    next(running)
    getattr(running, "close")()  # noqa: B009
    assert len(run(engine, requests(4))) == 4


def test_a_request_waits_for_its_turn(server: Server) -> None:
    narrow, weights = connect(server, max_in_flight=2), weight_set(policy(1))
    narrow.load_weights(weights, weights.tensors)
    assert len(run(narrow, requests(7))) == 7
    narrow.close()


@pytest.mark.parametrize(
    ("prompt", "limit", "message"),
    [
        ([3] * (POSITIONS - 5), 10, f"positions for {POSITIONS}"),
        ([], 5, "at least one token"),
        ([3, VOCABULARY], 5, "vocabulary"),
        ([-1], 5, "vocabulary"),
        ([3], 0, "max_response_tokens"),
    ],
)
def test_an_invalid_request_is_refused_at_the_call(
    engine: VLLMServerEngine, prompt: list[int], limit: int, message: str
) -> None:
    batch = [GenerationRequest(TrajectoryId("r", 0, 0, 0), np.array(prompt, np.int32))]
    with pytest.raises(InvalidRequest, match=message):
        engine.generate(batch, SamplingParameters(limit), 0, lambda: False)


def test_no_requests_give_no_responses(engine: VLLMServerEngine) -> None:
    assert run(engine, []) == []


def test_weights_that_another_client_changed_are_refused(server: Server, engine: VLLMServerEngine) -> None:
    other, weights = connect(server), weight_set(policy(2))
    other.load_weights(weights, weights.tensors)
    with pytest.raises(ServiceFailed, match="another client changed the weights"):
        run(engine, requests(4))
    other.close()


def test_generation_needs_weights(server: Server) -> None:
    empty = connect(server)
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
    server: Server, monkeypatch: pytest.MonkeyPatch, fault: Fault, when: str, message: str
) -> None:
    monkeypatch.setattr("quartet.engines.vllm_server._CACHE_RESET_SECONDS", 0.2)
    active = False
    with proxy(server.url, lambda path, body: fault(path, body) if active else None) as url:
        engine, former, weights = connect(server, url), weight_set(policy(2)), weight_set(policy(3))
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


def _changed_config(change: Callable[[dict[str, Any]], None], server: Server) -> Fault:
    text = httpx2.get(f"{server.url}/server_info?config_format=json", timeout=60, trust_env=False).text
    answer = json.loads(text)
    change(answer["vllm_config"])
    return lambda path, _: (200, json.dumps(answer).encode()) if path.startswith("/server_info") else None


def test_settings_of_the_server_that_do_not_fit_are_refused(server: Server) -> None:
    def refused(fault: Fault, match: str, **changes: Any) -> None:
        with proxy(server.url, fault) as url, pytest.raises(ConfigError, match=match):
            connect(server, url, **changes)

    raw = _changed_config(lambda config: config["model_config"].update(logprobs_mode="raw_logprobs"), server)
    refused(raw, "--logprobs-mode processed_logprobs")
    half = _changed_config(lambda config: config["model_config"].update(dtype="torch.bfloat16"), server)
    refused(half, "computes in bfloat16, .*--dtype float32")
    refused(_changed_config(lambda config: config.update(lora_config=None), server), "--enable-lora", weights="lora")
    absent = (404, b'{"detail":"Not Found"}')
    refused(lambda path, _: absent if "server_info" in path else None, "VLLM_SERVER_DEV_MODE=1")
    text = b'{"error":{"message":"Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out."}}'
    refused(lambda path, _: (403, text) if "inference" in path else None, "start it with --enable-scale-out")


def test_a_server_without_development_routes_takes_adapters(server: Server, engine: VLLMServerEngine) -> None:
    def no_routes(path: str, _: bytes) -> tuple[int, bytes] | None:
        return None if path.startswith(("/v1", "/inference")) else (404, b'{"detail":"Not Found"}')

    def raw_log_probs(path: str, body: bytes) -> tuple[int, bytes] | None:
        if path.startswith("/inference") and b'"stream"' not in body:
            changed = json.loads(body)
            changed["sampling_params"]["temperature"] = 1.0
            return 200, json.dumps(server.post(path, changed)).encode()
        return no_routes(path, body)

    with proxy(server.url, no_routes) as url:
        lora, model = connect(server, url, weights="lora"), adapted(policy(1), seed=5)
        weights = weight_set(model)
        lora.load_weights(weights, weights.tensors)
        assert tokens(run(lora, requests(4), temperature=0.0)) == greedy(model, requests(4))
        lora.close()
    with proxy(server.url, raw_log_probs) as url, pytest.raises(ConfigError, match="log-probs before temperature"):
        connect(server, url, weights="lora")


def test_a_wrong_key_model_or_address_is_reported(server: Server, tmp_path: Path) -> None:
    wrong = tmp_path / "key"
    wrong.write_text("another-key-of-the-tests")
    with pytest.raises(AccessRefused, match=r"rollout\.vllm_server\.api_key_file"):
        connect(server, api_key_file=wrong)
    with pytest.raises(MismatchError, match=r"has no model 'huge', but tiny; rollout\.vllm_server\.model"):
        connect(server, model="huge")
    with pytest.raises(ServiceUnavailable, match=r"correct rollout\.vllm_server\.url"):
        connect(server, "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="certificate_authority_file"):
        connect(server, certificate_authority_file=wrong)


def test_a_server_that_dies_fails_the_generation(server: Server, engine: VLLMServerEngine) -> None:
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
