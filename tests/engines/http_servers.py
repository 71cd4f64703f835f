"""Connections to the HTTP servers of the tests: a real vLLM server on the CPU, and the stand-in for SGLang."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from quartet.config.rollout import SGLangServerConfig, VLLMServerConfig
from quartet.contrib.sglang.engine import SGLangServerEngine
from quartet.engines.http_client import engine_server
from quartet.engines.vllm_server import VLLMServerEngine
from tests.engines.remote_policy import EOS, POSITIONS, policy, served
from tests.engines.sglang_server import SGLangServer
from tests.waiting import LIMIT

PYTHON = Path(os.environ.get("QUARTET_VLLM_PYTHON", "build/vllm-venv/bin/python"))
KEY = "a-key-of-the-tests"  # pragma: allowlist secret - only for the tests' server
START_SECONDS = 300.0


@dataclass(frozen=True)
class VLLMServer:
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
        text = httpx2.get(f"{self.url}/metrics", timeout=LIMIT, trust_env=False).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name}{{"))

    def has_generated(self, count: int = 1) -> Callable[[], bool]:
        """Return a function that returns whether the server has generated this many tokens since."""
        before = self.metric("vllm:generation_tokens_total")
        return lambda: self.metric("vllm:generation_tokens_total") >= before + count


@contextmanager
def vllm_server(folder: Path) -> Iterator[VLLMServer]:
    """Start a vLLM server with the development routes and LoRA. ``folder`` is for its files."""
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
        yield VLLMServer(url, process, folder / "model", folder)
    finally:
        # A test may have killed it.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_healthy(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health", timeout=5, trust_env=False).is_success
    except httpx2.HTTPError:
        return False


def connect_vllm(
    server: VLLMServer, url: str | None = None, max_in_flight: int = 64, **changes: Any
) -> VLLMServerEngine:
    """Return an engine for the server."""
    key = server.folder / "key"
    key.write_text(KEY)
    settings = {"weights_directory": server.folder / "weights", "api_key_file": key, "timeout_seconds": 30.0, **changes}
    config = VLLMServerConfig(url=url or server.url, **settings)
    options = {"model": config.model, "verify_weights": config.verify_weights}
    return VLLMServerEngine(
        engine_server(config, "vLLM", "rollout.vllm_server", max_in_flight, **options), served(server.model)
    )


def sglang_policy(seed: int) -> Any:
    """Return a policy whose checkpoint has its stop token as EOS. SGLang would stop at any other, too."""
    model = policy(seed)
    model.config.eos_token_id = model.generation_config.eos_token_id = EOS
    return model


def connect_sglang(server: SGLangServer, tmp_path: Path, url: str | None = None, **changes: Any) -> SGLangServerEngine:
    """Return an engine for the server."""
    key = tmp_path / "key"
    key.write_text(KEY)
    settings = {"weights_directory": tmp_path / "weights", "api_key_file": key, "timeout_seconds": 20.0, **changes}
    config = SGLangServerConfig(url=url or server.url, **settings)
    return SGLangServerEngine(
        engine_server(config, "SGLang", "rollout.sglang_server", 64), served(server.launch.model_path)
    )
