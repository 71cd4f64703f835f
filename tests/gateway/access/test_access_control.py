"""Every path except the dashboard files requires a token, a known host and the same origin."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from quartet.gateway.access.access_control import MAX_WRONG_TOKENS, SECURITY_HEADERS
from quartet.gateway.access.body_limits import MAX_BODY_BYTES
from tests.every_case import every_case
from tests.gateway.serving import TOKEN, Gateway, create_run, serving

VIEWER_TOKEN = "the-token-of-the-viewer"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("runs")
    create_run(folder, steps=2)
    with serving(folder, viewer_token=VIEWER_TOKEN, allowed_hosts=("Quartet.Example",)) as result:
        yield result


def send(
    gateway: Gateway, path: str, method: str = "GET", token: str | None = TOKEN, body: Any = None, **headers: str
) -> http.client.HTTPResponse:
    """Send a request with exactly these headers; ``x_y`` becomes ``x-y``."""
    connection = http.client.HTTPConnection(gateway.address, timeout=10)
    all_headers = {name.replace("_", "-"): value for name, value in headers.items()}
    if token is not None:
        all_headers["authorization"] = f"Bearer {token}"
    connection.request(method, path, body=body, headers=all_headers)
    response = connection.getresponse()
    response.content = response.read()  # type: ignore[attr-defined]
    connection.close()
    return response


@every_case("path", ["/api/v1/session", "/api/v1/runs/some/events", "/api/v1/openapi.json", "/metrics", "/else"])
@every_case("token", [None, "", "wrong", TOKEN[:-1], TOKEN + "x", "tökén-tökén-tökén".encode().decode("latin-1")])
def test_a_request_without_a_valid_token_gets_no_data(gateway: Gateway, path: str, token: str | None) -> None:
    response = send(gateway, path, token=token)
    assert response.status in (401, 429)
    assert response.headers["content-type"] == "application/problem+json"
    if response.status == 401:
        assert response.headers["www-authenticate"] == "Bearer"
    assert b"some" not in response.content  # type: ignore[attr-defined]


@pytest.mark.parametrize("header", [f"Basic {TOKEN}", TOKEN, f"Bearer{TOKEN}"])
def test_only_a_bearer_token_is_accepted(tmp_path: Path, header: str) -> None:
    with serving(tmp_path) as gateway:
        assert send(gateway, "/api/v1/session", token=None, authorization=header).status == 401
        assert send(gateway, f"/api/v1/session?token={TOKEN}", token=None).status == 401


def test_dashboard_files_and_health_need_no_token(gateway: Gateway) -> None:
    for path in ("/", "/static/plotly.min.js", "/healthz"):
        assert send(gateway, path, token=None).status == 200
    assert send(gateway, "/", method="HEAD", token=None).status == 200
    assert send(gateway, "/", method="POST", token=None).status == 401


@pytest.mark.parametrize(
    "name",
    [
        "../models.py",
        "..%2fmodels.py",
        "%2e%2e/models.py",
        "/etc/passwd",
        "%2fetc/passwd",
        ".hidden",
        "a%00.js",
        "none.js",
        "",
    ],
)
def test_only_files_of_the_static_folder_are_served(gateway: Gateway, name: str) -> None:
    response = send(gateway, f"/static/{name}", token=None)
    assert response.status == 404
    assert b"class" not in response.content  # type: ignore[attr-defined]


def test_a_viewer_cannot_send_commands(gateway: Gateway) -> None:
    session = send(gateway, "/api/v1/session", token=VIEWER_TOKEN)
    assert json.loads(session.content)["access"] == "viewer"  # type: ignore[attr-defined]
    for method, path in (
        ("POST", "/runs/some/pause"),
        ("PATCH", "/runs/some/settings"),
        ("POST", "/runs"),
        ("DELETE", "/runs"),
    ):
        response = send(
            gateway, f"/api/v1{path}", method=method, token=VIEWER_TOKEN, body="{}", content_type="application/json"
        )
        assert response.status == 403
        assert "operator" in json.loads(response.content)["detail"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("127.0.0.1:99", 200),
        ("[::1]:80", 200),
        ("quartet.example:8080", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example:80", 421),
        ("", 400),
    ],
)
def test_unknown_host_names_are_refused(gateway: Gateway, host: str, status: int) -> None:
    assert send(gateway, "/api/v1/session", host=host).status == status
    assert send(gateway, "/healthz", token=None, host=host).status == status


@pytest.mark.parametrize("path", ["/api/v1/session", "/api/v1/runs/some/events"])
@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://127.0.0.1", "http://127.0.0.1.evil.example"]
)
def test_requests_from_other_origins_are_refused(gateway: Gateway, path: str, origin: str) -> None:
    assert send(gateway, path, origin=origin).status == 403


def test_requests_from_the_same_origin_are_accepted(gateway: Gateway) -> None:
    assert send(gateway, "/api/v1/session", origin=f"http://{gateway.address}").status == 200
    # Behind a proxy that ends TLS.
    assert send(gateway, "/api/v1/session", host="quartet.example", origin="https://quartet.example").status == 200


@pytest.mark.parametrize(
    ("path", "token"), [("/", None), ("/api/v1/session", TOKEN), ("/api/v1/session", None), ("/static/no", None)]
)
def test_every_response_has_the_security_headers(gateway: Gateway, path: str, token: str | None) -> None:
    headers = send(gateway, path, token=token).headers
    assert {name: headers[name] for name in SECURITY_HEADERS} == SECURITY_HEADERS
    assert "unsafe-eval" not in headers["content-security-policy"]
    assert headers.get_all("access-control-allow-origin") is None
    if path.startswith("/api"):
        assert headers["cache-control"] == "no-store"


def test_large_bodies_are_refused_with_and_without_a_declared_length(gateway: Gateway) -> None:
    path, kind = "/api/v1/runs", "application/json"
    large = b'{"config": {"x": "' + b"x" * MAX_BODY_BYTES + b'"}}'
    assert send(gateway, path, method="POST", body=large, content_type=kind).status == 413
    chunks = (large[start : start + 65536] for start in range(0, len(large), 65536))
    assert send(gateway, path, method="POST", body=chunks, content_type=kind).status == 413


def test_too_many_requests_get_429_with_retry_after(tmp_path: Path) -> None:
    with serving(tmp_path, requests_per_second=1.0, viewer_token=VIEWER_TOKEN) as gateway:
        # The fixture has already sent one request.
        statuses = [send(gateway, "/api/v1/session").status for _ in range(9)]
        assert statuses == [200] * 9
        response = send(gateway, "/api/v1/session")
        assert response.status == 429
        assert 1 <= int(response.headers["retry-after"]) <= 10
        assert send(gateway, "/api/v1/session", token=VIEWER_TOKEN).status == 200


def test_wrong_tokens_are_limited_and_a_valid_token_is_still_accepted(tmp_path: Path) -> None:
    with serving(tmp_path) as gateway:
        statuses = {
            send(gateway, "/api/v1/session", token=f"guess-{number}").status for number in range(MAX_WRONG_TOKENS)
        }
        assert statuses == {401}
        assert send(gateway, "/api/v1/session", token="another").status == 429
        assert send(gateway, "/api/v1/session").status == 200


def test_requests_without_a_token_are_limited(tmp_path: Path) -> None:
    with serving(tmp_path, requests_per_second=1.0) as gateway:
        statuses = [send(gateway, "/api/v1/session", token=None).status for _ in range(11)]
        assert statuses == [401] * 10 + [429]
        assert send(gateway, "/api/v1/session").status == 200


@pytest.mark.parametrize("token", [TOKEN, VIEWER_TOKEN])
@pytest.mark.parametrize("path", ["/api/v1/session", "/api/v1/runs/some/events"])
def test_head_returns_the_headers_of_get_without_a_body(gateway: Gateway, path: str, token: str) -> None:
    connection = http.client.HTTPConnection(gateway.address, timeout=10)
    # Both requests use one connection, so the second one succeeds only if the first response has ended.
    for _ in range(2):
        connection.request("HEAD", path, headers={"authorization": f"Bearer {token}"})
        response = connection.getresponse()
        assert (response.status, response.read()) == (200, b"")
        assert response.headers["content-type"].split(";")[0] in ("application/json", "text/event-stream")
    connection.close()
    assert send(gateway, "/api/v1/runs/some/pause", method="HEAD").status == 405


def test_a_viewers_command_is_logged(gateway: Gateway) -> None:
    with capture_logs() as logs:
        send(gateway, "/api/v1/runs/some/pause", method="POST", token=VIEWER_TOKEN)
    assert [entry["path"] for entry in logs if "viewer" in entry["event"]] == ["/api/v1/runs/some/pause"]


def test_request_metrics_use_route_patterns_as_labels(gateway: Gateway) -> None:
    send(gateway, "/api/v1/runs/some/steps")
    text = send(gateway, "/metrics").content.decode()  # type: ignore[attr-defined]
    assert 'path="/api/v1/runs/{run}/steps",status="200"' in text
    assert "quartet_gateway_event_streams 0.0" in text
    assert 'role="gateway"' in text
    assert "process_resident_memory_bytes" in text
