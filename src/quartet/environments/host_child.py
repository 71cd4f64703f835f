"""Calls of environments in a worker process. Standard library only. See ``quartet.environments.host`` for the other side."""

from __future__ import annotations

import json
import math
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from quartet.environments.environment import Environment, EnvironmentFailed
from quartet.system.user_code import NotImportable, import_callable, location_of, text_of, wrong_arguments

_OUTCOMES = ("timeout", "scorer_error", "sandbox_error", "environment_error", "cancelled", "refused")
_LARGEST = 3.4028234663852886e38
"""Maximum of float32."""
MAX_SNAPSHOT_BYTES = 65536
"""Maximum size of a snapshot as JSON."""
CLOSE_SECONDS = 2.0
"""Time for the close method of an environment, during which the other sessions of the process wait."""

HINT = "; the text is left out because it may quote a response: set environment.quote_texts: true to see it"
"""End of a message about an exception without its text."""

Answer = dict[str, Any]
"""``observation``, ``reward``, ``done`` and ``snapshot``, JSON or ""; or ``outcome`` and ``detail`` of a failure; or ``unknown``
for a lost session."""

_episodes: dict[str, Any] = {}
"""The environments of this process, by session."""


def call(method: str, arguments: dict[str, Any]) -> Answer:
    """Call one of the functions below. The worker process calls this function only."""
    return _METHODS[method](**arguments)


def describe(name: str, settings: dict[str, Any]) -> Answer:
    """Import the class ``name``. Return why it cannot be used with ``settings`` as ``problem``, or its attributes."""
    try:
        kind = import_callable(name)
    except NotImportable as error:
        return {"problem": str(error)}
    if problem := unusable_reason(kind, tuple(settings)):
        return {"problem": problem}
    return {"keeps_special_tokens": bool(getattr(kind, "keeps_special_tokens", False))}


def unusable_reason(kind: Any, settings: Sequence[str]) -> str:
    """Return why ``kind`` is no class of environments that are created with ``settings`` by name, or "" if it is one."""
    missing = [method for method in ("reset", "step") if not callable(getattr(kind, method, None))]
    if not isinstance(kind, type) or missing:
        return (
            f"is not an environment: {'no method ' + missing[0] if missing else 'not a class'}; derive a class from "
            "quartet.environments.Environment"
        )
    undefined = [method for method in ("reset", "step") if getattr(kind, method) is getattr(Environment, method)]
    if undefined:
        return f"does not define {undefined[0]}"
    if _snapshots(kind) and getattr(kind, "restore", Environment.restore) is Environment.restore:
        return "defines snapshot, but not restore"
    problem = wrong_arguments(kind, 0, settings)
    return problem and f"environment.arguments: {problem}"


def reset(session: str, name: str, settings: dict[str, Any], seed: int, fields: dict[str, Any], quotes: bool) -> Answer:
    """Create the environment of a session, in the place of an earlier one, and reset it."""
    close(session)

    def create() -> Answer:
        _episodes[session] = import_callable(name)(**settings)
        return {}

    def start() -> Answer:
        observation = _observation(_episodes[session].reset(seed, fields), "reset")
        return {"observation": observation, "reward": 0.0, "done": False, "snapshot": _snapshot(_episodes[session])}

    # The text of its exceptions quotes no prompt: it has seen none.
    return _guarded(session, create, quotes=True) or _guarded(session, start, quotes)


def restore(
    session: str,
    name: str,
    settings: dict[str, Any],
    seed: int,
    fields: dict[str, Any],
    snapshot: Any,
    quotes: bool,
) -> Answer:
    """Create the environment of a session, in the place of an earlier one, and restore a snapshot."""
    close(session)

    def create() -> Answer:
        _episodes[session] = import_callable(name)(**settings)
        return {}

    def take() -> Answer:
        _episodes[session].restore(seed, fields, snapshot)
        return {"observation": "", "reward": 0.0, "done": False, "snapshot": ""}

    return _guarded(session, create, quotes=True) or _guarded(session, take, quotes)


