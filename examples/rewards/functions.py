"""Reward functions to start from. README.md beside this file shows the config that calls them.

``prompt`` is what the policy saw, special tokens included; ``response`` what it wrote, without them; ``fields`` the prompt line's
own keys, such as "answer" in {"text": "What is 6 times 7?", "answer": 42}.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

TARGET_WORDS = 30
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def length_target(prompt: str, response: str, fields: dict[str, Any]) -> float:
    """1 for a response of ``fields["words"]`` words (30 where the line does not say), falling to 0 on either side."""
    target = int(fields.get("words", TARGET_WORDS))
    return math.exp(-abs(len(response.split()) - target) / target)


def final_number(prompt: str, response: str, fields: dict[str, Any]) -> float:
    """1 where the last number of the response is ``fields["answer"]``, 0 where it is another, -0.5 where there is none."""
    # A line without an answer is a mistake in the data: the KeyError ends the run, and is better than a reward of 0.
    answer = float(fields["answer"])
    numbers = NUMBER.findall(response.replace(",", ""))
    if not numbers:
        return -0.5
    return 1.0 if math.isclose(float(numbers[-1]), answer) else 0.0


def keywords(prompts: Sequence[str], responses: Sequence[str], fields: Sequence[dict[str, Any]]) -> list[float]:
    """The share of ``fields["keywords"]`` in each response. For ``batched: true``: one call scores a whole batch.

    A function that asks a server or a sandbox would send all requests of the batch at once here.
    """
    return [
        _share(response.lower(), line.get("keywords", [])) for response, line in zip(responses, fields, strict=True)
    ]


def shorter(prompt: str, response: str, initial_response: str, fields: dict[str, Any]) -> float:
    """A judge: the shorter of two responses is the better one."""
    lengths = len(response.split()), len(initial_response.split())
    return 0.5 if lengths[0] == lengths[1] else float(lengths[0] < lengths[1])


def _share(text: str, wanted: Sequence[str]) -> float:
    return sum(word.lower() in text for word in wanted) / len(wanted) if wanted else 0.0
