"""Whether a checkpoint's directory holds a tokenizer, as far as the names of its files say. No torch here."""

from __future__ import annotations

import json
from pathlib import Path

from quartet.errors import ModelError

_VOCABULARIES = ("tokenizer.*", "vocab*", "*.model", "*.tokenizer", "*.tiktoken", "tekken.json")
_OF_BYTES = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
"""Classes that need no vocabulary."""


def has_tokenizer(directory: Path) -> bool:
    """Whether there is a vocabulary in any of the forms that transformers reads, or none is needed."""
    return any(any(directory.glob(pattern)) for pattern in _VOCABULARIES) or _class_in(directory) in _OF_BYTES


def check_tokenizer(what: str, directory: Path) -> None:
    """Raises ModelError, which begins with ``what``, unless the directory holds a tokenizer.

    transformers does not see to that: for some model types it makes up a tokenizer that knows no text.
    """
    if not has_tokenizer(directory):
        raise ModelError(
            f"{what} {directory}: its tokenizer files are missing; expected tokenizer.json, or a vocabulary of another kind "
            "(tokenizer.model, vocab.json, vocab.txt, ...): copy them from where the model comes from, or save its tokenizer "
            "there with save_pretrained"
        )


def _class_in(directory: Path) -> str | None:
    try:
        content = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content.get("tokenizer_class") if isinstance(content, dict) else None