def step(session: str, text: str, quotes: bool) -> Answer:
    """Give a turn to the environment of a session."""
    environment = _episodes.get(session)
    if environment is None:
        return {"unknown": True}

    def take() -> Answer:
        result = environment.step(text)
        if not isinstance(result, tuple | list) or len(result) != 3:
            raise _Malformed("step", result, "(observation, reward, done)")
        observation, reward, done = result
        answer = {"observation": _observation(observation, "step"), "reward": _number(reward), "done": _flag(done)}
        return {**answer, "snapshot": "" if answer["done"] else _snapshot(environment)}

    return _guarded(session, take, quotes)


def close(session: str) -> Answer:
    """Close the environment of a session, if there is one. A close that takes longer than CLOSE_SECONDS is interrupted."""
    environment = _episodes.pop(session, None)
    try:
        if environment is not None and hasattr(environment, "close"):
            with _interrupted_after(CLOSE_SECONDS):
                environment.close()
    except BaseException as error:  # The session is over in any case.
        traceback.print_tb(error.__traceback__)
        problem = (
            f"took longer than {CLOSE_SECONDS:g} s" if isinstance(error, _TooSlow) else f"raised {type(error).__name__}"
        )
        print(f"close {problem}", file=sys.stderr)
    return {}


_METHODS: dict[str, Callable[..., Answer]] = {
    "describe": describe,
    "reset": reset,
    "restore": restore,
    "step": step,
    "close": close,
}


class _TooSlow(BaseException):
    """A close took too long. Not an Exception, so that the environment does not handle it by mistake."""


@contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Raise _TooSlow in the block after ``seconds``. For the main thread, which makes all calls of the process."""

    def interrupt(number: int, frame: object) -> None:
        raise _TooSlow

    earlier = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)


class _Malformed(Exception):
    """A result of the environment that is not what it must return. The text quotes no observation."""

    def __init__(self, method: str, value: Any, expected: str) -> None:
        super().__init__(f"{method} returned {_shown(value)}, expected {expected}")


def _guarded(session: str, work: Callable[[], Answer], quotes: bool) -> Answer:
    """Return the answer of ``work``, or the outcome of its exception. A failed session is closed."""
    try:
        return work()
    except _Malformed as error:
        answer = {"outcome": "environment_error", "detail": str(error)}
    except BaseException as error:  # sys.exit() of one episode is no reason to end the process.
        explained = isinstance(error, EnvironmentFailed)
        kind, text = type(error).__name__, text_of(error) if quotes or explained else ""
        location = location_of(error)
        traceback.print_tb(error.__traceback__)
        print(f"{kind}: {text}" if text else kind, file=sys.stderr)
        where = f" at {location}" if location else ""
        outcome = getattr(error, "outcome", None)
        answer = {
            "outcome": outcome if outcome in _OUTCOMES else "environment_error",
            "detail": text if explained and text else f"raised {kind}{where}{': ' + text if text else HINT}",
        }
    close(session)
    return answer


def _observation(value: Any, method: str) -> str | list[dict[str, Any]]:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, tuple | list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in value
    ):
        return list(value)
    raise _Malformed(method, value, "an observation: text, or messages with role and content")


def _snapshots(kind: type) -> bool:
    """Return whether environments of a class may be restored."""
    return getattr(kind, "snapshot", Environment.snapshot) is not Environment.snapshot


def _snapshot(environment: Any) -> str:
    """Return the snapshot of an environment as JSON, or "" if it has none."""
    if not _snapshots(type(environment)):
        return ""
    value = environment.snapshot()
    if value is None:
        return ""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise _Malformed("snapshot", value, "a JSON value, or None") from None
    if len(text) > MAX_SNAPSHOT_BYTES:
        raise _Malformed("snapshot", text, f"at most {MAX_SNAPSHOT_BYTES} as JSON, or None: then turns are repeated")
    return text


def _number(value: Any) -> float:
    if hasattr(value, "item"):
        value = value.item()  # A number of NumPy or torch.
    # A bool is an int in Python, but as a reward it is more likely a mistake, such as a swapped done.
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST <= value <= _LARGEST:
        raise _Malformed("step", value, "a finite number as the reward")
    return float(value)


def _flag(value: Any) -> bool:
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, bool):
        raise _Malformed("step", value, "true or false as done")
    return value


def _shown(value: Any) -> str:
    """Describe a value without quoting text."""
    if isinstance(value, str):
        return f"a string of {len(value)} characters"
    if isinstance(value, list | dict | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return f"a value of type {type(value).__name__}"
