"""Description of the policy for an engine, read from the files of its checkpoint without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quartet.engines.engine import ServedModel
from quartet.errors import ModelError
from quartet.hub_models import model_directory


def read_served_model(model: str, dtype: str) -> ServedModel:
    """Return the description of the checkpoint at ``model``, a path or hub id. Raises ModelError."""
    directory = model_directory(model, weights=False)
    config = _read(directory / "config.json", required=True)
    text: dict[str, Any] = config.get("text_config") or config
    size = text.get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ModelError(f"model {model}: config.json has no vocab_size; give the checkpoint of a language model")
    positions = text.get("max_position_embeddings") or text.get("n_positions") or 0
    return ServedModel(str(directory), dtype, _stop_ids(directory, config, text), size, int(positions))


def _stop_ids(directory: Path, *configs: dict[str, Any]) -> frozenset[int]:
    """Return every token id that ends a response in the generation config, the model config or the tokenizer."""
    stops: set[int] = set()
    for content in (_read(directory / "generation_config.json"), *configs):
        ids = content.get("eos_token_id")
        stops.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    stops |= _tokenizer_stop_ids(directory)
    return frozenset(int(index) for index in stops)


def _tokenizer_stop_ids(directory: Path) -> set[int]:
    token = _read(directory / "tokenizer_config.json").get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        return set()
    tokenizer = _read(directory / "tokenizer.json")
    added = {item["content"]: item["id"] for item in tokenizer.get("added_tokens", ())}
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # A Unigram model lists [token, score] pairs.
        vocabulary = {item[0]: index for index, item in enumerate(vocabulary)}
    index = added.get(content, vocabulary.get(content))
    return set() if index is None else {int(index)}


def _read(path: Path, required: bool = False) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise ModelError(f"model {path.parent}: {path.name} is missing; give a complete checkpoint") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"model {path}: cannot be read ({error}); give a complete checkpoint") from None
    if not isinstance(content, dict):
        raise ModelError(f"model {path}: expected a JSON object")
    return content
