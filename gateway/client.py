"""Client of the gateway's REST API, for the command line and the Python API."""

from __future__ import annotations

import difflib
import json
import os
import re
import ssl
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from shlex import quote as shell_quote
from typing import Any
from urllib.parse import quote

import httpx2

from quartet import __version__
from quartet.config.section import is_loopback
from quartet.config.supervised import StageConfig, load_any_config
from quartet.errors import ConfigError, QuartetError, ServiceFailed, ServiceUnavailable
from quartet.run_directory.locking_and_removal import ACTIVE_STAGE, is_locked
from quartet.run_directory.run_files import RunFiles

CA_FILE_VARIABLE = "SSL_CERT_FILE"
"""Environment variable with the PEM file of the authority that signed the certificate of the gateway."""
TOKEN_VARIABLE = "QUARTET_GATEWAY_TOKEN"
"""Environment variable with the token for a URL. A token on the command line would be visible in process listings."""
TIMEOUT_SECONDS = 15.0
"""Time limit for a response of the gateway."""
MAX_SILENCE_SECONDS = 45.0
"""Time without data after which an event stream counts as broken: three heartbeats of the gateway."""
PREFIX = "/api/v1"
_RUN = re.compile(r"(?P<gateway>.*?)(?:/runs/(?P<run>[A-Za-z0-9][A-Za-z0-9._-]{0,63}))?/?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Event:
    """Server-sent event. ``id`` resumes the stream after this event."""

    kind: str
    data: dict[str, Any]
    id: str


@dataclass(frozen=True, slots=True)
class Target:
    """A run and the gateway that controls it. ``given`` is the argument of the user, for messages."""

    given: str
    url: str
    token: str
    run: str | None
    files: RunFiles | None = None
    """Files of the run, if the user gave its directory."""


def find_run(given: str, run: str | None = None, token_file: Path | None = None) -> Target:
    """Find the run for a directory or URL. Raises ConfigError."""
    if "://" in given:
        return _at_url(given, run, token_file)
    if run is not None or token_file is not None:
        raise ConfigError(f"--run and --token-file: only used with a URL; {given} is a directory, remove them")
    return _in_directory(Path(given))


def _at_url(given: str, run: str | None, token_file: Path | None) -> Target:
    try:
        url = httpx2.URL(given)
    except httpx2.InvalidURL as error:
        raise ConfigError(f"{given}: not a URL ({error}); expected http://HOST:PORT/runs/NAME") from None
    if url.fragment or url.userinfo:
        raise ConfigError(
            "the URL contains a token, which other users of this machine can see: give http://HOST:PORT/runs/NAME, and "
            f"the token in {TOKEN_VARIABLE} or by --token-file"
        )
    match = _RUN.fullmatch(url.path)
    if url.scheme not in ("http", "https") or not url.host or match is None or url.query:
        raise ConfigError(f"{given}: expected http://HOST:PORT/runs/NAME")
    if match["run"] and run and match["run"] != run:
        raise ConfigError(f"--run {run}: {given} names the run {match['run']}; give only one of them")
    address = str(url.copy_with(path=match["gateway"] or "/")).rstrip("/")
    return Target(given, address, _token(token_file), match["run"] or run)


def _token(file: Path | None) -> str:
    if file is not None:
        try:
            token = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--token-file {file}: cannot be read ({error}); expected a file with the token"
            ) from None
        source = f"--token-file {file}"
    else:
        token, source = os.environ.get(TOKEN_VARIABLE, "").strip(), TOKEN_VARIABLE
    if not token:
        raise ConfigError(f"{source}: no token; a URL needs one, in {TOKEN_VARIABLE} or by --token-file")
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError(f"{source}: not a token; expected one line of printable characters without spaces")
    return token


