"""Checkpoints in Hugging Face format, read and written: tokenizers, causal LMs, reward models, critics.

Safetensors only, no code from a checkpoint, nothing half initialised: what cannot be loaded whole is a ModelError that says what
was wrong and what to do. A LoRA adapter's directory is a checkpoint, too: its base is loaded and the adapter merged into it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from quartet.errors import ModelError
from quartet.models.forward.onednn_linear import use_onednn_linear
from quartet.models.hf_logging import suppress_hf_logging
from quartet.models.weights.lora import Adapter, adapter_base, adapter_chain, is_adapter, merge_adapter
from quartet.models.weights.snapshot import Writer, host_state
from quartet.tokenizer_check import check_tokenizer, has_tokenizer

if TYPE_CHECKING:
    from quartet.models.value_head import ValueModel

_Module = TypeVar("_Module", bound=nn.Module)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Never from the checkpoint: its code could do anything, and so could a pickle.
_SAFE = {"trust_remote_code": False}
# While it loads, transformers puts functions of its classes aside: two at once may put each other's back, and tied weights stay
# untied in this process for good.
_loading = threading.Lock()


def load_tokenizer(model: str | Path) -> Any:
    """The tokenizer of a checkpoint directory or hub id; of an adapter's base, where it has none. Raises ModelError."""
    model = _tokenizer_location(model)
    _check_location(model)
    if Path(model).is_dir():
        check_tokenizer("model", Path(model))
    with _explained(model, "tokenizer"):
        kind: Any = transformers.AutoTokenizer
        if _is_generic(Path(model)):
            kind = transformers.PreTrainedTokenizerFast
        return kind.from_pretrained(str(model), **_SAFE)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 in hex over the vocabulary: equal where two tokenizers give the same ids the same meaning.

    Which of the ids ends or pads a text is left out: a reward model may well pad where its policy does not.
    """
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{token!r} {index}\n".encode())
    return digest.hexdigest()


def load_causal_lm(model: str | Path, dtype: str = "float32", device: str = "cpu") -> Any:
    """A causal language model in evaluation mode, without dropout. Raises ModelError, for a classifier too.

    From a directory with a LoRA adapter: its base, with the adapter merged into the weights.
    """
    _check_location(model)
    base, adapters = adapter_chain(model)
    with _below(model, base):
        config = _load_config(base)
        _check_architecture(base, config, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "a causal language model")
        loaded = _load(base, config, transformers.AutoModelForCausalLM, dtype, device)
    for adapter in adapters:
        _merge(loaded, adapter)
    with _explained(model, "forward pass without an attention mask"), torch.inference_mode():
        loaded(input_ids=_two_tokens(loaded))
    return loaded


def load_reward_model(model: str | Path, dtype: str = "float32", device: str = "cpu") -> Any:
    """A sequence classifier with one output in evaluation mode, without dropout. Raises ModelError, for a causal LM too."""
    config = _load_config(model)
    _check_architecture(model, config, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, "a sequence classifier")
    if config.num_labels != 1:
        raise ModelError(
            f"model {model}: a classifier with {config.num_labels} outputs; a reward model has exactly one (num_labels: 1)"
        )
    return _load(model, config, transformers.AutoModelForSequenceClassification, dtype, device)


def load_critic(model: str | Path, dtype: str = "float32", device: str = "cpu") -> ValueModel:
    """A value model in evaluation mode, from one of four checkpoints, told apart by their files and architecture.

    From what ``ValueModel.snapshot`` copied; from what ``ValueModel.snapshot_adapter`` copied (the base's backbone with the
    adapter merged into it, and the head beside it); from a decoder classifier with one output (backbone and head); or from a
    causal LM (backbone, and a head of zeros: every value starts at 0). Raises ModelError.
    """
    _check_location(model)
    adapter_chain(model)  # so that no chain of adapters without an end is followed below
    critic = _frozen_dropout(_critic(model, dtype, device))
    with _explained(model, "forward pass of the backbone"), torch.inference_mode():
        input_ids = _two_tokens(critic)
        critic(input_ids, torch.ones_like(input_ids, dtype=torch.bool))
    return critic


def _critic(model: str | Path, dtype: str, device: str) -> ValueModel:
    # Imports transformers' modelling code, which takes seconds: processes that load only a tokenizer do not need it.
    from quartet.models.value_head import HEAD_FILE, ValueModel

    has_head = (Path(model) / HEAD_FILE).is_file()
    if is_adapter(model):
        if not has_head:
            return ValueModel.of_causal_lm(load_causal_lm(model, dtype, device))
        base = adapter_base(Path(model))
        with _below(model, base):
            backbone = _critic(base, dtype, device).backbone
        _merge(backbone, Path(model))
        with _explained(model, "value head"):
            return ValueModel.with_saved_head(backbone, Path(model)).to(device)
    if has_head:
        config = _load_config(model)
        backbone = _load(model, config, transformers.AutoModel, dtype, device)
        with _explained(model, "value head"):
            return ValueModel.with_saved_head(backbone, Path(model)).to(device)
    config = _load_config(model)
    names = set(config.architectures or ())
    if names & _names(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES):
        classifier = load_reward_model(model, dtype, device)
        if not isinstance(getattr(classifier, "score", None), nn.Linear):
            raise ModelError(
                f"model {model}: {type(classifier).__name__} reads whole texts and has no value per token; "
                "give the critic a decoder (a causal LM, or a classifier built on one)"
            )
        return ValueModel.of_classifier(classifier)
    return ValueModel.of_causal_lm(load_causal_lm(model, dtype, device))


def _two_tokens(model: Any) -> torch.Tensor:
    """The shortest input with a past, to try a model out before anything depends on it: int64 [1, 2]."""
    return torch.zeros(1, 2, dtype=torch.long, device=model.get_input_embeddings().weight.device)


def stop_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token id that ends a response, by the generation config, the model config or the tokenizer."""
    sources = (
        getattr(getattr(model, "generation_config", None), "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    )
    results: set[int] = set()
    for ids in sources:
        results.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return frozenset(int(index) for index in results)


def count_parameters(model: nn.Module) -> int:
    """Parameters of the model, shared ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def snapshot_model(model: Any, adapter: Adapter | None = None) -> Writer:
    """Copie the weights; what it gives writes them in Hugging Face format. The same weights give the same bytes.

    With the model's ``adapter`` what is written is the merged model; the model itself stays as it is.
    """
    if adapter is not None:
        return adapter.snapshot_merged()
    state = host_state(model)
    return lambda directory: model.save_pretrained(directory, state_dict=state)


def _merge(model: Any, adapter: Path) -> None:
    with _explained(adapter, "LoRA adapter"), suppress_hf_logging():
        merge_adapter(model, adapter)


def _tokenizer_location(model: str | Path) -> str | Path:
    """Return where the tokenizer of a checkpoint is: adapters that others saved often leave it to their base."""
    base, adapters = adapter_chain(model)
    for adapter in reversed(adapters):
        if has_tokenizer(adapter):
            return adapter
    return base


@contextlib.contextmanager
def _below(model: str | Path, base: str | Path) -> Iterator[None]:
    """Return of an error in the base of an adapter which adapter asked for it."""
    try:
        yield
    except ModelError as error:
        if str(model) == str(base):
            raise
        raise ModelError(f"adapter {model}: its base model: {error}") from error


def _is_generic(directory: Path) -> bool:
    """Return whether tokenizer.json says everything, by the directory's own word.

    For some model types (qwen2 among them) AutoTokenizer does not take that word and builds the type's usual tokenizer around
    whatever vocabulary is there: the same text then has other ids.
    """
    path = directory / "tokenizer_config.json"
    if not path.is_file() or not (directory / "tokenizer.json").is_file():
        return False
    return json.loads(path.read_text()).get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast")


def _load_config(model: str | Path) -> Any:
    _check_location(model)
    with _explained(model, "config.json"):
        return transformers.AutoConfig.from_pretrained(str(model), **_SAFE)


def _load(model: str | Path, config: Any, kind: Any, dtype: str, device: str) -> Any:
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    with _explained(model, "weights"), _loading, suppress_hf_logging():
        loaded, report = kind.from_pretrained(
            str(model), config=config, dtype=DTYPES[dtype], use_safetensors=True, output_loading_info=True, **_SAFE
        )
    absent = sorted(report["missing_keys"]) + sorted(str(key[0]) for key in report["mismatched_keys"])
    if absent:
        raise ModelError(
            f"model {model}: {len(absent)} weights are missing or of another shape than config.json says, the first "
            f"{absent[0]!r}; they would start random. Give a complete {type(loaded).__name__} checkpoint"
        )
    try:
        loaded = loaded.to(torch.device(device))
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {device!r}: {_first_line(error)}; expected cpu or a GPU that is present") from error
    use_onednn_linear(loaded)
    return _frozen_dropout(loaded)


def _frozen_dropout(model: _Module) -> _Module:
    """Evaluation mode, and dropout rates of 0, so that no later ``train()`` can bring dropout back into PPO's ratios."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if ("dropout" in name or "pdrop" in name) and isinstance(value, float):
                setattr(module, name, 0.0)
    return model.eval()


def _check_location(model: str | Path) -> None:
    """Report a directory that is not there from a hub id that cannot be reached, before the hub is asked."""
    text = str(model)
    looks_local = (
        isinstance(model, Path)
        or text.startswith((".", "/", "~"))
        or text.count("/") > 1
        or os.sep * 2 in text
        or (len(Path(text).parts) > 1 and Path(Path(text).parts[0]).is_dir())
    )
    if looks_local and not Path(model).is_dir():
        raise ModelError(
            f"model {model}: no such directory (paths start at the current folder); expected a checkpoint directory or a hub id "
            "(NAME or OWNER/NAME)"
        )
    if Path(model).is_dir() and not any(Path(model).iterdir()):
        raise ModelError(
            f"model {model}: the directory is empty; expected config.json, safetensors and tokenizer files"
        )


def _check_architecture(model: str | Path, config: Any, mapping: Any, wanted: str) -> None:
    """Refuse a checkpoint of another kind: transformers would give it a new head with random weights, or a tied one."""
    names = list(config.architectures or ())
    if not set(names) & _names(mapping):
        raise ModelError(
            f"model {model}: config.json says architectures {names}; expected {wanted}. "
            "Give a checkpoint of that kind, or correct 'architectures' if it is one"
        )


def _names(mapping: Any) -> set[str]:
    """The class names in one of transformers' tables, whose entries are a name or several."""
    return {name for entry in mapping.values() for name in ([entry] if isinstance(entry, str) else entry)}


@contextlib.contextmanager
def _explained(model: str | Path, part: str) -> Iterator[None]:
    """Turn whatever a library raises about a broken checkpoint into one line."""
    try:
        yield
    except ModelError:
        raise
    except (
        Exception
    ) as error:  # transformers, tokenizers, safetensors and json each raise their own, some only Exception
        raise ModelError(
            f"model {model}: the {part} cannot be used: {_first_line(error)} ({type(error).__name__}); "
            "expected a complete Hugging Face checkpoint with safetensors weights"
        ) from error


def _first_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
    return text if len(text) <= 200 else text[:200] + "..."
