"""Downloads of models and data: from a server that answers as the hub does, and from a file server with TLS and ranges."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from quartet.errors import ConfigError, ServiceUnavailable
from quartet.model_files import downloads
from quartet.model_files.downloads import Download, fetch, main, parse, wait
from tests.every_case import every_case
from tests.unit.model_files.test_hub_models import Hub, hub, policy
from tests.waiting import LIMIT

__all__ = ["hub", "policy"]

CONTENT = bytes(range(256)) * 400


class FileServer(ThreadingHTTPServer):
    """Serve CONTENT with TLS, an ETag and ranges. ``cut`` is the number of bytes after which it ends the connection."""

    def __init__(self, certificate: Path) -> None:
        super().__init__(("127.0.0.1", 0), _FileHandler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.cut: int | None = None
        self.etag = '"first"'
        self.status = 200
        self.redirect = ""
        self.requests: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.server_port}"


class _FileHandler(BaseHTTPRequestHandler):
    server: FileServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append(headers)
        if self.server.redirect:
            self._head(302, {"Location": self.server.redirect, "Content-Length": "0"})
            return
        if self.server.status != 200:
            self._head(self.server.status, {"Content-Length": "0"})
            return
        start = int(headers.get("range", "bytes=0-")[6:-1])
        if headers.get("if-range", self.server.etag) != self.server.etag:
            start = 0
        if start >= len(CONTENT):
            self._head(416, {"Content-Length": "0"})
            return
        body = CONTENT[start:]
        self._head(206 if start else 200, {"Content-Length": str(len(body)), "ETag": self.server.etag})
        self.wfile.write(body[: self.server.cut])
        self.close_connection = True

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    certificate = _certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    server = FileServer(certificate)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def _certificate(folder: Path) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / "server.pem"
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return path


@pytest.fixture(autouse=True)
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, as in a pod."""
    folder = tmp_path / "volume"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(downloads, "SECRETS", tmp_path / "secrets")
    return folder


