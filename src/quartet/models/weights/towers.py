"""The parts of a multimodal checkpoint outside its language model: towers for images or audio, and their projectors.

They are not loaded, or frozen if the text pass needs them. Saves copy their tensors from the checkpoint's files.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from quartet.errors import ModelError, first_line
from quartet.model_files.weight_files import INDEX_FILE, SINGLE_FILE, TensorEntry, read_header

PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "audio_tokenizer_config.json",
    "chat_template.json",
)
"""Files of a checkpoint's processor besides those of its tokenizer."""
_COPIED_BYTES = 16 * 1024**2
_ATTRIBUTE = "unloaded_tensors"

_before_reading = threading.local()
_load_pretrained_model: Any = PreTrainedModel._load_pretrained_model


def _change_and_load(model: nn.Module, *arguments: Any, **more: Any) -> Any:
    for change in reversed(getattr(_before_reading, "changes", ())):
        change(model)
    return _load_pretrained_model(model, *arguments, **more)


PreTrainedModel._load_pretrained_model = staticmethod(_change_and_load)  # type: ignore[method-assign]


@contextmanager
def before_reading(change: Callable[[nn.Module], object]) -> Iterator[None]:
    """Change every model that transformers loads in this thread after its creation on the meta device, before it reads the files.

    The change of the innermost context is the first one.
    """
    before = getattr(_before_reading, "changes", ())
    _before_reading.changes = (*before, change)
    try:
        yield
    finally:
        _before_reading.changes = before


class _LanguageModelReached(BaseException):
    """Ends the trial of a text pass at the language model."""


def remove_towers(model: Any) -> list[str]:
    """Remove the parts of a multimodal model that a text pass does not need.

    Returns the names of all modules and parameters outside the language model, also of those that stay. A text model has none.
    Raises ModelError if the model computes nothing without images or audio.
    """
    if model.config.get_text_config() is model.config:
        return []
    outside = list(_outside(model))
    if outside and (error := _text_pass_error(model)) is None:
        for parent, name, _ in outside:
            module = parent._modules.get(name)
            if module is not None:
                parent._modules[name] = None
                if _text_pass_error(model) is not None:
                    parent._modules[name] = module
    elif outside and isinstance(error, (TypeError, ValueError)):
        raise ModelError(
            f"{type(model).__name__} does not compute text alone: {first_line(error)}; give a causal language model"
        )
    return [path for *_, path in outside]


def keep_unloaded(
    model: Any, outside: Sequence[str], headers: Mapping[str, tuple[Path, TensorEntry]], directory: Path
) -> None:
    """Freeze what ``remove_towers`` left in a loaded ``model``, and let its saves copy tensors of its checkpoint.

    These are the tensors of the parts ``outside`` the language model, and all others that the model does not have. ``headers``:
    those of the files in ``directory``.
    """
    state = model.state_dict(keep_vars=True)
    frozen = [name for name in state if is_part_of(name, outside)]
    for name in frozen:
        if isinstance(state[name], nn.Parameter):
            state[name].requires_grad_(False)
    kept = state.keys() - set(frozen)
    unloaded = {name: place for name, place in headers.items() if _loaded_name(model, name, state) not in kept}
    # save_pretrained leaves them out, because they may have been rounded.
    model._keys_to_ignore_on_save = [*(model._keys_to_ignore_on_save or ()), *frozen]
    files = {name: directory / name for name in PROCESSOR_FILES}
    setattr(
        model,
        _ATTRIBUTE,
        UnloadedTensors(unloaded, {name: path.read_bytes() for name, path in files.items() if path.is_file()}),
    )


def unloaded_tensors(model: Any) -> UnloadedTensors | None:
    """Return the tensors that saves of ``model`` copy, None for a text model."""
    result: UnloadedTensors | None = getattr(model, _ATTRIBUTE, None)
    return result


def is_part_of(name: str, paths: Iterable[str]) -> bool:
    """Return whether a tensor's name is one of ``paths`` or below one of them."""
    return any(name == path or name.startswith(f"{path}.") for path in paths)


