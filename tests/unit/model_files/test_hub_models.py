"""Models on the hub: a real HTTP server answers as the hub does for the requests of huggingface_hub."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from quartet.errors import ModelError
from quartet.model_files import hub_models
from quartet.model_files.hub_models import cached_snapshot, hub_directory
from quartet.models.weights.loading import load_causal_lm
from quartet.models.weights.tokenizer import load_tokenizer
from tests.unit.models import tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Server of directories as models of the hub. ``refused`` is the status and error code of every answer if it is set."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models: dict[str, Path] = {}
        self.refused: tuple[int, str] | None = None
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.server.requests.append(path)
        status, body, headers = self._content(path)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _content(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        if self.server.refused is not None:
            status, code = self.server.refused
            return status, b"{}", {"X-Error-Code": code}
        for name, directory in self.server.models.items():
            if path.startswith(f"/api/models/{name}"):
                files = [{"rfilename": file.name} for file in sorted(directory.iterdir())]
                body = {"id": name, "modelId": name, "sha": COMMIT, "siblings": files}
                if "/tree/" in path:
                    entries = [
                        {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0" * 40}
                        for file in sorted(directory.iterdir())
                    ]
                    return 200, json.dumps(entries).encode(), {"Content-Type": "application/json"}
                return 200, json.dumps(body).encode(), {"Content-Type": "application/json"}
            file = directory / path.rpartition("/")[2]
            if path.startswith(f"/{name}/resolve/") and file.is_file():
                content = file.read_bytes()
                return 200, content, {"ETag": f'"{sha256(content).hexdigest()}"'}
        return 404, b"{}", {"X-Error-Code": "RepoNotFound"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    use_endpoint(monkeypatch, server.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def use_endpoint(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    monkeypatch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )


@pytest.fixture
def policy(hub: Hub, tmp_path: Path) -> str:
    """Put a policy on the hub and return its id."""
    tiny.saved(tiny.causal("llama"), tmp_path / "policy")
    tiny.tokenizer().save_pretrained(tmp_path / "policy")
    (tmp_path / "policy/consolidated.safetensors").write_bytes(b"another format")
    hub.models["owner/policy"] = tmp_path / "policy"
    return "owner/policy"


def test_a_hub_model_is_downloaded_once_and_then_used_without_the_hub(hub: Hub, policy: str) -> None:
    assert load_causal_lm(policy).config.model_type == "llama"
    assert load_tokenizer(policy)("w5").input_ids == [5]
    asked = len(hub.requests)
    load_causal_lm(policy)
    assert len(hub.requests) == asked


def test_a_check_downloads_no_weights_and_loading_downloads_those_of_transformers_only(hub: Hub, policy: str) -> None:
    assert not list(hub_directory(policy, weights=False).glob("*.safetensors"))
    assert [file.name for file in hub_directory(policy).glob("*.safetensors")] == ["model.safetensors"]


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json"])
def test_an_incomplete_model_in_the_cache_is_completed(hub: Hub, policy: str, missing: str, tmp_path: Path) -> None:
    # As transformers and others leave it: single files, without a list of what is missing.
    snapshot = tmp_path / "cache/models--owner--policy/snapshots" / COMMIT
    shutil.copytree(hub.models[policy], snapshot)
    (snapshot / missing).unlink()
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs/main").write_text(COMMIT)
    assert load_causal_lm(policy).config.model_type == "llama"
    assert load_tokenizer(policy)("w5").input_ids == [5]


def test_an_unknown_model_is_named(hub: Hub) -> None:
    with pytest.raises(ModelError, match=r"^owner/none: no such directory, and no such model on the hub"):
        hub_directory("owner/none")


def test_a_gated_model_names_the_login(hub: Hub) -> None:
    hub.refused = (403, "GatedRepo")
    with pytest.raises(ModelError, match=r"access to this model must be granted; accept its terms .*hf auth login"):
        hub_directory("owner/gated")


def test_a_model_without_safetensors_names_the_remedy(hub: Hub, policy: str) -> None:
    weights = hub.models[policy] / "model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))
    with pytest.raises(ModelError, match=r"no safetensors files; convert it"):
        hub_directory(policy)


def test_an_unreachable_hub_names_the_download_command(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    use_endpoint(monkeypatch, url)
    with pytest.raises(ModelError, match=r"the hub cannot be reached .* run `hf download owner/policy --local-dir"):
        hub_directory("owner/policy")


def test_a_hub_that_does_not_answer_fails_in_time(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_models, "TIMEOUT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use_endpoint(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(ModelError, match=r"the hub cannot be reached"):
            hub_directory("owner/policy")
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, ".cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "~/xdg"}, "xdg/huggingface/hub"),
        ({"XDG_CACHE_HOME": "~/xdg", "HF_HOME": "~/home"}, "home/hub"),
        ({"HF_HOME": "~/home", "HF_HUB_CACHE": "$HOME/hub"}, "hub"),
    ],
)
def test_a_snapshot_is_found_where_huggingface_hub_stores_it(
    variables: dict[str, str], folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": str(tmp_path)} | variables).items():
        monkeypatch.setenv(name, value)
    repository = tmp_path / folder / "models--owner--name"
    assert cached_snapshot("owner/name") is None
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("a" * 40)
    assert cached_snapshot("owner/name") is None
    (repository / "snapshots" / ("a" * 40)).mkdir(parents=True)
    assert cached_snapshot("owner/name") == repository / "snapshots" / ("a" * 40)
    (repository / "refs/main").write_text("../../..")
    assert cached_snapshot("owner/name") is None
    assert cached_snapshot("../owner/name") is None
