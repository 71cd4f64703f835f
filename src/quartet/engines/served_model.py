"""Description of the policy for an engine, read from the files of its checkpoint without transformers."""

from __future__ import annotations

from typing import Any

import structlog

from quartet.engines.engine import ServedModel
from quartet.errors import ModelError
from quartet.model_files.hub_models import model_directory
from quartet.model_files.stop_tokens import read_json_object, read_stop_ids

log = structlog.get_logger()


def read_served_model(model: str, dtype: str) -> ServedModel:
    """Return the description of the checkpoint at ``model``, a path or hub id. Raises ModelError."""
    directory = model_directory(model, weights=False)
    config = read_json_object(directory / "config.json", required=True)
    text: dict[str, Any] = config.get("text_config") or config
    size = text.get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ModelError(f"model {model}: config.json has no vocab_size; give the checkpoint of a language model")
    positions = text.get("max_position_embeddings") or text.get("n_positions") or 0
    try:
        stop_ids, ignored = read_stop_ids(directory, directory, size)
    except ModelError as error:
        raise ModelError(f"model {model}: {error}") from None
    for line in ignored:
        log.warning(f"model {model}: {line}")
    return ServedModel(str(directory), dtype, stop_ids, size, int(positions))