def _in_directory(directory: Path) -> Target:
    files = RunFiles(directory)
    try:
        about = json.loads(files.gateway.read_text(encoding="utf-8"))
        return Target(
            str(directory), str(about["url"]).rstrip("/"), str(about["token"]), directory.resolve().name, files
        )
    except FileNotFoundError:
        if files.services.exists():
            raise ConfigError(
                f"run {directory}: is active but has no gateway; {_how_to_open_another(directory)}"
            ) from None
        raise ConfigError(_describe_inactive(directory, files)) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "invalid contents"
        raise ConfigError(f"run {directory}: its {files.gateway.name} cannot be read ({reason})") from None


def _describe_inactive(directory: Path, files: RunFiles) -> str:
    """Return how far a run without processes has come, and the commands for it; or that it is a stage, which has no gateway."""
    if not files.is_run():
        return f"run {directory}: is not the directory of a run; expected a directory such as runs/NAME"
    if files.stage_name() and is_locked(files):
        return f"run {directory}: {ACTIVE_STAGE}"
    config = load_any_config(files.config)
    steps, last, shown = config.run.steps or 0, files.last_step(), shell_quote(str(directory))
    command = config.stage if isinstance(config, StageConfig) else "train"
    look = f"quartet view {shown} shows it in the dashboard, quartet report {shown} writes a report"
    if last >= steps and files.is_finished(last):
        return f"run {directory}: is not active: it is finished, {last} of {steps} steps; {look}"
    return (
        f"run {directory}: is not active: it ended after step {last} of {steps}; "
        f"quartet {command} {shell_quote(str(files.config))} --resume continues it; {look}"
    )


def _how_to_open_another(directory: Path) -> str:
    """Return advice for a run whose own gateway is not running."""
    return (
        f"start one with quartet view {directory}, and give its URL http://HOST:PORT/runs/{directory.resolve().name} with the "
        f"token from its link in {TOKEN_VARIABLE}"
    )


def _tls_context() -> ssl.SSLContext:
    """Return a TLS context that trusts the authority in SSL_CERT_FILE, or else those of the system."""
    path = os.environ.get(CA_FILE_VARIABLE)
    try:
        return ssl.create_default_context(cafile=path or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"{CA_FILE_VARIABLE} {path}: cannot be used ({error.strerror or error}); expected a PEM file"
        ) from None


@contextmanager
def connect(target: Target) -> Iterator[Api]:
    """Open an Api for one command. An unreachable gateway raises ConfigError, as the user must check what happened to the run."""
    try:
        with Api(target) as api:
            yield api
    except ServiceUnavailable as error:
        raise ConfigError(str(error)) from None


