"""Runs of an agent that Quartet does not drive: what it gets, and its result."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quartet.contract.trajectory import Outcome
from quartet.errors import ComputationFailed

KEY_PREFIX = "quartet-"
"""Start of the keys of sessions."""
_KEY = re.compile(rf"{KEY_PREFIX}[A-Za-z0-9_-]{{43}}")
HIDDEN_KEY = f"{KEY_PREFIX}***"
"""Text in the place of a key in logs and messages."""


def new_session_key() -> str:
    """Return a random key of 256 bits, which ``without_keys`` recognizes."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def without_keys(text: str, key: str = "") -> str:
    """Return the text without keys of sessions. ``key``: a further text to hide, such as a key of another form."""
    text = _KEY.sub(HIDDEN_KEY, text)
    return text.replace(key, HIDDEN_KEY) if key else text


@dataclass(frozen=True, slots=True)
class AgentRun:
    """One run of the agent, for one trajectory.

    ``session`` names it and is different for each attempt of a trajectory. ``seed`` is that of the trajectory, below 2^63.
    ``fields`` are those of the prompt's line as a JSON object, or "". ``base_url`` is that of the policy's OpenAI endpoint,
    such as http://127.0.0.1:8000/v1, ``api_key`` the key that names the session there, and ``model`` the name of the policy.
    """

    session: str
    seed: int
    fields: str
    base_url: str
    api_key: str = field(repr=False)
    model: str


@dataclass(frozen=True, slots=True)
class AgentResult:
    """Result of a run of the agent.

    ``reward`` is that of the trajectory; None if the agent leaves it to the reward sources. ``outcome`` is not ok if the agent
    failed, with the cause in ``detail``, without text of prompts and responses; there is no reward then. ``logged``: numbers,
    booleans and texts by name, see ``quartet.contract.logged_values``. ``lost``: the service that ran the agent ended, or could
    not be reached; this says nothing about the agent, which may be run again and does not count as an attempt. Raises
    ComputationFailed if they contradict each other.
    """

    reward: float | None = None
    outcome: Outcome = Outcome.OK
    detail: str = ""
    logged: Mapping[str, Any] = field(default_factory=dict)
    lost: bool = False

    def __post_init__(self) -> None:
        if self.reward is not None and not math.isfinite(self.reward):
            raise ComputationFailed(f"reward: {self.reward:g}, expected a finite number")
        if self.outcome is Outcome.LEFT_OUT:
            raise ComputationFailed(f"outcome {self.outcome}: is none of an agent")
        if self.outcome is not Outcome.OK and self.reward is not None:
            raise ComputationFailed(f"reward: {self.reward:g} with outcome {self.outcome}; expected none for a failure")

    @classmethod
    def failed(cls, outcome: Outcome, detail: str, lost: bool = False) -> AgentResult:
        """Return the result of an agent that failed."""
        return cls(outcome=outcome, detail=detail, lost=lost)
