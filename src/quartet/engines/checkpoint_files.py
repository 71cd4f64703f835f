"""Folders with weights for engines that read them from disk: checkpoints and LoRA adapters, without torch.

The files are those of ``save_pretrained``: config.json with model.safetensors, and adapter_config.json with
adapter_model.safetensors.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quartet.engines.engine import ServedModel
from quartet.errors import ConfigError, ServiceFailed
from quartet.model_files.hub_models import model_directory
from quartet.weight_transfer.tensors import ITEM_BYTES, AdapterSettings, HostTensor, TensorType, WeightSet

ADAPTER_PREFIX = "base_model.model."
"""Prefix of every name in PEFT's adapter_model.safetensors."""
_OTHER_FILES = ("generation_config.json",)
_DTYPES: dict[str, TensorType] = {"F32": "F32", "BF16": "BF16", "F16": "F16"}


def base_tensors(weights: WeightSet) -> dict[str, HostTensor]:
    """Return the tensors of the model itself, without those of its adapter."""
    return {name: tensor for name, tensor in weights.tensors.items() if not _is_adapter_name(name, weights)}


def adapter_tensors(weights: WeightSet) -> dict[str, HostTensor]:
    """Return the tensors of the adapter; none without one."""
    return {name: tensor for name, tensor in weights.tensors.items() if _is_adapter_name(name, weights)}


def write_checkpoint(folder: Path, served_model: ServedModel, tensors: Mapping[str, HostTensor]) -> None:
    """Write a new folder with the model's config.json and these weights.

    Raises ConfigError without a readable config.json, and ServiceFailed if the disk is full or read-only.
    """
    source = model_directory(served_model.model, weights=False)
    try:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model {served_model.model}: config.json cannot be read: {error}; save the model again"
        ) from None
    try:
        folder.mkdir(parents=True)
        text = json.dumps(readable_by_older_versions(config, served_model.dtype), indent=2, sort_keys=True)
        (folder / "config.json").write_text(text, encoding="utf-8")
        for name in _OTHER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        write_safetensors(folder / "model.safetensors", tensors)
    except OSError as error:
        raise _write_failed(folder, error) from None


def write_adapter(folder: Path, base: str, settings: AdapterSettings, tensors: Mapping[str, HostTensor]) -> None:
    """Write a new folder with an adapter in PEFT's format. Raises ServiceFailed if the disk is full or read-only."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(settings.target_modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    try:
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
        write_safetensors(folder / "adapter_model.safetensors", tensors)
    except OSError as error:
        raise _write_failed(folder, error) from None


def readable_by_older_versions(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a config.json that transformers 4 reads, too.

    transformers 5 renamed ``torch_dtype`` and moved ``rope_theta`` and ``rope_scaling`` into ``rope_parameters``. Version 4
    ignores the new names and would compute with its defaults.
    """
    result = {**config, "dtype": dtype, "torch_dtype": dtype}
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        result.setdefault("rope_theta", rope["rope_theta"])
        result.setdefault("rope_scaling", scaling if scaling.get("rope_type", "default") != "default" else None)
    return result


def write_safetensors(path: Path, tensors: Mapping[str, HostTensor]) -> None:
    """Write tensors as safetensors, without a second copy in memory. Raises OSError."""
    # The order of the safetensors library keeps every tensor aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-ITEM_BYTES[item[1].dtype], item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in ordered:
        end = offset + tensor.data.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in ordered:
            file.write(tensor.data.data)


def read_safetensors(path: Path) -> dict[str, HostTensor]:
    """Return the tensors of a file that ``write_safetensors`` wrote, as views of its pages. Raises OSError."""
    pages = np.memmap(path, np.uint8, "r")
    (length,) = struct.unpack("<Q", pages[:8].tobytes())
    header = json.loads(pages[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    result = {}
    for name, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        result[name] = HostTensor(_DTYPES[entry["dtype"]], tuple(entry["shape"]), pages[start:end])
    return result


def _is_adapter_name(name: str, weights: WeightSet) -> bool:
    return weights.adapter is not None and name.startswith(ADAPTER_PREFIX)


def _write_failed(folder: Path, error: OSError) -> ServiceFailed:
    return ServiceFailed(
        f"engine folder {folder}: weights cannot be written: {error}; free space, or choose another disk"
    )
