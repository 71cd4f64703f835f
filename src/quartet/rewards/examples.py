"""Example reward functions: ``quartet.rewards.examples:keywords``. examples/rewards/README.md shows the configs.

``prompt``: the input of the policy, with special tokens. ``response``: its output, without special tokens. ``fields``: the other
keys of the prompt's line, such as "answer" in {"text": "What is 6 times 7?", "answer": 42}.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

TARGET_WORDS = 30
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def length_target(prompt: str, response: str, fields: dict[str, Any]) -> float:
    """Return 1 for a response of ``fields["words"]`` words (default 30), and less for shorter or longer ones."""
    target = int(fields.get("words", TARGET_WORDS))
    return math.exp(-abs(len(response.split()) - target) / target)


def final_number(prompt: str, response: str, fields: dict[str, Any]) -> float:
    """Return 1 if the last number of the response is ``fields["answer"]``, 0 if not, and -0.5 without a number."""
    # A line without an answer is an error in the data. The KeyError ends the run, which is better than a reward of 0.
    answer = float(fields["answer"])
    numbers = NUMBER.findall(response.replace(",", ""))
    if not numbers:
        return -0.5
    return 1.0 if math.isclose(float(numbers[-1]), answer) else 0.0


def keywords(prompts: Sequence[str], responses: Sequence[str], fields: Sequence[dict[str, Any]]) -> list[float]:
    """Return the share of ``fields["keywords"]`` in each response. With ``batched: true``, one call scores a batch.

    A function that calls a server or a sandbox can send all requests of the batch at once.
    """
    return [
        _share(response.lower(), line.get("keywords", [])) for response, line in zip(responses, fields, strict=True)
    ]


def shorter(prompt: str, response: str, initial_response: str, fields: dict[str, Any]) -> float:
    """Judge that prefers the shorter of two responses."""
    lengths = len(response.split()), len(initial_response.split())
    return 0.5 if lengths[0] == lengths[1] else float(lengths[0] < lengths[1])


def _share(text: str, words: Sequence[str]) -> float:
    return sum(word.lower() in text for word in words) / len(words) if words else 0.0
