"""Environments of OpenEnv servers, over WebSocket. Needs the extra openenv. See ``http``."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

from websockets.sync import client

from quartet.contrib.openenv.http import MAX_ANSWER_BYTES, RETRY_SECONDS, OpenEnv, parsed_answer
from quartet.environments.environment import EnvironmentFailed, Observation


class OpenEnvWebSocket(OpenEnv):
    """Environment of an OpenEnv server over WebSocket (/ws). The episode lives as long as the connection."""

    transport = "ws"

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._socket: client.ClientConnection | None = None
        self._open_socket = contextlib.ExitStack()

    def reset(self, seed: int, fields: dict[str, Any]) -> Observation:
        """Connect and start the episode. A connection that cannot be established, or has no room, is tried again."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                self._open(deadline)
                answer = self._exchange({"type": "reset", "data": self.reset_data(seed, fields)}, "reset")
                break
            except (_Unavailable, _AtCapacity) as error:
                self.close()
                if time.monotonic() + RETRY_SECONDS > deadline:
                    raise EnvironmentFailed(str(error)) from None
                time.sleep(RETRY_SECONDS)
        observation, _, done = self.result(answer, "reset")
        if done:
            raise EnvironmentFailed("reset: the episode is over before the first turn")
        return observation

    def step(self, text: str) -> tuple[Observation, float, bool]:
        """Send an action and wait for its observation."""
        action = self.action(text)
        if action is None:
            return None, 0.0, True
        try:
            return self.result(self._exchange({"type": "step", "data": action}, "step"), "step")
        except _AtCapacity as error:
            raise EnvironmentFailed(str(error)) from None

    def close(self) -> None:
        """End the episode at the server and close the connection."""
        if self._socket is not None:
            with contextlib.suppress(Exception):
                self._socket.send(json.dumps({"type": "close"}))
            with contextlib.suppress(Exception):
                self._open_socket.close()
            self._socket = None

    def _open(self, deadline: float) -> None:
        try:
            connection = client.connect(
                f"{self._url}/ws",
                ssl=self._tls,
                additional_headers=self._headers,
                open_timeout=max(0.1, deadline - time.monotonic()),
                close_timeout=1.0,
                max_size=MAX_ANSWER_BYTES,
                proxy=None,
            )
            self._socket = self._open_socket.enter_context(connection)
        except Exception as error:
            raise _Unavailable(f"/ws: {type(error).__name__}") from None

    def _exchange(self, message: dict[str, Any], where: str) -> Any:
        """Send a message. Return the data of the observation that answers it."""
        assert self._socket is not None
        try:
            self._socket.send(json.dumps(message))
            answer = parsed_answer(self._socket.recv(timeout=self._timeout), where)
        except EnvironmentFailed:
            raise
        except Exception as error:  # websockets raises its own types, OSError and TimeoutError.
            raise self.failed(where, error, isinstance(error, TimeoutError)) from None
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict):
            raise EnvironmentFailed(f"{where}: the answer is not a message with data")
        if answer.get("type") == "error":
            code = answer["data"].get("code")
            # The message may quote the policy's text, the code does not.
            shown = code if code in _ERROR_CODES else "an unknown error"
            raise (
                _AtCapacity("/ws: CAPACITY_REACHED")
                if code == "CAPACITY_REACHED"
                else EnvironmentFailed(f"{where}: {shown}")
            )
        if answer.get("type") != "observation":
            raise EnvironmentFailed(f"{where}: the answer is not an observation")
        return answer["data"]


_ERROR_CODES = (
    "INVALID_JSON",
    "UNKNOWN_TYPE",
    "VALIDATION_ERROR",
    "EXECUTION_ERROR",
    "CAPACITY_REACHED",
    "FACTORY_ERROR",
    "SESSION_ERROR",
)


class _Unavailable(Exception):
    """No connection. It may succeed later."""


class _AtCapacity(Exception):
    """The server has no room for a session. It may have later."""