class UnloadedTensors:
    """Tensors of a checkpoint's files that are not in the model. Saves copy their bytes.

    The files stay open, because a checkpoint from which a run was restored may be deleted.
    """

    def __init__(
        self, tensors: Mapping[str, tuple[Path, TensorEntry]], processor: Mapping[str, bytes] | None = None
    ) -> None:
        """``tensors``: file and header entry by name. ``processor``: contents of the processor's files."""
        self._processor = dict(processor or {})
        self._files = {path: os.open(path, os.O_RDONLY) for path in {path for path, _ in tensors.values()}}
        weakref.finalize(self, _close, list(self._files.values()))
        self._tensors = dict(tensors)

    def __deepcopy__(self, _: Any) -> UnloadedTensors:
        return self

    def add_to(self, directory: Path) -> None:
        """Add the tensors to the weight files of the model that was saved in ``directory``, and the processor's files.

        The model's own files get other names, because transformers reads no second file next to model.safetensors.
        """
        self.write_processor(directory)
        if not self._tensors:
            return
        index = directory / INDEX_FILE
        if index.is_file():
            content = json.loads(index.read_text(encoding="utf-8"))
            weight_map, size = content["weight_map"], content["metadata"]["total_size"]
        else:
            header = read_header(directory / SINGLE_FILE)
            weight_map = dict.fromkeys(header, SINGLE_FILE)
            size = sum(entry.end - entry.start for entry in header.values())
        files = sorted(set(weight_map.values()))
        *names, added = (f"model-{i:05d}-of-{len(files) + 1:05d}.safetensors" for i in range(1, len(files) + 2))
        renamed = dict(zip(files, names, strict=True))
        for file, name in renamed.items():
            (directory / file).rename(directory / name)
        self.write(directory / added)
        weight_map = {name: renamed[file] for name, file in weight_map.items()} | dict.fromkeys(self._tensors, added)
        size += sum(entry.end - entry.start for _, entry in self._tensors.values())
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2, sort_keys=True)
        index.write_text(text + "\n", encoding="utf-8")

    def write_processor(self, directory: Path) -> None:
        """Write the processor's files to ``directory``, except those that are there."""
        for name, content in self._processor.items():
            if not (directory / name).exists():
                (directory / name).write_bytes(content)

    def write(self, path: Path) -> None:
        """Write the tensors to a new safetensors file."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        ordered = sorted(self._tensors.items(), key=lambda item: (-_item_bytes(item[1][1]), item[0]))
        end = 0
        for name, (_, entry) in ordered:
            start, end = end, end + entry.end - entry.start
            header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as target:
            target.write(struct.pack("<Q", len(text)) + text)
            for _, (source, entry) in ordered:
                for start in range(entry.start, entry.end, _COPIED_BYTES):
                    length = min(_COPIED_BYTES, entry.end - start)
                    data = os.pread(self._files[source], length, start)
                    if len(data) != length:
                        raise ModelError(f"{source}: has become shorter while it was in use; restore it")
                    target.write(data)


def _outside(model: Any) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield the modules and parameters outside the language model, and outside of heads: parent, name in it, and full name."""
    names = {id(module): name for name, module in model.named_modules()}
    base, decoder, head = model.base_model, model.get_decoder(), model.get_output_embeddings()
    if id(decoder) not in names or id(base) not in names:
        return
    path, prefix = names[id(decoder)], names[id(base)]
    module = base
    while module is not decoder:
        start = f"{prefix}." if prefix else ""
        for name, _ in module.named_parameters(recurse=False):
            yield module, name, start + name
        following = path.removeprefix(start).partition(".")[0]
        for name, child in module.named_children():
            if name != following and not any(part is head for part in child.modules()):
                yield module, name, start + name
        module, prefix = getattr(module, following), start + following


def _text_pass_error(model: Any) -> Exception | None:
    """Return the error of a forward pass of tokens before it reaches the language model, or None. Computes nothing."""
    handle = model.get_decoder().register_forward_pre_hook(_stop, prepend=True)
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            device = model.get_input_embeddings().weight.device
            model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=device))
    except _LanguageModelReached:
        return None
    except Exception as error:
        return error
    finally:
        handle.remove()
        model.train(training)
    return None


def _stop(*_: Any) -> None:
    raise _LanguageModelReached


def _loaded_name(model: Any, name: str, state: dict[str, Any]) -> str:
    """Return the name in the model's ``state`` of a tensor of its checkpoint, by the rules with which it was loaded."""
    conversions = getattr(model, "_weight_conversions", None) or ()
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    result, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
    if result not in state and name in state:
        return name
    return result


def _item_bytes(entry: TensorEntry) -> int:
    count = 1
    for size in entry.shape:
        count *= size
    return (entry.end - entry.start) // max(count, 1)


def _close(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)
