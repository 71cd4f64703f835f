"""Tokenizers of checkpoints. This module does not import torch, so that a process that only tokenizes starts fast."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers

from quartet.errors import ModelError
from quartet.model_files.hub_models import model_directory
from quartet.model_files.tokenizer_check import check_tokenizer, tokenizer_location

SAFE = {"trust_remote_code": False}
"""Options of every load: never run code from a checkpoint."""


def load_tokenizer(model: str | Path) -> Any:
    """Load the tokenizer of a checkpoint directory or hub id. An adapter without one uses its base model's. Raises ModelError."""
    model = tokenizer_location(model)
    directory = model_directory(model, weights=False)
    check_tokenizer("model", directory)
    with explained(model, "tokenizer"):
        kind: Any = transformers.AutoTokenizer
        if _is_generic(directory):
            kind = transformers.PreTrainedTokenizerFast
        return kind.from_pretrained(str(directory), **SAFE)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return the SHA-256 of the vocabulary in hex. It is equal if two tokenizers map the same tokens to the same ids.

    EOS and pad ids are not included, because a reward model may use others than its policy.
    """
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{token!r} {index}\n".encode())
    return digest.hexdigest()


def _is_generic(directory: Path) -> bool:
    """Return whether tokenizer_config.json declares that tokenizer.json is complete.

    For some model types (such as qwen2) AutoTokenizer ignores this and builds the default tokenizer of the type around the
    vocabulary. The same text would then get other ids.
    """
    path = directory / "tokenizer_config.json"
    if not path.is_file() or not (directory / "tokenizer.json").is_file():
        return False
    return json.loads(path.read_text()).get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast")


@contextlib.contextmanager
def explained(model: str | Path, part: str) -> Iterator[None]:
    """Turn any library error about a broken checkpoint into a ModelError of one line."""
    try:
        yield
    except ModelError:
        raise
    except (
        Exception
    ) as error:  # transformers, tokenizers, safetensors and json raise different types, some only Exception
        correct = "correct it: " if part == "config.json" else ""
        raise ModelError(
            f"model {model}: the {part} cannot be used: {first_line(error)} ({type(error).__name__}); "
            f"{correct}expected a complete Hugging Face checkpoint with safetensors weights"
        ) from error


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no reason given"]
    # The first line of an error of a config only names the check.
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return text if len(text) <= 200 else text[:200] + "..."
