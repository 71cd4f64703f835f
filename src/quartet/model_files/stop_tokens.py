"""Stop tokens of a policy: the ids in the files of its checkpoint that end a response. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quartet.errors import ModelError
from quartet.model_files.weight_files import LFS_POINTER, is_lfs_pointer

NO_STOP_TOKEN = (
    "no stop token, so every response is as long as rollout.max_response_tokens allows and counts as truncated; set "
    "eos_token_id in generation_config.json, or rollout.stop_strings"
)
"""Warning for a policy without stop tokens and a run without stop strings."""


def select_stop_ids(sources: Mapping[str, Any], vocabulary_size: int | None) -> tuple[frozenset[int], list[str]]:
    """Return the ids in ``sources`` that end a response, and one line for each id that is ignored.

    ``sources``: values of eos_token_id by the name of their place. An id outside 0..``vocabulary_size`` - 1 never occurs in a
    response, so it is ignored; -1 is a common way to say "none". None as the size: only the lower bound is known. Raises
    ModelError for a value that is neither a whole number, a list of whole numbers, nor null.
    """
    stops: set[int] = set()
    ignored = []
    for place, value in sources.items():
        ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
        for index in ids:
            if type(index) is not int:
                raise ModelError(
                    f"{place} {json.dumps(value, default=str)}: expected a token id, a list of token ids, or null; correct it"
                )
            if index < 0 or (vocabulary_size is not None and index >= vocabulary_size):
                allowed = "0 or more" if vocabulary_size is None else f"0..{vocabulary_size - 1}"
                ignored.append(f"{place} {index}: ignored, because the token ids of the model are {allowed}")
            else:
                stops.add(index)
    return frozenset(stops), ignored


def read_stop_ids(
    directory: Path, tokenizer: Path, vocabulary_size: int | None = None
) -> tuple[frozenset[int], list[str]]:
    """Return the stop ids in the generation config, the model config and the tokenizer of a checkpoint, and ignored ones.

    ``directory`` contains config.json, ``tokenizer`` the tokenizer's files. Without ``vocabulary_size``, config.json tells it.
    Raises ModelError.
    """
    config = read_json_object(directory / "config.json")
    text = config.get("text_config")
    if vocabulary_size is None:
        sizes = [part.get("vocab_size") for part in (text, config) if isinstance(part, dict)]
        vocabulary_size = next((size for size in sizes if type(size) is int and size > 0), None)
    sources = {
        "generation_config.json: eos_token_id": read_json_object(directory / "generation_config.json").get(
            "eos_token_id"
        ),
        "config.json: eos_token_id": config.get("eos_token_id"),
        "config.json: text_config.eos_token_id": text.get("eos_token_id") if isinstance(text, dict) else None,
        "tokenizer_config.json: eos_token, id": _tokenizer_stop_id(tokenizer),
    }
    return select_stop_ids(sources, vocabulary_size)


def read_json_object(path: Path, required: bool = False) -> dict[str, Any]:
    """Return the content of a JSON file of a checkpoint; {} if the file is missing and not ``required``. Raises ModelError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise ModelError(f"model {path.parent}: {path.name} is missing; give a complete checkpoint") from None
    except (OSError, ValueError) as error:
        if is_lfs_pointer(path):
            raise ModelError(f"model {path}: {LFS_POINTER}") from None
        raise ModelError(f"model {path}: cannot be read ({error}); give a complete checkpoint") from None
    if not isinstance(content, dict):
        raise ModelError(f"model {path}: expected a JSON object")
    return content


def _tokenizer_stop_id(directory: Path) -> int | None:
    token = read_json_object(directory / "tokenizer_config.json").get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        return None
    tokenizer = read_json_object(directory / "tokenizer.json")
    try:
        added = {item["content"]: item["id"] for item in tokenizer.get("added_tokens") or ()}
        vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
        if isinstance(vocabulary, list):  # A Unigram model lists [token, score] pairs.
            vocabulary = {item[0]: index for index, item in enumerate(vocabulary)}
        index: int | None = added.get(content, vocabulary.get(content))
    except (LookupError, TypeError, AttributeError):
        raise ModelError(
            f"model {directory}: tokenizer.json is damaged; save the tokenizer again with save_pretrained"
        ) from None
    return index
