"""Checks of prompts files."""

from __future__ import annotations

from pathlib import Path

from quartet.data import iterate_prompt_lines
from quartet.errors import DataError
from quartet.preflight.models import may_have_chat_template


def check_prompts(key: str, path: Path, model: str) -> tuple[int, str]:
    """Return the number of prompts in a file, and a line that reports it. Raises DataError."""
    prompts = chats = 0
    for line in iterate_prompt_lines(path):
        prompts += 1
        if line.messages is None:
            continue
        chats += 1
        if chats == 1 and not may_have_chat_template(model):
            raise DataError(
                f"prompts {path}:{line.line}: messages, but the tokenizer of actor.model {model} has no chat template; "
                "give prompts as text, or add a chat template to the tokenizer (chat_template.jinja)"
            )
    of_chats = f", {chats} of them messages" if chats else ""
    return prompts, f"{key} {path}: {prompts} prompts{of_chats}"
