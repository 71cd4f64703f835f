"""Directories of LoRA adapters, and the models that they belong to. Does not import torch."""

from __future__ import annotations

import json
from pathlib import Path

from quartet.errors import ModelError

CONFIG_FILE = "adapter_config.json"


def is_adapter(model: str | Path) -> bool:
    """Return whether this directory contains an adapter."""
    return (Path(model) / CONFIG_FILE).is_file()


def adapter_chain(model: str | Path) -> tuple[str | Path, list[Path]]:
    """Return the full checkpoint below an adapter directory, and the adapters on it, the lowest first.

    Returns ``(model, [])`` for a full checkpoint. Raises ModelError if an adapter names no base model or is its own base model.
    """
    adapters: list[Path] = []
    while is_adapter(model):
        directory = Path(model)
        if directory in adapters:
            raise ModelError(
                f"adapter {directory}: is its own base model; correct base_model_name_or_path in {CONFIG_FILE}"
            )
        adapters.append(directory)
        model = adapter_base(directory)
    return model, adapters[::-1]


def adapter_base(directory: Path) -> str:
    """Return the base model in an adapter's config. Raises ModelError, also for adapters other than LoRA."""
    try:
        content = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"adapter {directory}: {CONFIG_FILE} cannot be read: {error}; save it again") from error
    kind = content.get("peft_type") if isinstance(content, dict) else None
    if kind != "LORA":
        raise ModelError(f"adapter {directory}: {CONFIG_FILE} says peft_type {kind!r}; expected LORA")
    base = content.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(f"adapter {directory}: {CONFIG_FILE} has no base_model_name_or_path; add it")
    return base
