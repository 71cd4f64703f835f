"""The gateway's REST API, as the commands speak to it."""

from __future__ import annotations

import json
import os
import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2

from quartet import __version__
from quartet.errors import ConfigError, QuartetError, ServiceFailed, ServiceUnavailable
from quartet.run_directory.run_files import RunFiles
from quartet.topology import is_loopback

AUTHORITY = "SSL_CERT_FILE"
"""Variable that names the file of the authority that a gateway's certificate is of."""
TOKEN = "QUARTET_GATEWAY_TOKEN"
"""Variable of the token for a URL: whoever lists processes sees a command line."""
TIMEOUT = 15.0
"""Seconds that the gateway has to answer."""
SILENCE = 45.0
"""Seconds without a sign of life after which a stream of events counts as broken: three of the gateway's heartbeats."""
PREFIX = "/api/v1"
_RUN = re.compile(r"(?P<gateway>.*?)(?:/runs/(?P<run>[A-Za-z0-9][A-Za-z0-9._-]{0,63}))?/?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Event:
    """One of the stream. ``id`` is the place in the run after it."""

    kind: str
    data: dict[str, Any]
    id: str


@dataclass(frozen=True, slots=True)
class Target:
    """Where a run is: at the gateway ``url``, which calls it ``run``. ``given`` is what the user wrote, for messages."""

    given: str
    url: str
    token: str
    run: str | None
    files: RunFiles | None = None
    """Where the user gave the run's directory."""


def find(given: str, run: str | None = None, token_file: Path | None = None) -> Target:
    """The run that a user means by its directory or by a URL. Raises ConfigError."""
    if "://" in given:
        return _at_url(given, run, token_file)
    if run is not None or token_file is not None:
        raise ConfigError(f"--run and --token-file go with a URL; {given} is a directory, and says both itself")
    return _of_directory(Path(given))


def _at_url(given: str, run: str | None, token_file: Path | None) -> Target:
    try:
        url = httpx2.URL(given)
    except httpx2.InvalidURL as error:
        raise ConfigError(f"{given}: is no URL ({error}); give http://HOST:PORT/runs/NAME") from None
    if url.fragment or url.userinfo:
        raise ConfigError(
            "the URL holds a token, which everybody on this machine can read now: give http://HOST:PORT/runs/NAME alone, and "
            f"the token in {TOKEN} or by --token-file"
        )
    found = _RUN.fullmatch(url.path)
    if url.scheme not in ("http", "https") or not url.host or found is None or url.query:
        raise ConfigError(f"{given}: expected http://HOST:PORT/runs/NAME")
    if found["run"] and run and found["run"] != run:
        raise ConfigError(f"--run {run}: {given} names the run {found['run']}; leave one of them out")
    address = str(url.copy_with(path=found["gateway"] or "/")).rstrip("/")
    return Target(given, address, _token(token_file), found["run"] or run)


def _token(file: Path | None) -> str:
    if file is not None:
        try:
            token = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--token-file {file}: cannot be read ({error}); give a file that holds the token"
            ) from None
        where = f"--token-file {file}"
    else:
        token, where = os.environ.get(TOKEN, "").strip(), TOKEN
    if not token:
        raise ConfigError(f"{where}: holds no token; a URL needs one, by {TOKEN} or by --token-file")
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError(f"{where}: holds something that is no token; expected printable characters in one line")
    return token


