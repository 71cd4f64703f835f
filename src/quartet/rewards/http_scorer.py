"""Scorers over HTTP: requests with retries, and the dialects in which rewards are served."""

from __future__ import annotations

import contextlib
import itertools
import json
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx2

from quartet.config.rewards import HttpRewardConfig, HttpScorerConfig
from quartet.contract.trajectory import Outcome
from quartet.errors import AccessRefused, ConfigError, MismatchError
from quartet.rewards.attempts import Attempts, RequestFailed, no_longer_a_scorer
from quartet.rewards.dialects import DIALECTS, Dialect
from quartet.rewards.response_texts import ScoredText
from quartet.rewards.reward_source import Result, strict_json
from quartet.system.secret_files import read_token

CONNECT_SECONDS = 15.0
"""Time limit for a connection."""
_UNREACHABLE = (429, 502, 503, 504)
"""Statuses of a scorer that is overloaded or not there."""
_REFUSED = (400, 413, 422, 451)
"""Statuses of a scorer that does not accept this request."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A successful response: its JSON value and its cookies."""

    value: Any
    cookies: Mapping[str, str]


class HttpConnection:
    """Connections to the servers of one scorer. To be created and used on one event loop."""

    def __init__(self, config: HttpScorerConfig, key: str) -> None:
        """``key`` is the config key of the section. Raises ConfigError if a file cannot be used."""
        self._config, self._key = config, key
        self._client = httpx2.AsyncClient(
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
            # A redirect could carry the key and the responses to another host.
            follow_redirects=False,
            verify=_tls_context(config, key),
            # A proxy must not see the key of the scorer, or responses.
            trust_env=False,
            # A cookie of one response must not reach another.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            limits=httpx2.Limits(
                max_connections=config.max_concurrency, max_keepalive_connections=config.max_concurrency
            ),
            timeout=httpx2.Timeout(None, connect=min(CONNECT_SECONDS, config.timeout_seconds)),
        )
        self._read_key()

    async def post(self, url: str, body: Any, cookies: Mapping[str, str] | None = None) -> Answer:
        """POST ``body`` as JSON. Raises RequestFailed."""
        where = f"{self._key}: {url}"
        headers = {"Cookie": "; ".join(f"{name}={value}" for name, value in cookies.items())} if cookies else {}
        content = bytearray()
        try:
            data = json.dumps(body, allow_nan=False).encode()
            async with self._client.stream("POST", url, content=data, headers=headers) as response:
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) > self._config.max_response_bytes:
                        text = f"{where}: a response of more than {self._config.max_response_bytes} bytes"
                        raise RequestFailed(Outcome.SCORER_ERROR, text)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise self._unreachable(error, where) from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            text = f"{where}: the connection ended before the response ({type(error).__name__})"
            raise RequestFailed(Outcome.SCORER_ERROR, text, retry=True) from None
        if not response.is_success:
            raise self._refusal(response.status_code, where)
        if content.lstrip()[:1] == b"<":
            raise no_longer_a_scorer(
                MismatchError(f"{where}: answers with a page of HTML or XML, not as a scorer; correct the address")
            )
        if not content.strip():
            raise RequestFailed(Outcome.SCORER_ERROR, f"{where}: the response is empty", retry=True)
        try:
            return Answer(strict_json(bytes(content)), dict(response.cookies))
        except ValueError as error:
            raise RequestFailed(Outcome.SCORER_ERROR, f"{where}: the response is {error}") from None

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def _read_key(self) -> None:
        """Use the key in the file from now on. Raises ConfigError."""
        if self._config.api_key_file is not None:
            token = read_token(self._config.api_key_file, f"{self._key}.api_key_file")
            self._client.headers["Authorization"] = f"Bearer {token}"

    def _unreachable(self, error: Exception, where: str) -> Exception:
        why = str(error) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in why:
            remedy = f"of an unknown authority; set {self._key}.certificate_authority_file"
            if "expired" in why:
                remedy = "that has expired; renew it"
            elif "mismatch" in why:
                remedy = "for another host; correct the address or the certificate"
            return no_longer_a_scorer(AccessRefused(f"{where}: has a certificate {remedy}"))
        text = f"{where}: does not respond ({why}); start the scorer, or correct the address"
        return RequestFailed(Outcome.SCORER_ERROR, text, retry=True, unreachable=True)

    def _refusal(self, status: int, where: str) -> Exception:
        """Convert an error status. The text of the response is left out, because it may quote a prompt or response."""
        if status in (401, 403):
            # The key may have been replaced.
            with contextlib.suppress(ConfigError):
                self._read_key()
            return no_longer_a_scorer(
                AccessRefused(f"{where}: refuses access (status {status}); check {self._key}.api_key_file")
            )
        if status in _REFUSED:
            return RequestFailed(Outcome.REFUSED, f"{where}: refuses the request (status {status})")
        if status in _UNREACHABLE:
            text = f"{where}: does not respond (status {status})"
            return RequestFailed(Outcome.SCORER_ERROR, text, retry=True, unreachable=True)
        if status < 400:
            return no_longer_a_scorer(
                MismatchError(f"{where}: redirects (status {status}), which is not followed; give the final address")
            )
        if status < 500 and status != 408:
            return no_longer_a_scorer(
                MismatchError(f"{where}: no scorer of this kind (status {status}); correct the address and the dialect")
            )
        return RequestFailed(Outcome.SCORER_ERROR, f"{where}: failed (status {status})", retry=True)


class HttpScorer:
    """Scorer in one of the dialects. Implements Scorer."""

    def __init__(self, config: HttpRewardConfig, key: str) -> None:
        """``key`` is the config key of the section. Raises ConfigError."""
        self._config, self._key = config, key
        self._dialect: Dialect = DIALECTS[config.dialect]
        self._urls = [_with_path(url, self._dialect.path) for url in config.urls]
        self._attempts = [Attempts(config, f"{key}: {url}") for url in self._urls]
        self._connection = HttpConnection(config, key)
        self._turn = itertools.count()
        self.batch_size = 1 if self._dialect.single else config.batch_size

    async def score(self, texts: Sequence[ScoredText]) -> list[Result]:
        """Return a result for each of the texts. Requests go to the servers in turn."""
        server = next(self._turn) % len(self._urls)
        url = self._urls[server]
        body = self._dialect.request(texts, self._config)

        async def send(_: int) -> list[Result]:
            answer = await self._connection.post(url, body, await self._session(url, body))
            try:
                return list(self._dialect.scores(answer.value, len(texts), self._config))
            except ValueError as error:
                raise RequestFailed(Outcome.SCORER_ERROR, f"{self._key}: {url}: {error}") from None

        return await self._attempts[server].run(send, max(text.updates for text in texts))

    def take_cured_faults(self) -> int:
        return sum(attempts.take_cured_faults() for attempts in self._attempts)

    async def close(self) -> None:
        """Close the connections."""
        await self._connection.close()

    async def _session(self, url: str, body: Any) -> Mapping[str, str]:
        """Open a session if the config asks for one, and return its cookies."""
        if not self._config.seed_session:
            return {}
        opened = await self._connection.post(f"{url.removesuffix('/verify')}/seed_session", body)
        return opened.cookies


def _with_path(url: str, path: str) -> str:
    bare = url.rstrip("/")
    return bare + path if not bare.endswith(path) else bare


def _tls_context(config: HttpScorerConfig, key: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=config.certificate_authority_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"{key}.certificate_authority_file {config.certificate_authority_file}: cannot be used "
            f"({error.strerror or error}); expected a PEM file"
        ) from None