def files(folder: Path) -> set[str]:
    """Return the paths of all files below a folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_model_of_the_hub_is_downloaded_once(hub: Hub, policy: str, volume: Path) -> None:
    model = hub.models[policy]
    (model / "pytorch_model.bin").write_bytes(b"a pickle")
    (model / "modeling.py").write_text("print('code')", encoding="utf-8")
    assert main(["models/policy=hf://owner/policy"]) == 0
    expected = files(model) - {"pytorch_model.bin", "modeling.py", "consolidated.safetensors"}
    assert files(volume / "models/policy") == expected
    assert (volume / "models/policy/model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    requests = len(hub.requests)
    assert main(["models/policy=hf://owner/policy"]) == 0
    assert len(hub.requests) == requests
    assert not (volume / "models/.policy.partial").exists()


def test_a_model_without_safetensors_is_refused(
    hub: Hub, policy: str, volume: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (hub.models[policy] / "model.safetensors").unlink()
    assert main(["models/policy=hf://owner/policy"]) == 1
    assert "expected config.json, a tokenizer and safetensors files" in capsys.readouterr().err
    assert not (volume / "models/policy").exists()


def test_an_unknown_repository_names_what_to_correct(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models/policy=hf://owner/other"]) == 1
    message = capsys.readouterr().err
    assert "models/policy: hf://owner/other does not exist, or this token may not read it" in message
    assert "hf_token" in message


def test_a_file_is_downloaded_and_compared_with_its_digest(server: FileServer, volume: Path) -> None:
    source = f"{server.url}/prompts.jsonl#sha256={sha256(CONTENT).hexdigest()}"
    fetch(Download(Path("data/prompts.jsonl"), source))
    assert (volume / "data/prompts.jsonl").read_bytes() == CONTENT
    with pytest.raises(ConfigError, match=rf"has sha256={sha256(CONTENT).hexdigest()}; expected sha256=00"):
        fetch(Download(Path("data/other.jsonl"), f"{server.url}/prompts.jsonl#sha256=00"))
    assert not (volume / "data/other.jsonl").exists()


@pytest.mark.parametrize("changed", [False, True])
def test_an_interrupted_download_continues_unless_the_file_changed(
    server: FileServer, volume: Path, changed: bool
) -> None:
    download = Download(Path("data/prompts.jsonl"), f"{server.url}/prompts.jsonl")
    server.cut = 5000
    with pytest.raises(ServiceUnavailable, match="failed"):
        fetch(download)
    assert not (volume / "data/prompts.jsonl").exists()
    size = (volume / "data/.prompts.jsonl.partial").stat().st_size
    assert 0 < size <= 5000
    server.cut = None
    if changed:
        server.etag = '"second"'
    fetch(download)
    assert server.requests[-1]["range"] == f"bytes={size}-"
    assert server.requests[-1]["if-range"] == '"first"'
    assert (volume / "data/prompts.jsonl").read_bytes() == CONTENT
    assert files(volume) == {"data/prompts.jsonl", "data/.prompts.jsonl.source", "data/.prompts.jsonl.lock"}


def test_a_complete_partial_file_is_not_downloaded_again(server: FileServer, volume: Path) -> None:
    (volume / "data").mkdir()
    (volume / "data/.a.json.partial").write_bytes(CONTENT)
    (volume / "data/.a.json.partial.etag").write_text('"first"', encoding="utf-8")
    fetch(Download(Path("data/a.json"), f"{server.url}/a.json"))
    assert (volume / "data/a.json").read_bytes() == CONTENT


def test_the_secret_is_sent_as_the_header(server: FileServer, tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "authorization").write_text("Bearer sesame\n", encoding="utf-8")
    fetch(Download(Path("data/a.json"), f"{server.url}/a.json"), secrets)
    assert server.requests[0]["authorization"] == "Bearer sesame"


def test_a_redirect_to_an_address_without_tls_is_refused(server: FileServer, hub: Hub) -> None:
    server.redirect = f"{hub.url}/a.json"
    with pytest.raises(ConfigError, match="redirects to an address without TLS"):
        fetch(Download(Path("data/a.json"), f"{server.url}/a.json"))


@pytest.mark.parametrize(("status", "error"), [(404, ConfigError), (403, ConfigError), (503, ServiceUnavailable)])
def test_a_refused_request_names_its_status(server: FileServer, status: int, error: type[Exception]) -> None:
    server.status = status
    with pytest.raises(error, match=f"answered {status}"):
        fetch(Download(Path("data/a.json"), f"{server.url}/a.json"))


@every_case("name", ["model.bin", "model.pt", "weights.pkl", "setup.py", "archive.tar.gz", "a.sh"])
def test_a_file_that_may_contain_code_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"expected one of .*\.jsonl"):
        fetch(Download(Path("data/file"), f"https://127.0.0.1:1/{name}"))


def test_what_another_program_copied_is_renamed_when_it_is_complete(volume: Path) -> None:
    download = Download(Path("models/policy"), "s3://bucket/policy/")
    with pytest.raises(ConfigError, match="has no files of the expected types"):
        fetch(download)
    download.partial.mkdir()
    (download.partial / "config.json").write_text("{}", encoding="utf-8")
    fetch(download)
    assert files(volume / "models/policy") == {"config.json"}


def test_files_of_the_user_are_kept(volume: Path) -> None:
    (volume / "models/policy").mkdir(parents=True)
    assert main(["models/policy=hf://owner/policy"]) == 0
    assert main(["--wait", "models/policy=hf://owner/policy"]) == 0
    assert files(volume / "models/policy") == set()


def test_a_target_of_another_source_is_refused(volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    download = Download(Path("models/policy"), "s3://bucket/policy/")
    download.target.parent.mkdir()
    download.partial.mkdir()
    fetch(download)
    for arguments in (["models/policy=hf://owner/policy"], ["--wait", "models/policy=hf://owner/policy"]):
        assert main(arguments) == 1
        assert "comes from s3://bucket/policy/, but the source is hf://owner/policy" in capsys.readouterr().err


def test_waiting_ends_when_the_last_target_is_complete(
    volume: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(downloads, "POLL_SECONDS", 0.01)
    models = Download(Path("models/policy"), "s3://bucket/policy/")
    data = Download(Path("data/a.json"), "s3://bucket/a.json")
    models.target.mkdir(parents=True)
    thread = threading.Thread(target=wait, args=([models, data],))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    data.target.parent.mkdir()
    data.partial.write_text("{}", encoding="utf-8")
    fetch(data)
    thread.join(LIMIT)
    assert not thread.is_alive()
    assert capsys.readouterr().out.startswith("waiting for data/a.json; ")


@every_case(
    "argument",
    ["models=hf://a/b", "/models/a=hf://a/b", "models/../a=hf://a/b", "models/a=http://a/b.json", "models/a", ""],
)
def test_a_malformed_argument_is_refused(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        parse(argument)
    assert main([argument]) == 2


@every_case(
    "source", ["hf://policy", "hf://owner/policy/file.json", "hf://owner/policy@a/b/c", "hf://datasets/a/b/c.py"]
)
def test_a_malformed_hub_source_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        fetch(Download(Path("models/policy"), source))
