"""Commands find a run's gateway, keep its token secret, and report its responses."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from quartet.cli.remote.control import change_settings, send
from quartet.errors import ConfigError, QuartetError, ServiceFailed, ServiceUnavailable
from quartet.gateway.client import TOKEN_VARIABLE, Api, Target, find_run
from quartet.run_directory.locking_and_removal import lock_run_directory
from quartet.run_directory.run_files import RunFiles

SECRET = "a-token-of-twenty-signs"  # pragma: allowlist secret - only for this test
HTTPResponse = tuple[int, str, bytes]


@pytest.fixture
def http_server() -> Iterator[Callable[[Callable[[str], HTTPResponse]], tuple[str, list[str]]]]:
    """Return a function that starts an HTTP server. It returns the server's URL and a list of received Authorization headers."""
    servers: list[ThreadingHTTPServer] = []

    def start(respond: Callable[[str], HTTPResponse]) -> tuple[str, list[str]]:
        authorizations: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                authorizations.append(self.headers["Authorization"])
                status, kind, body = respond(self.path)
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}", authorizations

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def problem_response(status: int, detail: str, *fields: tuple[str, str]) -> HTTPResponse:
    field_errors = [{"field": field, "problem": text} for field, text in fields]
    body = {"type": "about:blank", "title": "", "status": status, "detail": detail, "fields": field_errors}
    return status, "application/problem+json", json.dumps(body).encode()


def json_response(value: Any) -> HTTPResponse:
    return 200, "application/json", json.dumps(value).encode()


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, SECRET)


def test_the_gateway_of_a_run_directory_is_read_from_its_gateway_file(tmp_path: Path) -> None:
    run = tmp_path / "tiny"
    run.mkdir()
    (run / "gateway.json").write_text(json.dumps({"url": "http://127.0.0.1:9", "token": SECRET}))
    result = find_run(str(run))
    assert (result.url, result.token, result.run) == ("http://127.0.0.1:9", SECRET, "tiny")


@pytest.mark.parametrize(
    ("services", "message"),
    [(False, "is not the directory of a run"), (True, "is active but has no gateway; start one with quartet view")],
)
def test_a_directory_without_a_gateway_is_refused_with_the_reason(services: bool, message: str, tmp_path: Path) -> None:
    if services:
        (tmp_path / "services.json").write_text("{}")
    with pytest.raises(ConfigError, match=re.escape(message)):
        find_run(str(tmp_path))


def test_an_active_stage_takes_no_commands(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "sft")
    tree = {"stage": "sft", "run": {"name": "sft", "steps": 9}, "data": {"train": "rows.jsonl"}, "model": {"path": "m"}}
    files.write_config(json.dumps(tree))
    with lock_run_directory(files), pytest.raises(ConfigError) as active:
        find_run(str(files.root))
    assert str(active.value) == (
        f"run {files.root}: a stage is active there; it takes no commands: end it with Ctrl-C (or SIGTERM), and --resume "
        "continues it"
    )
    with pytest.raises(ConfigError, match="is not active: it ended after step 0 of 9; quartet sft"):
        find_run(str(files.root))


@pytest.mark.parametrize(
    ("argument", "run", "expected"),
    [
        ("http://h:1/runs/tiny", None, ("http://h:1", "tiny")),
        ("http://h:1/runs/tiny/", None, ("http://h:1", "tiny")),
        ("http://h:1", "tiny", ("http://h:1", "tiny")),
        ("http://h:1/", None, ("http://h:1", None)),
        ("https://h/behind/a/proxy/runs/tiny", None, ("https://h/behind/a/proxy", "tiny")),
    ],
)
@pytest.mark.usefixtures("token")
def test_a_url_contains_the_gateway_and_the_run(
    argument: str, run: str | None, expected: tuple[str, str | None]
) -> None:
    result = find_run(argument, run)
    assert ((result.url, result.run), result.token) == (expected, SECRET)


@pytest.mark.parametrize(
    ("argument", "options", "message"),
    [
        (f"http://h:1/#token={SECRET}", {}, "the URL contains a token"),
        (f"http://me:{SECRET}@h:1/runs/tiny", {}, "the URL contains a token"),
        ("ftp://h/runs/tiny", {}, "expected http://HOST:PORT/runs/NAME"),
        ("http://h:1/runs/tiny", {"run": "other"}, "names the run tiny"),
        ("runs/tiny", {"run": "other"}, "only used with a URL"),
        ("http://h:1/runs/tiny", {"token_file": Path("/absent/file")}, "--token-file /absent/file: cannot be read"),
        ("http://h:1/runs/tiny", {"token_file": Path("/dev/null")}, "--token-file /dev/null: no token"),
    ],
)
@pytest.mark.usefixtures("token")
def test_invalid_arguments_are_refused_without_repeating_the_token(
    argument: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        find_run(argument, **options)
    assert SECRET not in str(raised.value)


def test_a_url_without_a_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "  "):
        monkeypatch.setenv(TOKEN_VARIABLE, value)
        with pytest.raises(ConfigError, match="no token"):
            find_run("http://h:1/runs/tiny")
    monkeypatch.setenv(TOKEN_VARIABLE, "two\nlines")
    with pytest.raises(ConfigError, match="not a token; expected one line"):
        find_run("http://h:1/runs/tiny")


