"""Synthetic corpus of restaurant reviews for the demo. The reward of a review is additive over its clauses.

A prompt describes a visit (``a late dinner with friends :``). A response has one clause per aspect of the visit, each
favourable or not, independently of the others (`` the soup was superb , our waiter was rude , ...``). A judge prefers the
response with more favourable clauses, with some errors. An additive reward leaves PPO room to improve: the best response is
several standard deviations above the mean of the untrained policy.

All words are lower case and separated by single spaces, so a small vocabulary is sufficient.
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
"""Aspects of a visit, in the order of the clauses. Each clause uses one of the words of its aspect."""

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
    """A prompt, its response (with a leading space, to be appended), and the number of favourable clauses."""

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
    """True if ``rejected`` is cut off. No EOS follows it."""


CLAUSES = len(_ASPECTS)
"""The clauses of a complete response."""


def prompts() -> list[str]:
    """Return all prompts, a few hundred, in a fixed order."""
    return [f"{occasion} {company}{day} :" for occasion in _OCCASIONS for company in _COMPANIES for day in _DAYS]


def reviews(count: int, seed: int) -> list[Review]:
    """Return ``count`` reviews of randomly drawn prompts."""
    draw = random.Random(f"{seed}/reviews")
    scenes = prompts()
    return [_review(draw.choice(scenes), FAVOURABLE_SHARE, draw) for _ in range(count)]


def preferences(count: int, seed: int, *, sharpness: float = 1.0, unfinished_share: float = 0.15) -> list[Preference]:
    """Return ``count`` pairs of responses to one prompt each, ranked by a judge that makes errors.

    The judge prefers the first response with probability ``sigmoid(sharpness * difference)`` of their favourable clauses. Half of
    the pairs are as favourable as the corpus, and half are uniformly distributed, so that the reward model covers the responses
    that PPO will produce. In ``unfinished_share`` of the pairs the rejected response is the chosen one cut off: in a clause
    without an end, or ended after some of the aspects. So the reward model learns to expect complete responses, and PPO cannot
    score by omitting clauses.
    """
    draw = random.Random(f"{seed}/preferences")
    scenes = prompts()
    return [_preference(draw.choice(scenes), draw, sharpness, unfinished_share) for _ in range(count)]


def favourable_clauses(response: str) -> int:
    """Return the number of favourable clauses in a text."""
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
    """Return ``response`` up to a random word before its full stop."""
    words = response.split(" ")
    return " ".join(words[: draw.randint(2, len(words) - 1)])


def _ended_early(response: str, draw: random.Random) -> str:
    """Return some of the first clauses of ``response``, but not all, and a full stop."""
    clauses = response.split(" , ")
    return " , ".join(clauses[: draw.randint(1, len(clauses) - 1)]) + " ."


def _is_clause_about(clause: str, subjects: Sequence[str]) -> bool:
    subject, was, word = clause.partition(" was ")
    return bool(was) and subject in subjects and word in _FAVOURABLE + _OTHER
