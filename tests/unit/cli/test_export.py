"""The model card of an exported policy, and its upload to a real HTTP server that answers as the hub does."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import yaml
from huggingface_hub import ModelCard

from quartet.cli.checkpoint.export import check_push, push
from quartet.cli.checkpoint.model_card import write_model_card
from quartet.config.loading import parse_config
from quartet.errors import ConfigError, ServiceUnavailable
from quartet.run_directory.identity import Identity
from quartet.run_directory.run_files import RunFiles

TOKEN = "hf_not_a_real_token"  # pragma: allowlist secret - made up for this test
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """A hub that accepts uploads to a model with ``files``. ``status`` is that of every answer if it is not 0."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, str, str, bytes]] = []
        self.status = 0
        self.files: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def body_of(self, method: str, path: str) -> bytes:
        [body] = [body for verb, where, _, body in self.requests if (verb, where) == (method, path)]
        return body


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(iter(self._chunk, b""))
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append((self.command, path, self.headers.get("Authorization", ""), body))
        status = self.server.status or 200
        answer = json.dumps(self._content(path, body) if status == 200 else {"error": "not yours"}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _chunk(self) -> bytes:
        size = int(self.rfile.readline(), 16)
        data = self.rfile.read(size)
        self.rfile.readline()
        return data

    def _content(self, path: str, body: bytes) -> Any:
        if path == "/api/repos/create":
            return {"url": f"{self.server.url}/me/tiny", "name": "me/tiny", "id": "1"}
        if path.endswith("/preupload/main"):
            files = [file["path"] for file in json.loads(body)["files"]]
            return {"files": [{"path": file, "uploadMode": "regular", "shouldIgnore": False} for file in files]}
        if path.endswith("/commit/main"):
            return {"commitUrl": f"{self.server.url}/me/tiny/commit/{COMMIT}", "commitOid": COMMIT, "success": True}
        if path.startswith("/api/models/me/tiny/tree/"):
            return [{"type": "file", "path": name, "size": 1, "oid": COMMIT} for name in self.server.files]
        if path.startswith("/api/models/"):
            return {"id": "me/tiny", "sha": COMMIT, "siblings": []}
        return {}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no_login"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """An exported policy: a model card of a run of twelve steps, and weights."""
    prompts = tmp_path / "private" / "prompts.jsonl"
    prompts.parent.mkdir()
    prompts.write_text('{"text": "hello"}\n')
    config = parse_config(
        {
            "run": {"name": "tiny", "steps": 12},
            "data": {"prompts": str(prompts)},
            "actor": {"model": "someone/base"},
            "reward": {"model": str(prompts.parent / "judge")},
        },
        "test",
    )
    files = RunFiles(tmp_path / "run")
    files.write_config(config.to_yaml())
    Identity.new(config, {}).write(files.identity)
    for step in range(1, 13):
        files.append_metrics({"step": step, "reward_mean": float(step), "kl_mean": 0.5 * step})
    files.write_evaluation(0, {"eval_reward_greedy": 1.25}, [])
    files.write_evaluation(8, {"eval_reward_greedy": 2.75}, [])
    files.write_evaluation(12, {"eval_reward_greedy": 9.0}, [])
    (tmp_path / "exported").mkdir()
    write_model_card(tmp_path / "exported", files, 10)
    (tmp_path / "exported" / "model.safetensors").write_bytes(b"weights")
    return tmp_path / "exported"


def test_the_model_card_of_a_distillation_names_its_teacher_and_no_reward(tmp_path: Path) -> None:
    tree = {
        "run": {"name": "tiny", "steps": 1},
        "data": {"prompts": "prompts.jsonl"},
        "actor": {"model": "someone/student"},
        "reference": {"model": str(tmp_path / "private" / "teacher")},
        "algorithm": {"estimator": "reinforce", "kl_coefficient": 0, "distillation": {}},
        "reward": {"source": "none"},
    }
    files = RunFiles(tmp_path / "run")
    files.write_config(parse_config(tree, "test").to_yaml())
    files.append_metrics({"step": 1, "kl_mean": 0.5})
    write_model_card(tmp_path, files, 1)
    card = (tmp_path / "README.md").read_text()
    assert "| teacher | `teacher` |" in card
    assert "| reward | none |" in card


def test_the_model_card_describes_the_run_up_to_the_step(exported: Path) -> None:
    card = ModelCard.load(exported / "README.md")
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "someone/base",
        "tags": ["quartet", "rlhf", "ppo"],
    }
    for part in ("`tiny`, step 10 of 12, seed 0", "model `judge`", "`prompts.jsonl`, SHA-256 `", "Quartet 0."):
        assert part in card.text
    assert "| reward | 3 | 8 |" in card.text, "the means of the first and last five steps up to step 10"
    assert "| reward greedy | 1.25 | 2.75 |" in card.text, "the evaluation after step 10 is of another policy"
    settings = yaml.safe_load(card.text.partition("```yaml\n")[2].partition("```")[0])
    assert settings["actor.model"] == "someone/base"
    assert settings["algorithm.estimator"] == "gae"
    assert "private" not in card.content, "the card has a local path"
    assert (exported / "curves.svg").read_text().count("<polyline") == 2


def test_an_upload_creates_a_private_model_and_commits_every_file(exported: Path, hub: Hub) -> None:
    check_push("me/tiny")
    assert push(exported, "me/tiny", private=True, message="step 10") == f"{hub.url}/me/tiny"
    created = json.loads(hub.body_of("POST", "/api/repos/create"))
    assert created == {"name": "tiny", "organization": "me", "visibility": "private"}
    lines = [json.loads(line) for line in hub.body_of("POST", "/api/models/me/tiny/commit/main").splitlines()]
    assert lines[0]["value"]["summary"] == "step 10"
    uploaded = {
        line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines if line["key"] == "file"
    }
    assert uploaded == {path.name: path.read_bytes() for path in exported.iterdir()}
    changes = [request for request in hub.requests if request[1].startswith(("/api/repos/", "/api/models/"))]
    assert {authorization for _, _, authorization, _ in changes} == {f"Bearer {TOKEN}"}
    assert not any(TOKEN.encode() in body for _, _, _, body in hub.requests)


def test_local_paths_stay_private_when_the_run_is_exported_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work" / "models" / "policy").mkdir(parents=True)
    (tmp_path / "work" / "private").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    Path("private/prompts.jsonl").write_text('{"text": "hello"}\n')
    data = {"prompts": "private/prompts.jsonl", "validation": "private/held_out.jsonl"}
    tree = {"data": data, "actor": {"model": "models/policy"}, "reward": {"model": "someone/judge"}}
    config = parse_config(tree, "test")
    files = RunFiles(tmp_path / "run")
    files.write_config(config.to_yaml())
    Identity.new(config, {}).write(files.identity)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone").mkdir()  # Here, the hub id looks like a path.
    write_model_card(tmp_path, files, 10)
    card = ModelCard.load(tmp_path / "README.md")
    assert "base_model" not in card.data.to_dict()
    assert "models/" not in card.content
    assert "private" not in card.content
    assert "| initial policy | `policy` |" in card.text
    assert "| reward | model `someone/judge` |" in card.text
    settings = yaml.safe_load(card.text.partition("```yaml\n")[2].partition("```")[0])
    assert (settings["actor.model"], settings["reward.model"]) == ("policy", "someone/judge")
    assert settings["data.validation"] == "held_out.jsonl"


def test_an_upload_deletes_the_weights_of_an_earlier_one(exported: Path, hub: Hub) -> None:
    shards = ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    hub.files = [
        "model.safetensors",
        *shards,
        "adapter_config.json",
        "config.json",
        "notes.md",
        "gguf/model.safetensors",
    ]
    push(exported, "me/tiny", private=True, message="step 10")
    lines = [json.loads(line) for line in hub.body_of("POST", "/api/models/me/tiny/commit/main").splitlines()]
    deleted = {line["value"]["path"] for line in lines if line["key"] == "deletedFile"}
    assert deleted == {*shards, "adapter_config.json"}, "model.safetensors is replaced, other files stay"


@pytest.mark.parametrize(
    ("status", "kind", "text"),
    [(403, ConfigError, "the hub refuses it (not yours)"), (500, ServiceUnavailable, "the hub failed")],
)
def test_a_refused_upload_names_the_reason_and_not_the_token(
    status: int, kind: type[Exception], text: str, exported: Path, hub: Hub
) -> None:
    hub.status = status
    with pytest.raises(kind) as raised:
        push(exported, "me/tiny", private=True, message="m")
    assert text in str(raised.value)
    assert TOKEN not in str(raised.value)


def test_an_upload_needs_a_token_and_a_valid_name(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="expected OWNER/NAME"):
        check_push("me/tiny/extra")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ConfigError, match="log in with `hf auth login`, or set HF_TOKEN"):
        check_push("me/tiny")
    assert hub.requests == []
