"""Writer of a model in Hugging Face format, one tensor after the other, without a copy of the model in host memory."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from quartet.models.hf_logging import suppress_hf_logging
from quartet.models.weights.safetensors_file import SafetensorsFile

MAX_FILE_SIZE = "50GB"
"""Limit of a file, as in ``save_pretrained``."""
_INDEX_FILE = "model.safetensors.index.json"
_LAYER = re.compile(r"^.*?\.\d+\.")


def write_config(model: Any, directory: Path, dtype: torch.dtype) -> None:
    """Write the files of ``save_pretrained`` other than weights. ``dtype``: the type of the weights."""
    with suppress_hf_logging():
        model.save_pretrained(directory, state_dict={})
    # The parameters of a sharded model of half precision are float32.
    path = directory / "config.json"
    content = {**json.loads(path.read_text(encoding="utf-8")), "dtype": str(dtype).removeprefix("torch.")}
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class StreamedModel:
    """The weight files of a model, with the names and the bytes that ``save_pretrained`` gives them.

    Some architectures store several tensors of a checkpoint as one, such as the experts of a layer. Such tensors are kept in host
    memory until the others of their layer have come.
    """

    def __init__(self, model: Any, state: Mapping[str, torch.Tensor], directory: Path) -> None:
        """Create the files. ``model`` may be on the meta device. Raises OSError.

        ``state``: the model's state by name, of which only shapes and types are used; tied weights are the same object.
        """
        self._model = model
        stubs: dict[int, torch.Tensor] = {}
        for value in state.values():
            stubs.setdefault(id(value), torch.empty(1))
        ignored = set(model._keys_to_ignore_on_save or ())
        kept = remove_tied_weights_from_state_dict(
            {name: stubs[id(value)] for name, value in state.items() if name not in ignored}, model
        )
        shapes = {name: torch.empty(state[name].shape, dtype=state[name].dtype, device="meta") for name in kept}
        # The name under which a tensor comes, and the one under which save_pretrained writes it.
        names = {id(state[name]): name for name in kept}
        self._kept_names = {name: names[id(value)] for name, value in state.items() if id(value) in names}
        self._group_of = _groups(model, shapes)
        self._missing = {group[0]: set(group) for group in self._group_of.values()}
        self._waiting: dict[str, torch.Tensor] = {}
        outputs = self._converted(shapes)
        plan = split_torch_state_dict_into_shards(
            outputs, filename_pattern="model{suffix}.safetensors", max_shard_size=MAX_FILE_SIZE
        )
        self._files: dict[str, SafetensorsFile] = {}
        with ExitStack() as stack:
            for file_name, members in plan.filename_to_tensors.items():
                tensors = {name: outputs[name] for name in members}
                file = stack.enter_context(SafetensorsFile(directory / file_name, tensors, {"format": "pt"}))
                self._files |= dict.fromkeys(members, file)
            if plan.is_sharded:
                index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
                text = json.dumps(index, indent=2, sort_keys=True) + "\n"
                (directory / _INDEX_FILE).write_text(text, encoding="utf-8")
            self._stack = stack.pop_all()

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor of the model's state, tied ones under any of their names. Raises OSError."""
        if name not in self._kept_names:
            return
        name = self._kept_names[name]
        group = self._group_of[name]
        if len(group) > 1:
            # A copy, because the caller may use the memory of this tensor for the next one.
            tensor = tensor.detach().to("cpu", copy=True)
        self._waiting[name] = tensor
        missing = self._missing[group[0]]
        missing.remove(name)
        if not missing:
            for output, value in self._converted({name: self._waiting.pop(name) for name in group}).items():
                self._files[output].write(output, value)

    def __enter__(self) -> StreamedModel:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _converted(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return _converted(self._model, state)


def _converted(model: Any, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of the model's state under the names of its checkpoint, split as in the checkpoint."""
    with suppress_hf_logging(), torch.no_grad():
        result: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(state))
    return result


def _groups(model: Any, shapes: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, ...]]:
    """Return the smallest groups of tensors that can be converted apart, by tensor: one tensor, a layer, or all tensors."""
    expected = {name: (value.shape, value.dtype) for name, value in _converted(model, shapes).items()}
    for key in (str, _layer):
        members: dict[str, list[str]] = {}
        for name in shapes:
            members.setdefault(key(name), []).append(name)
        result: dict[str, Any] = {}
        try:
            for group in members.values():
                for name, value in _converted(model, {name: shapes[name] for name in group}).items():
                    result[name] = (value.shape, value.dtype)
        except Exception:  # A conversion lacks a tensor of another group.
            result = {}
        if result == expected:
            return {name: tuple(group) for group in members.values() for name in group}
    return dict.fromkeys(shapes, tuple(shapes))


def _layer(name: str) -> str:
    match = _LAYER.match(name)
    return match.group() if match else name
