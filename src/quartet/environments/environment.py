"""The class that users derive their environments from. Standard library only: a worker process starts fast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

Message = dict[str, Any]
"""A message of a chat: ``role``, such as user or tool, and ``content``."""
Observation = str | Sequence[Message] | None
"""Text, or messages of a chat. None and "" mean that there is no observation."""


class EnvironmentFailed(Exception):
    """The environment cannot continue. ``outcome`` is that of the trajectory: environment_error, timeout, refused, ...

    Logs show the text, so it must not quote prompts or turns. The text of other exceptions is left out.
    """

    def __init__(self, text: str, outcome: str = "environment_error") -> None:
        super().__init__(text)
        self.outcome = outcome


class Environment:
    """One episode. A subclass defines ``reset`` and ``step``. Every session has an object of its class.

    The object is created with the keyword arguments of ``environment.arguments``. It lives in a worker process together with the
    objects of other sessions, so it must not keep state in module variables. Equal seeds, fields and turns should give equal
    observations and rewards: then an episode can be repeated after a failure, and a killed run ends with the same bits.

    An episode that loses its object to a failure is repeated in another one: reset, and every turn again. With ``snapshot`` and
    ``restore`` it continues instead, so that no turn has its effects twice. If ``restore`` fails, the episode begins again in
    the next attempt.
    """

    keeps_special_tokens: ClassVar[bool] = False
    """True if ``step`` gets the text of special tokens, such as the end-of-sequence token."""

    def reset(self, seed: int, fields: dict[str, Any]) -> Observation:
        """Start the episode and return the observation before the policy's first turn.

        ``seed`` is 0 to 2**63 - 1; ``fields`` are those of the prompt's line. The prompt precedes the observation.
        """
        return None

    def step(self, text: str) -> tuple[Observation, float, bool]:
        """Take the policy's turn. Return the observation, the reward of the turn, and whether the episode is over."""
        raise NotImplementedError

    def snapshot(self) -> Any:
        """Return the state after the last call as a JSON value of at most 64 KiB, or None if it cannot be restored.

        Called after ``reset`` and after every turn but the last.
        """
        return None

    def restore(self, seed: int, fields: dict[str, Any], state: Any) -> None:
        """Continue in this new object after the turn whose ``snapshot`` returned ``state``, in the place of ``reset``.

        ``seed`` and ``fields`` are those of the episode's reset.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release what the episode holds. Called once, unless its process is killed. Interrupted after 2 seconds."""
