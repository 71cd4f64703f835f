"""Comparison of what a checkpoint says with what it holds: names, shapes and ties of its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import nn
from transformers.models.auto.auto_factory import _get_model_class

from quartet.errors import ModelError
from quartet.model_files.weight_files import TensorEntry, read_headers, same_bytes
from quartet.models.weights.safetensors_file import DTYPES
from quartet.models.weights.tokenizer import SAFE
from quartet.models.weights.towers import is_part_of

log = structlog.get_logger()
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Types of weights in safetensors files that hold the values themselves."""

_CAUSAL_MASKS = ("bias", "masked_bias", "causal_mask")
"""Names of constants that earlier versions of transformers saved with the attention of GPT-2, GPT-Neo, GPT-J and CodeGen."""


def describe_model(directory: Path, config: Any, kind: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return the model of a checkpoint on the meta device, and the report of transformers about its tensors.

    Reads the headers of the files, and the values only of weights that the config ties and that the files hold twice in the
    same type. Raises ModelError.
    """
    headers = read_headers(directory)
    tensors = {
        name: torch.empty(entry.shape, dtype=DTYPES.get(entry.dtype, torch.float32), device="meta")
        for name, (_, entry) in headers.items()
    }
    model_class: Any = _get_model_class(config, kind._model_mapping)  # type: ignore[no-untyped-call]
    model, report = model_class.from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=torch.float32,
        device_map={"": "meta"},
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **SAFE,
    )
    for target, source in model.all_tied_weights_keys.items():
        one, other = headers.get(target), headers.get(source)
        # Values of two types are equal or not only as what they are loaded to, so loading compares them.
        if one and other and one[1].dtype == other[1].dtype and not same_bytes(one, other):
            raise _tied_differently(target, source)
    return model, report


def check_contents(
    model: Any,
    report: Mapping[str, Any],
    headers: Mapping[str, tuple[Path, TensorEntry]],
    outside: Sequence[str] = (),
) -> list[str]:
    """Return notes about tensors of a checkpoint that a loaded model does not use.

    ``report`` is that of transformers, ``headers`` those of the files. ``outside``: names of parts of the class of the model that
    are not loaded. Raises ModelError if weights of the model are missing,
    have another shape or hold quantised values, if a tensor within its layers has no place in them, or if weights differ that
    its config ties.
    """
    name = type(model).__name__
    coded = {
        name: headers[name][1].dtype
        for name, _ in model.named_parameters()
        if name in headers and headers[name][1].dtype not in _FLOATS
    }
    if coded:
        first = min(coded)
        raise ModelError(
            f"{len(coded)} weights have types that hold quantised values, the first {first!r} of {coded[first]}, and config.json "
            "has no quantization_config; give the checkpoint in bfloat16 or float32 that it was made from"
        )
    missing = sorted(report["missing_keys"])
    if missing:
        hint = ""
        if missing == [_output_name(model)]:
            hint = ", or set tie_word_embeddings true in config.json if the model was trained so"
        raise ModelError(
            f"{len(missing)} weights of {name} are missing in the files, the first {missing[0]!r}; they would start random. "
            f"Give a complete {name} checkpoint{hint}"
        )
    if report["mismatched_keys"]:
        first, found, expected = min(report["mismatched_keys"], key=lambda item: str(item[0]))
        raise ModelError(
            f"{len(report['mismatched_keys'])} weights have another shape than config.json says, the first {first!r}: "
            f"{list(found)}, expected {list(expected)}; correct config.json, or give a complete {name} checkpoint"
        )
    for target, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        one, other = model.get_parameter_or_buffer(target), model.get_parameter_or_buffer(source)
        if one is not other and not one.is_meta:
            raise _tied_differently(target, source)
    unused = sorted(
        key for key in report["unexpected_keys"] if not (_is_causal_mask(model, key) or is_part_of(key, outside))
    )
    within = [key for key in unused if _is_within_layers(model, key)]
    if within:
        raise ModelError(
            f"{len(within)} tensors in the files have no place in {name} as config.json describes it, the first {within[0]!r}; "
            "the model would compute something else without them: correct config.json (such as attention_bias, num_hidden_layers "
            "or model_type), or remove them from the files"
        )
    if unused:
        others = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        return [f"the files hold {unused[0]}{others}, which {name} does not have; not used"]
    return []


def _tied_differently(target: str, source: str) -> ModelError:
    return ModelError(
        f"config.json ties {target} to {source} (tie_word_embeddings true, or by default), and the files hold different values "
        f"for them; set tie_word_embeddings false in config.json, or remove {target} from the files"
    )


def _output_name(model: Any) -> str | None:
    """Return the name of the weight of the vocabulary projection, or None."""
    projection = model.get_output_embeddings()
    names = (name for name, module in model.named_modules() if module is projection)
    return None if projection is None else f"{next(names, '')}.weight"


def _is_causal_mask(model: nn.Module, name: str) -> bool:
    """Return whether a tensor is the mask of an attention, which its class computes. The bias of a layer has a layer's name."""
    path, _, last = name.rpartition(".")
    if last not in _CAUSAL_MASKS or "attn" not in path.split("."):
        return False
    for prefix in ("", f"{getattr(model, 'base_model_prefix', '')}."):
        try:
            # An attention consists of layers. Biases belong to those.
            return any(True for _ in model.get_submodule(prefix + path).children())
        except AttributeError:
            continue
    return False


def _is_within_layers(model: nn.Module, name: str) -> bool:
    """Return whether a tensor's name begins with that of a module inside the model's backbone or of a head.

    Tensors of other heads, and of towers for images, are outside.
    """
    module: Any = model
    for part in name.split(".")[:-1]:
        inner = module._modules.get(part)
        if inner is None:
            break
        module = inner
    return module is not model and module is not getattr(model, "base_model", None)