class Api:
    """REST API of one run at one gateway. A context manager.

    Every method raises ConfigError for invalid input, ServiceUnavailable if the gateway or the run does not respond, and
    ServiceFailed if the gateway fails.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self._client = httpx2.Client(
            base_url=target.url + PREFIX,
            headers={"Authorization": f"Bearer {target.token}", "User-Agent": f"quartet/{__version__}"},
            timeout=TIMEOUT_SECONDS,
            # A proxy must not see the token of a gateway on this machine.
            trust_env=not is_loopback(httpx2.URL(target.url).host),
            verify=_tls_context(),
        )
        self._run = target.run

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    @property
    def run(self) -> str:
        """Name of the run: as the user gave it, or else the run that the gateway was started with."""
        if self._run is None:
            self._run = self._call("GET", "/session")["run"]
            if self._run is None:
                names = ", ".join(run["name"] for run in self._call("GET", "/runs")["items"])
                raise ConfigError(
                    f"{self.target.given}: this gateway has several runs; choose one with --run: {names or 'none yet'}"
                )
        return self._run

    @property
    def belongs_to_the_run(self) -> bool:
        """Return whether the gateway was started with the run and ends with it."""
        return bool(self._call("GET", "/session")["run"] == self.run)

    def get(self, path: str = "", **query: Any) -> Any:
        """GET ``path`` of the run, such as ``/settings``."""
        return self._call("GET", f"{self._path}{path}", params=query)

    def post(self, path: str, values: Mapping[str, Any] | None = None) -> Any:
        """POST to ``path`` of the run."""
        return self._call("POST", f"{self._path}{path}", **({} if values is None else {"json": dict(values)}))

    def patch(self, path: str, values: Mapping[str, Any]) -> Any:
        """PATCH ``path`` of the run."""
        return self._call("PATCH", f"{self._path}{path}", json=dict(values))

    def change_settings(self, values: Mapping[str, float]) -> list[dict[str, Any]]:
        """Change settings of an active run, and return the recorded changes: setting, before, after, step and user."""
        state = self.get("/settings")
        before = len(state["changes"])
        # An ended run has no settings; the gateway says so.
        if names := [item["name"] for item in state["settings"]]:
            _check_names(values, names)
        self.patch("/settings", values)
        return list(self.get("/settings")["changes"][before:])

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
            raise ConfigError(f"{self.target.url}: the server there is not a Quartet gateway; check the URL") from None

    def events(self, after: str | None) -> Iterator[Event]:
        """Yield events of the run after the event with this id, or from now on, until the connection ends."""
        headers = {"Last-Event-ID": after} if after else {}
        timeout = httpx2.Timeout(TIMEOUT_SECONDS, read=MAX_SILENCE_SECONDS)
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
            return ServiceUnavailable(_describe_inactive(target.files.root, target.files))
        why = str(error) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in why:
            return ServiceUnavailable(
                f"the gateway at {target.url} has a certificate of an unknown authority ({why}); "
                f"set the file of that authority, such as CERTIFICATES/operator/ca.crt, in {CA_FILE_VARIABLE}"
            )
        if "WRONG_VERSION_NUMBER" in why:
            return ServiceUnavailable(
                f"the gateway at {target.url} does not use TLS ({why}); give its URL with http://"
            )
        message = f"the gateway at {target.url} does not respond ({why})"
        if target.files is None and target.url.startswith("http:") and isinstance(error, httpx2.RemoteProtocolError):
            message += "; if it uses TLS, give its URL with https://"
        if target.files is not None and target.files.services.exists():
            # The gateway left its file behind, so it was killed. It may be restarted.
            another = _how_to_open_another(target.files.root)
            return ServiceUnavailable(f"{message}; try again. If the run continues without it, {another}")
        return ServiceUnavailable(
            f"{message}; the run may have ended, or a kubectl port-forward leads to a pod that is gone: start another one"
        )

    def _refused(self, response: httpx2.Response) -> QuartetError:
        """Convert an error response of the gateway."""
        status, given = response.status_code, self.target.given
        try:
            problem = response.json()
            detail, fields = str(problem["detail"]), problem.get("fields", [])
        except (ValueError, KeyError, TypeError, AttributeError):
            return ConfigError(
                f"{self.target.url}: returned status {status}, and not as a Quartet gateway does; check the URL"
            )
        if status == 401:
            return ConfigError(f"{given}: the gateway refuses this token; give the one that it was started with")
        if status == 404 and f"{self._run!r}" in detail:
            return ConfigError(f"{given}: the gateway at {self.target.url} has no run {self._run}")
        message = "; ".join(map(_describe_field, fields)) or detail
        temporary = status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
        kind = ServiceUnavailable if temporary else ServiceFailed if status >= 500 else ConfigError
        return kind(f"{given}: {message}")


def _check_names(given: Iterable[str], names: Sequence[str]) -> None:
    """Raise ConfigError for a setting that an active run cannot change."""
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
            hint = f", did you mean {close[0]}?" if close else ";"
            raise ConfigError(
                f"{name}: not a setting that an active run can change{hint} such settings: {', '.join(names)}"
            )


def _describe_field(field: Mapping[str, Any]) -> str:
    """Return a problem of a request's field, with the name of the field once."""
    name, problem = str(field["field"]).removeprefix("body."), str(field["problem"])
    return problem if problem.startswith(f"{name} ") else f"{name}: {problem}"