@pytest.mark.parametrize(
    ("response", "kind", "message"),
    [
        (problem_response(401, "wrong"), ConfigError, "refuses this token"),
        (problem_response(404, "run 'tiny': there is none of this name"), ConfigError, "has no run tiny"),
        (problem_response(409, "run 'tiny': is not active"), ConfigError, "is not active"),
        (
            problem_response(422, "body.x: too high", ("body.x", "too high"), ("body.y", "no")),
            ConfigError,
            ": x: too high; y: no$",
        ),
        (problem_response(429, "too many requests"), ServiceUnavailable, "too many requests"),
        (problem_response(503, "does not respond"), ServiceUnavailable, "does not respond"),
        (problem_response(500, "the gateway failed"), ServiceFailed, "the gateway failed"),
        ((404, "text/html", b"<h1>nginx</h1>"), ConfigError, "not as a Quartet gateway does"),
        ((200, "text/html", b"<h1>hello</h1>"), ConfigError, "is not a Quartet gateway"),
    ],
)
def test_each_http_response_raises_the_matching_error(
    response: HTTPResponse, kind: type[QuartetError], message: str, http_server: Any
) -> None:
    url, authorizations = http_server(lambda _: response)
    with Api(Target(url, url, SECRET, "tiny")) as api, pytest.raises(kind, match=message) as raised:
        api.get()
    assert type(raised.value) is kind
    assert authorizations == [f"Bearer {SECRET}"]


def test_a_url_with_the_scheme_of_tls_says_which_one_the_gateway_has(http_server: Any) -> None:
    url, _ = http_server(lambda _: json_response({}))
    url = url.replace("http://", "https://")
    with (
        Api(Target(url, url, SECRET, "tiny")) as api,
        pytest.raises(ServiceUnavailable, match="give its URL with http://"),
    ):
        api.get()


def test_a_proxy_never_sees_the_token_of_a_gateway_on_this_machine(
    http_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, proxy_authorizations = http_server(lambda _: problem_response(502, "proxy"))
    url, _ = http_server(lambda _: json_response({"step": 1}))
    monkeypatch.setenv("HTTP_PROXY", proxy)
    monkeypatch.setenv("ALL_PROXY", proxy)
    with Api(Target(url, url, SECRET, "tiny")) as api:
        assert api.get() == {"step": 1}
    assert proxy_authorizations == []


def test_a_url_without_a_run_uses_the_run_of_the_gateway(http_server: Any) -> None:
    url, _ = http_server(lambda path: json_response({"run": "tiny"} if path.endswith("/session") else {"path": path}))
    with Api(Target(url, url, SECRET, None)) as api:
        assert api.get("/settings") == {"path": "/api/v1/runs/tiny/settings"}


def test_a_gateway_with_several_runs_needs_a_run_name(http_server: Any) -> None:
    runs = {"items": [{"name": "one"}, {"name": "two"}]}
    url, _ = http_server(lambda path: json_response({"run": None} if path.endswith("/session") else runs))
    with Api(Target(url, url, SECRET, None)) as api, pytest.raises(ConfigError, match="--run: one, two"):
        api.get()


def test_an_unreachable_gateway_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"the gateway at http://127\.0\.0\.1:1 does not respond"):
        send(Target("runs/tiny", "http://127.0.0.1:1", SECRET, "tiny"), "pause")


def test_an_unreachable_gateway_of_an_active_run_suggests_starting_another(tmp_path: Path) -> None:
    run = tmp_path / "tiny"
    run.mkdir()
    (run / "gateway.json").write_text(json.dumps({"url": "http://127.0.0.1:1", "token": SECRET}))
    (run / "services.json").write_text("{}")
    advice = rf"try again\. If the run continues without it, start one with quartet view {re.escape(str(run))}, and give its URL"
    with pytest.raises(ConfigError, match=advice):
        send(find_run(str(run)), "pause")


def test_the_run_name_is_complete_if_the_directory_is_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "tiny"
    run.mkdir()
    (run / "services.json").write_text("{}")
    monkeypatch.chdir(run)
    with pytest.raises(ConfigError, match=r"quartet view \., and give its URL http://HOST:PORT/runs/tiny with"):
        find_run(".")


@pytest.mark.parametrize("wrong", ["kl_coefficient", "=1", "kl_coefficient=much"])
def test_a_setting_change_needs_a_name_and_a_number(wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"^{wrong}: expected SETTING=NUMBER"):
        change_settings(Target("runs/tiny", "http://127.0.0.1:1", SECRET, "tiny"), [wrong])
