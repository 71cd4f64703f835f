"""A synthetic corpus of restaurant reviews in which favour is additive: the ground that the demo trains on.

A prompt sets the scene (``a late dinner with friends :``); a response has one clause per aspect of the visit, each
favourable or not, independently of the rest (`` the soup was superb , our waiter was rude , ...``). A judge prefers the
response with more favourable clauses, now and then wrongly. A reward that adds up over independent clauses leaves PPO
far to go: the best response lies several standard deviations above the mean of the untrained policy's.

Every word is lower case and set off by single spaces, so that a small vocabulary holds all of them.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

FAVOURABLE_SHARE = 0.25
"""The probability that a clause is favourable."""

_ASPECTS: tuple[tuple[str, ...], ...] = (
    ("the soup", "the bread", "the starter"),
    ("the fish", "the steak", "the pasta"),
    ("the wine", "the beer", "the coffee"),
    ("our waiter", "the service", "the staff"),
    ("the room", "the music", "the table"),
    ("the bill", "the price", "the visit"),
)
"""What the clauses of a response are about, in their order; each clause names one of its aspect's words."""

_FAVOURABLE = ("superb", "lovely", "great", "perfect")
_OTHER = ("plain", "fair", "usual", "dull", "poor", "bad", "sad", "awful")

_OCCASIONS = (
    "a quick lunch",
    "a late dinner",
    "a long brunch",
    "a small supper",
    "our first meal",
    "a birthday dinner",
)
_COMPANIES = ("with friends", "with my sister", "for two", "after work", "before the film", "on my own")
_DAYS = ("", " on monday", " on friday", " on sunday", " last week", " in may", " in the rain", " at noon")

_CLAUSE = re.compile(r"(?:the|our) \w+ was (\w+)")


@dataclass(frozen=True, slots=True)
class Review:
    """A prompt, its response (which begins with a space, to be put straight after it), and how favourable it is."""

    prompt: str
    response: str
    favourable: int
    """The number of favourable clauses, 0 to ``CLAUSES``."""

    @property
    def text(self) -> str:
        return self.prompt + self.response


@dataclass(frozen=True, slots=True)
class Preference:
    """Two responses to one prompt, the judge's choice first."""

    prompt: str
    chosen: str
    rejected: str
    unfinished: bool = False
    """True if ``rejected`` breaks off: no EOS follows it."""


CLAUSES = len(_ASPECTS)
"""The clauses of a complete response."""


def prompts() -> list[str]:
    """Every prompt there is, in a fixed order: a few hundred."""
    return [f"{occasion} {company}{day} :" for occasion in _OCCASIONS for company in _COMPANIES for day in _DAYS]


def reviews(count: int, seed: int) -> list[Review]:
    """``count`` reviews of scenes drawn at random."""
    draw = random.Random(f"{seed}/reviews")
    scenes = prompts()
    return [_review(draw.choice(scenes), FAVOURABLE_SHARE, draw) for _ in range(count)]


def preferences(count: int, seed: int, *, sharpness: float = 1.0, unfinished_share: float = 0.15) -> list[Preference]:
    """``count`` pairs of responses to one prompt each, by a judge who errs.

    The judge picks the first of two with probability ``sigmoid(sharpness * difference)``, the difference being that of
    their favourable clauses. Half of the pairs are as favourable as the corpus, half of any favour at all, so that a
    reward model has seen what PPO will make. In ``unfinished_share`` of the pairs the rejected response is the chosen
    one broken off: in mid-clause without an end, or ended before every aspect was spoken of. A reward model learns to
    expect complete responses, and PPO is not shown a way to score by saying less.
    """
    draw = random.Random(f"{seed}/preferences")
    scenes = prompts()
    return [_preference(draw.choice(scenes), draw, sharpness, unfinished_share) for _ in range(count)]


def favourable_clauses(response: str) -> int:
    """The number of favourable clauses in any text that speaks in such clauses."""
    return sum(word in _FAVOURABLE for word in _CLAUSE.findall(response))


def is_well_formed(response: str) -> bool:
    """Return whether the text is a complete response: a clause for each aspect, in order, and a full stop."""
    if not (response.startswith(" ") and response.endswith(" .")):
        return False
    clauses = response[1:-2].split(" , ")
    return len(clauses) == CLAUSES and all(map(_is_clause_about, clauses, _ASPECTS))


def _review(prompt: str, share: float, draw: random.Random) -> Review:
    favours = [draw.random() < share for _ in _ASPECTS]
    return Review(prompt, " " + " , ".join(_clauses(favours, draw)) + " .", sum(favours))


def _clauses(favours: Sequence[bool], draw: random.Random) -> Iterator[str]:
    for subjects, favour in zip(_ASPECTS, favours, strict=True):
        yield f"{draw.choice(subjects)} was {draw.choice(_FAVOURABLE if favour else _OTHER)}"


def _preference(prompt: str, draw: random.Random, sharpness: float, unfinished_share: float) -> Preference:
    share = FAVOURABLE_SHARE if draw.random() < 0.5 else draw.random()
    first, second = _review(prompt, share, draw), _review(prompt, share, draw)
    if draw.random() < unfinished_share:
        if draw.random() < 0.5:
            return Preference(prompt, first.response, _broken_off(first.response, draw), unfinished=True)
        return Preference(prompt, first.response, _ended_early(first.response, draw))
    difference = sharpness * (first.favourable - second.favourable)
    if draw.random() >= 1.0 / (1.0 + math.exp(-difference)):
        first, second = second, first
    return Preference(prompt, first.response, second.response)


def _broken_off(response: str, draw: random.Random) -> str:
    """``response`` up to some word before its full stop."""
    words = response.split(" ")
    return " ".join(words[: draw.randint(2, len(words) - 1)])


def _ended_early(response: str, draw: random.Random) -> str:
    """The first clauses of ``response``, not all of them, and a full stop."""
    clauses = response.split(" , ")
    return " , ".join(clauses[: draw.randint(1, len(clauses) - 1)]) + " ."


def _is_clause_about(clause: str, subjects: Sequence[str]) -> bool:
    subject, was, word = clause.partition(" was ")
    return bool(was) and subject in subjects and word in _FAVOURABLE + _OTHER