def _of_directory(directory: Path) -> Target:
    files = RunFiles(directory)
    try:
        about = json.loads(files.gateway.read_text(encoding="utf-8"))
        return Target(
            str(directory), str(about["url"]).rstrip("/"), str(about["token"]), directory.resolve().name, files
        )
    except FileNotFoundError:
        if files.services.exists():
            raise ConfigError(
                f"run {directory}: goes on without a gateway of its own; {_open_another(directory)}"
            ) from None
        raise ConfigError(
            f"run {directory}: no run is going on there; give the directory of one, such as runs/NAME"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not as a gateway writes it"
        raise ConfigError(f"run {directory}: its {files.gateway.name} cannot be read ({reason})") from None


def _open_another(directory: Path) -> str:
    """How a run is commanded whose own gateway is not there."""
    return (
        f"open one with quartet view {directory} and give its URL, http://HOST:PORT/runs/{directory.resolve().name}, with the "
        f"token of its link in {TOKEN}"
    )


def _trusted() -> ssl.SSLContext:
    """Authorities of gateways that speak HTTPS: the system's, or the one that the user names."""
    path = os.environ.get(AUTHORITY)
    try:
        return ssl.create_default_context(cafile=path or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{AUTHORITY} {path}: cannot be used ({error.strerror or error}); give a PEM file") from None


@contextmanager
def asking(target: Target) -> Iterator[Api]:
    """An Api for a command: where nobody answers, it is for the user to look what became of the run, so that is a ConfigError."""
    try:
        with Api(target) as api:
            yield api
    except ServiceUnavailable as error:
        raise ConfigError(str(error)) from None


class Api:
    """One run at one gateway. A context manager.

    Every method raises ConfigError for what the user can mend, ServiceUnavailable where the gateway or the run does not answer
    now, ServiceFailed where the gateway failed.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self._client = httpx2.Client(
            base_url=target.url + PREFIX,
            headers={"Authorization": f"Bearer {target.token}", "User-Agent": f"quartet/{__version__}"},
            timeout=TIMEOUT,
            # A proxy is for the way outside: it must not see the token of a gateway on this machine.
            trust_env=not is_loopback(httpx2.URL(target.url).host),
            verify=_trusted(),
        )
        self._run = target.run

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    @property
    def run(self) -> str:
        """The run's name: as the user said, or the one that the gateway was started with."""
        if self._run is None:
            self._run = self._call("GET", "/session")["run"]
            if self._run is None:
                names = ", ".join(run["name"] for run in self._call("GET", "/runs")["items"])
                raise ConfigError(
                    f"{self.target.given}: shows several runs; give one of them by --run: {names or 'none yet'}"
                )
        return self._run

    @property
    def goes_with_the_run(self) -> bool:
        """Whether the gateway was started with the run, and ends with it."""
        return bool(self._call("GET", "/session")["run"] == self.run)

    def get(self, path: str = "", **query: Any) -> Any:
        """What the run has at ``path``, such as ``/settings``."""
        return self._call("GET", f"{self._path}{path}", params=query)

    def post(self, path: str) -> Any:
        """Gives a command."""
        return self._call("POST", f"{self._path}{path}")

    def patch(self, path: str, values: Mapping[str, Any]) -> Any:
        """Changes something."""
        return self._call("PATCH", f"{self._path}{path}", json=dict(values))

    @property
    def _path(self) -> str:
        return f"/runs/{quote(self.run, safe='')}"

    def _call(self, method: str, path: str, **options: Any) -> Any:
        try:
            response = self._client.request(method, path, **options)
        except httpx2.HTTPError as error:
            raise self._unreachable(error) from None
        if not response.is_success:
            raise self._refused(response)
        return self._json(response)

    def _json(self, response: httpx2.Response) -> Any:
        try:
            return response.json()
        except ValueError:
            raise ConfigError(
                f"{self.target.url}: what answers there is no gateway of Quartet's; check the URL"
            ) from None

    def events(self, after: str | None) -> Iterator[Event]:
        """The run's news after the event of this id, or from now on, until the connection ends."""
        headers = {"Last-Event-ID": after} if after else {}
        timeout = httpx2.Timeout(TIMEOUT, read=SILENCE)
        try:
            with self._client.sse(f"{self._path}/events", headers=headers, timeout=timeout) as source:
                if not source.response.is_success:
                    source.response.read()
                    raise self._refused(source.response)
                for event in source:
                    yield Event(event.event, json.loads(event.data), event.id)
        except httpx2.HTTPError as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: httpx2.HTTPError) -> QuartetError:
        target = self.target
        if target.files is not None and not target.files.gateway.exists():
            return ServiceUnavailable(f"run {target.given}: has ended")
        why = str(error) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in why:
            return ServiceUnavailable(
                f"the gateway at {target.url} shows a certificate of an authority that is not known here ({why}); "
                f"name that authority's file, such as CERTIFICATES/operator/ca.crt, in {AUTHORITY}"
            )
        silent = f"the gateway at {target.url} does not answer ({why})"
        if target.files is not None and target.files.services.exists():
            # It left its file: it was killed, and is started again or given up.
            another = _open_another(target.files.root)
            return ServiceUnavailable(f"{silent}; try again. If the run goes on without it, {another}")
        return ServiceUnavailable(f"{silent}; the run may have ended")

    def _refused(self, response: httpx2.Response) -> QuartetError:
        """What a problem of the gateway's means here."""
        status, given = response.status_code, self.target.given
        try:
            problem = response.json()
            detail, fields = str(problem["detail"]), problem.get("fields", [])
        except (ValueError, KeyError, TypeError, AttributeError):
            return ConfigError(
                f"{self.target.url}: answered with status {status}, and not as a gateway of Quartet's does; check the URL"
            )
        if status == 401:
            return ConfigError(f"{given}: the gateway does not know this token; give the one that it was started with")
        if status == 404 and f"{self._run!r}" in detail:
            return ConfigError(f"{given}: the gateway at {self.target.url} has no run {self._run}")
        words = "; ".join(f"{field['field'].removeprefix('body.')}: {field['problem']}" for field in fields) or detail
        later = status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
        kind = ServiceUnavailable if later else ServiceFailed if status >= 500 else ConfigError
        return kind(f"{given}: {words}")
