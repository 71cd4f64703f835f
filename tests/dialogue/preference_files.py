"""Preference files for tests, in the forms of public data sets. Their sentences are made up, and the better answer is polite."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

TOPICS = [
    "rice",
    "bread",
    "soup",
    "tea",
    "bikes",
    "roses",
    "cats",
    "boats",
    "maps",
    "songs",
    "stars",
    "snow",
    "chess",
    "paint",
    "glass",
    "trains",
    "shoes",
    "bees",
    "salt",
    "wool",
]
ASKED = (
    "how do i start with {}",
    "tell me about {}",
    "what is good about {}",
    "where do i find {}",
    "who knows {}",
    "why do people like {}",
)
POLITE = ("gladly , {} is easy", "of course , {} is fun", "happy to help with {}", "good question , try {} slowly")
RUDE = ("no idea about {}", "{} is dull , go away", "stop asking about {}", "find {} by yourself")


def dialogues(count: int, seed: int = 0) -> list[tuple[list[tuple[str, str]], str, str]]:
    """Return prompts as (role, content), each with a polite and a rude answer of about the same length."""
    draw = random.Random(seed)
    result = []
    for _ in range(count):
        topic, other = draw.sample(TOPICS, 2)
        prompt = [("user", draw.choice(ASKED).format(topic))]
        if draw.random() < 0.25:
            prompt += [("assistant", draw.choice(POLITE + RUDE).format(topic)), ("user", f"and {other} ?")]
            topic = other
        result.append((prompt, draw.choice(POLITE).format(topic), draw.choice(RUDE).format(topic)))
    return result


def transcript_row(prompt: list[tuple[str, str]], chosen: str, rejected: str) -> dict[str, Any]:
    """Return a row as Anthropic/hh-rlhf has it."""
    speakers = {"user": "Human", "assistant": "Assistant"}
    before = "".join(f"\n\n{speakers[role]}: {content}" for role, content in prompt)
    return {name: f"{before}\n\nAssistant: {text}" for name, text in (("chosen", chosen), ("rejected", rejected))}


def conversation_row(prompt: list[tuple[str, str]], chosen: str, rejected: str) -> dict[str, Any]:
    """Return a row as trl-lib/ultrafeedback_binarized has it, with the prompt in both conversations, and ratings."""
    before = [{"role": role, "content": content} for role, content in prompt]
    return {
        "chosen": [*before, {"role": "assistant", "content": chosen}],
        "rejected": [*before, {"role": "assistant", "content": rejected}],
        "score_chosen": 8.0,
        "score_rejected": 5.5,
    }


def titled_conversation_row(prompt: list[tuple[str, str]], chosen: str, rejected: str) -> dict[str, Any]:
    """Return a row as HuggingFaceH4/ultrafeedback_binarized has it: also with the first question as text."""
    return {"prompt": prompt[0][1], "prompt_id": "0", **conversation_row(prompt, chosen, rejected)}


def explicit_row(prompt: list[tuple[str, str]], chosen: str, rejected: str) -> dict[str, Any]:
    """Return a row in TRL's explicit form: the prompt, and one message in each answer."""
    return {
        "prompt": [{"role": role, "content": content} for role, content in prompt],
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
    }


def prompted_transcript_row(prompt: list[tuple[str, str]], chosen: str, rejected: str) -> dict[str, Any]:
    """Return a row as Dahoas/full-hh-rlhf has it: the prompt as a transcript that ends with the opening of the answer."""
    row = transcript_row(prompt, "", "")
    return {"prompt": row["chosen"].rstrip(), "chosen": f" {chosen}", "rejected": f" {rejected}"}


ROWS: dict[str, Callable[[list[tuple[str, str]], str, str], dict[str, Any]]] = {
    "transcripts": transcript_row,
    "conversations": conversation_row,
    "conversations with a title": titled_conversation_row,
    "explicit": explicit_row,
    "transcripts with a prompt": prompted_transcript_row,
}


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """Write JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_dialogues(path: Path, count: int, form: str = "transcripts", seed: int = 0) -> Path:
    """Write a preference file in one of the forms of ROWS."""
    return write_rows(path, (ROWS[form](*dialogue) for dialogue in dialogues(count, seed)))
