"""Check that the directory of a model contains a tokenizer, by the names of its files. Does not import torch."""

from __future__ import annotations

import json
from pathlib import Path

from quartet.errors import ModelError

_VOCABULARY_PATTERNS = ("tokenizer.*", "vocab*", "*.model", "*.tokenizer", "*.tiktoken", "tekken.json")
_BYTE_LEVEL_CLASSES = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
"""Tokenizer classes that work on bytes and need no vocabulary."""


def has_tokenizer(directory: Path) -> bool:
    """Return whether the directory contains a vocabulary in any format of transformers, or needs none."""
    return (
        any(any(directory.glob(pattern)) for pattern in _VOCABULARY_PATTERNS)
        or _tokenizer_class(directory) in _BYTE_LEVEL_CLASSES
    )


def check_tokenizer(what: str, directory: Path) -> None:
    """Check that the directory contains a tokenizer. Raises ModelError with a message that starts with ``what``.

    transformers does not check this: for some model types it creates a tokenizer without a vocabulary.
    """
    if not has_tokenizer(directory):
        raise ModelError(
            f"{what} {directory}: its tokenizer files are missing; expected tokenizer.json, or another vocabulary "
            "(tokenizer.model, vocab.json, vocab.txt, ...): copy them from the original model, or save its tokenizer "
            "there with save_pretrained"
        )


def _tokenizer_class(directory: Path) -> str | None:
    try:
        content = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content.get("tokenizer_class") if isinstance(content, dict) else None
