"""Check the tokenizer files in the directory of a model, and compare those of two models. Does not import torch."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path
from typing import Any

from quartet.errors import ModelError
from quartet.model_files.adapter_files import adapter_chain

_VOCABULARY_PATTERNS = ("tokenizer.*", "vocab*", "*.model", "*.tokenizer", "*.tiktoken", "tekken.json")
_BYTE_LEVEL_CLASSES = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
"""Tokenizer classes that work on bytes and need no vocabulary."""


def has_tokenizer(directory: Path) -> bool:
    """Return whether the directory contains a vocabulary in any format of transformers, or needs none."""
    return (
        any(any(directory.glob(pattern)) for pattern in _VOCABULARY_PATTERNS)
        or _tokenizer_class(directory) in _BYTE_LEVEL_CLASSES
    )


def tokenizer_location(model: str | Path) -> str | Path:
    """Return the location of a checkpoint's tokenizer: a directory or hub id. An adapter without one uses its base model's."""
    base, adapters = adapter_chain(model)
    for adapter in reversed(adapters):
        if has_tokenizer(adapter):
            return adapter
    return base


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


def first_difference(expected: Path, actual: Path) -> str:
    """Return the lowest token id that two tokenizers map to different tokens, as text; "" if their files show none.

    transformers adds the tokens that tokenizer_config.json and its neighbours name while it loads a tokenizer. So an id that
    only one tokenizer.json has differs only if those files of the other do not name its token.
    """
    first, second = expected / "tokenizer.json", actual / "tokenizer.json"
    try:
        if filecmp.cmp(first, second, shallow=False):
            return ""
        ours, theirs = (_tokens(json.loads(file.read_text(encoding="utf-8"))) for file in (first, second))
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return ""  # Other formats are compared when the models are loaded.
    for index in sorted(ours.keys() | theirs.keys()):
        if index not in theirs:
            if not _names(actual, ours[index]):
                return f"token id {index} is missing, expected {ours[index]!r}"
        elif index not in ours:
            if not _names(expected, theirs[index]):
                return f"token id {index} is {theirs[index]!r}, expected no such id"
        elif ours[index] != theirs[index]:
            return f"token id {index} is {theirs[index]!r}, expected {ours[index]!r}"
    return ""


def _names(directory: Path, token: str) -> bool:
    """Return whether the files of a tokenizer besides tokenizer.json contain a token."""
    quoted = {json.dumps(token), json.dumps(token, ensure_ascii=False)}
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        try:
            content = (directory / name).read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue
        if any(text in content for text in quoted):
            return True
    return False


def _tokens(content: dict[str, Any]) -> dict[int, str]:
    """Return the token of each id in a tokenizer.json."""
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, dict):
        tokens = {int(index): token for token, index in vocabulary.items()}
    else:  # Unigram: a list of tokens and their scores.
        tokens = {index: entry[0] for index, entry in enumerate(vocabulary)}
    return tokens | {int(added["id"]): added["content"] for added in content.get("added_tokens") or ()}


def _tokenizer_class(directory: Path) -> str | None:
    try:
        content = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content.get("tokenizer_class") if isinstance(content, dict) else None
