"""Environments of OpenEnv servers, over HTTP. ``websocket`` has those over WebSocket.

A failure of a server is an outcome, never a reward. The policy's turn is one field of the action, or the whole action as
JSON. The observation's text is one of its fields, or all of it as JSON.
"""

from __future__ import annotations

import json
import secrets
import ssl
import time
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import httpx2

from quartet.environments.environment import Environment, EnvironmentFailed, Observation

MAX_ANSWER_BYTES = 16 * 2**20
"""Maximum size of an answer."""
RETRY_SECONDS = 0.2
"""Pause before a connection is tried again."""
_SCHEMES = {"http": ("http", "https"), "ws": ("ws", "wss")}


class OpenEnv(Environment):
    """Settings, actions and answers, which both transports share."""

    def __init__(
        self,
        url: str,
        action_key: str | None = "message",
        observation_key: str | None = None,
        timeout_seconds: float = 30.0,
        reset_arguments: dict[str, Any] | None = None,
        fields_key: str | None = None,
        token_file: str | None = None,
        authority_file: str | None = None,
        allow_plaintext: bool = False,
    ) -> None:
        """``url`` is that of the server, without /reset or /ws.

        ``action_key``: field of the action with the policy's text; None: the text is the action, a JSON object. A text that is
        none ends the episode with reward 0. ``observation_key``: field of the observation with its text; None: the observation
        as JSON. ``reset_arguments`` are sent with every reset; ``fields_key`` sends the fields of the prompt's line under that
        name. ``timeout_seconds``: time limit of one answer. ``token_file``: bearer token. ``authority_file``: PEM file of the
        authority of the server's certificate; None: those of the system. ``allow_plaintext`` is needed beyond loopback without
        TLS.
        """
        self._url, self._timeout = self._checked_url(url, allow_plaintext), timeout_seconds
        self._action_key, self._observation_key = action_key, observation_key
        self._reset_arguments, self._fields_key = reset_arguments or {}, fields_key
        self._headers = {}
        if token_file is not None:
            self._headers["Authorization"] = f"Bearer {Path(token_file).read_text(encoding='utf-8').strip()}"
        self._tls = (
            ssl.create_default_context(cafile=authority_file) if self._url.startswith(("https", "wss")) else None
        )

    transport = "http"

    def _checked_url(self, url: str, allow_plaintext: bool) -> str:
        parts, schemes = urlsplit(url), _SCHEMES[self.transport]
        if parts.scheme not in schemes or not parts.hostname or parts.query or parts.fragment or parts.username:
            raise ValueError(f"url: expected {schemes[0]}://HOST:PORT or {schemes[1]}://..., without user and options")
        loopback = parts.hostname in ("localhost", "127.0.0.1", "::1")
        if parts.scheme == schemes[0] and not loopback and not allow_plaintext:
            raise ValueError(
                f"url: not a loopback address, and calls are not encrypted; use {schemes[1]}://, or allow_plaintext"
            )
        return url.rstrip("/")

    def reset_data(self, seed: int, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a reset."""
        own = {self._fields_key: fields} if self._fields_key is not None else {}
        return {**self._reset_arguments, "seed": seed, **own}

    def action(self, text: str) -> dict[str, Any] | None:
        """Return the action of a turn, or None for a text that is not a JSON object."""
        if self._action_key is not None:
            return {self._action_key: text}
        try:
            action = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return None
        return action if isinstance(action, dict) else None

    def result(self, answer: Any, where: str) -> tuple[Observation, float, bool]:
        """Convert an answer with observation, reward and done. Raises EnvironmentFailed for any other."""
        if not isinstance(answer, dict):
            raise EnvironmentFailed(f"{where}: the answer is not a JSON object")
        observation, reward, done = answer.get("observation"), answer.get("reward"), answer.get("done", False)
        if not isinstance(observation, dict):
            raise EnvironmentFailed(f"{where}: the answer has no observation")
        if not isinstance(done, bool):
            raise EnvironmentFailed(f"{where}: done is not true or false")
        if reward is None:  # No reward for this turn, as OpenEnv allows.
            reward = 0.0
        if not isinstance(reward, int | float):
            raise EnvironmentFailed(f"{where}: the reward is not a number")
        return self._observation_text(observation, where), float(reward), done

    def _observation_text(self, observation: dict[str, Any], where: str) -> str:
        if self._observation_key is None:
            return json.dumps(observation, sort_keys=True, ensure_ascii=False)
        text = observation.get(self._observation_key)
        if not isinstance(text, str):
            raise EnvironmentFailed(f"{where}: the observation has no text {self._observation_key!r}")
        return text

    def failed(self, where: str, error: Exception, timed_out: bool) -> EnvironmentFailed:
        """Return the failure that a library's error means. Its text is left out: it may quote the policy."""
        return EnvironmentFailed(f"{where}: {type(error).__name__}", "timeout" if timed_out else "environment_error")


class OpenEnvHTTP(OpenEnv):
    """Environment of an OpenEnv server over HTTP. The server must keep the episode between requests, by its ``episode_id``."""

    transport = "http"

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._client = httpx2.Client(
            timeout=self._timeout, headers=self._headers, trust_env=False, verify=self._tls or True
        )
        self._episode, self._steps = "", 0

    def reset(self, seed: int, fields: dict[str, Any]) -> Observation:
        """Start the episode. A connection that cannot be established is tried again."""
        self._episode = f"quartet-{seed}-{secrets.token_hex(8)}"
        data = {**self.reset_data(seed, fields), "episode_id": self._episode}
        observation, _, done = self.result(self._post("/reset", data, retries=True), "/reset")
        if done:
            raise EnvironmentFailed("/reset: the episode is over before the first turn")
        return observation

    def step(self, text: str) -> tuple[Observation, float, bool]:
        """Send an action. It is not sent again, because the server may have taken it."""
        action = self.action(text)
        if action is None:
            return None, 0.0, True
        self._steps += 1
        data = {
            "action": action,
            "timeout_s": self._timeout,
            "request_id": f"{self._episode}-{self._steps}",
            "episode_id": self._episode,
        }
        return self.result(self._post("/step", data), "/step")

    def state(self) -> dict[str, Any]:
        """Return the server's state of the episode."""
        answer = self._get("/state")
        if not isinstance(answer, dict):
            raise EnvironmentFailed("/state: the answer is not a JSON object")
        return answer

    def is_healthy(self) -> bool:
        """Return whether the server reports that it is healthy."""
        answer = self._get("/health")
        return isinstance(answer, dict) and answer.get("status") == "healthy"

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _get(self, path: str) -> Any:
        return self._exchange("GET", path, None, False)

    def _post(self, path: str, data: dict[str, Any], retries: bool = False) -> Any:
        return self._exchange("POST", path, data, retries)

    def _exchange(self, method: str, path: str, data: dict[str, Any] | None, retries: bool) -> Any:
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                with self._client.stream(method, f"{self._url}{path}", json=data) as response:
                    body = self._read(response, path, deadline)
                break
            except httpx2.ConnectError as error:
                if not retries or time.monotonic() + RETRY_SECONDS > deadline:
                    raise self.failed(path, error, False) from None
                time.sleep(RETRY_SECONDS)
            except httpx2.TimeoutException as error:
                raise self.failed(path, error, True) from None
            except httpx2.HTTPError as error:
                raise self.failed(path, error, False) from None
        if response.status_code != 200:
            raise EnvironmentFailed(f"{path}: status {response.status_code}")
        return parsed_answer(body, path)

    def _read(self, response: httpx2.Response, path: str, deadline: float) -> bytes:
        body = bytearray()
        for chunk in response.iter_bytes():
            body += chunk
            if len(body) > MAX_ANSWER_BYTES:
                raise EnvironmentFailed(f"{path}: more than {MAX_ANSWER_BYTES} bytes")
            if time.monotonic() > deadline:
                raise EnvironmentFailed(f"{path}: no whole answer in time", "timeout")
        return bytes(body)


def parsed_answer(body: bytes | str, where: str) -> Any:
    """Return the JSON value of an answer. Raises EnvironmentFailed."""
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise EnvironmentFailed(f"{where}: the answer is not JSON") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
