"""Reading and writing of checkpoints in Hugging Face format: causal LMs, reward models, critics.

Only safetensors are read, and no code of a checkpoint runs. An incomplete checkpoint raises a ModelError with the reason and a
remedy. The directory of a LoRA adapter is a checkpoint, too: its base model is loaded and the adapter is merged into it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import structlog
import torch
import transformers
from torch import nn
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from quartet.errors import ModelError
from quartet.model_files.adapter_files import adapter_base, adapter_chain, is_adapter
from quartet.model_files.hub_models import model_directory
from quartet.model_files.model_support import not_causal_reason, unreadable_reason
from quartet.model_files.sharded_files import is_sharded, unloaded_file
from quartet.model_files.stop_tokens import select_stop_ids
from quartet.model_files.weight_files import TensorEntry, read_header, read_headers
from quartet.models.forward.model_capabilities import vocabulary_size
from quartet.models.forward.packing import hidden_states
from quartet.models.hf_logging import suppress_hf_logging
from quartet.models.weights.contents import check_contents, describe_model
from quartet.models.weights.lora import Adapter, merge_adapter
from quartet.models.weights.saved_state import check_shapes
from quartet.models.weights.snapshot import Writer, host_state
from quartet.models.weights.streamed_model import StreamedModel
from quartet.models.weights.tokenizer import SAFE, explained, first_line
from quartet.models.weights.towers import (
    before_reading,
    keep_unloaded,
    remove_towers,
    unloaded_tensors,
)
from quartet.models.workers.workers import SINGLE, Workers

if TYPE_CHECKING:
    from quartet.models.value_head import ValueModel

log = structlog.get_logger()

_Module = TypeVar("_Module", bound=nn.Module)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

META = "meta"
"""Device on which a load compares the headers of the files with the model, and reads no weights."""
_CAUSAL_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Maximum difference that a later token makes to the logits of an earlier one, relative to the largest logit."""
# transformers replaces functions of its classes while it loads. Two concurrent loads may restore each other's functions. Weights
# then stay untied in this process.
_loading = threading.Lock()


def load_causal_lm(model: str | Path, dtype: str = "float32", device: str = "cpu", workers: Workers = SINGLE) -> Any:
    """Load a causal language model in evaluation mode, without dropout. Raises ModelError, also for a classifier.

    From the directory of a LoRA adapter, load the base model and merge the adapter into its weights. From a checkpoint that reads
    images or audio, too, load the language model: see ``remove_towers``. Several ``workers`` load
    their parts of the parameters; the caller then calls ``check_causal_lm`` after ``shard_model``.
    """
    if workers.size > 1:
        return _in_parts(model, lambda place: _causal_lm(model, dtype, place), device, workers)
    loaded = _causal_lm(model, dtype, device)
    if device != META:
        check_causal_lm(model, loaded)
    return loaded


def _causal_lm(model: str | Path, dtype: str, device: str) -> Any:
    base, adapters = adapter_chain(model)
    with _below(model, base):
        config = _load_config(base)
        _refuse(base, not_causal_reason(config.to_dict()))
        loaded = _load(base, config, _causal_kind(base, config), dtype, device)
    for adapter in adapters:
        _merge(loaded, adapter)
    return loaded


def _causal_kind(model: str | Path, config: Any) -> Any:
    """Return transformers' loader of the class that config.json names. Raises ModelError if it is no causal LM."""
    tables = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    _check_architecture(model, config, tables, "a causal language model")
    if set(config.architectures) & _names(tables[0]):
        return transformers.AutoModelForCausalLM
    # The class of the language model alone would give the tensors of a save other names, and some types have none.
    return transformers.AutoModelForMultimodalLM


def _in_parts(model: str | Path, load: Callable[[str], _Module], device: str, workers: Workers) -> _Module:
    """Return the model of ``load``, a function of the device, with this rank's part of every parameter.

    Slices are cut from complete weights: a rank that computes slices gets the complete model, in host memory. ``shard_model``
    moves its slices to the device of the group.
    """
    # Imported here because a single process does not need torch.distributed.
    from quartet.models.workers.group import WorkerGroup
    from quartet.models.workers.shard_reading import read_in_parts

    assert isinstance(workers, WorkerGroup)
    if workers.tensor is not None:
        return load("cpu")
    return read_in_parts(load, device, workers, in_turn=bool(adapter_chain(model)[1]))


def check_causal_lm(model: str | Path, loaded: Any) -> None:
    """Raise ModelError if a token's logits depend on the next token, as they do in encoders. Runs one forward pass."""
    with explained(model, "forward pass without an attention mask"), torch.no_grad():
        _check_causal(model, loaded, lambda ids: loaded(input_ids=ids, use_cache=False).logits)


def load_reward_model(model: str | Path, dtype: str = "float32", device: str = "cpu", workers: Workers = SINGLE) -> Any:
    """Load a sequence classifier with one output in evaluation mode, without dropout. Raises ModelError, also for a causal LM.

    Several ``workers`` load their parts of the parameters.
    """
    if workers.size > 1:
        return _in_parts(model, lambda place: load_reward_model(model, dtype, place), device, workers)
    config = _load_config(model)
    _check_architecture(model, config, [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES], "a sequence classifier")
    if config.num_labels != 1:
        raise ModelError(
            f"model {model}: a classifier with {config.num_labels} outputs; a reward model has exactly one (num_labels: 1)"
        )
    return _load(model, config, transformers.AutoModelForSequenceClassification, dtype, device)


def load_critic(
    model: str | Path, dtype: str = "float32", device: str = "cpu", workers: Workers = SINGLE
) -> ValueModel:
    """Load a value model in evaluation mode. The files and the architecture determine which of four checkpoints it is.

    A checkpoint of ``ValueModel.snapshot``; one of ``ValueModel.snapshot_adapter`` (the base's backbone with the adapter merged,
    and the head); a decoder classifier with one output (backbone and head); or a causal LM (backbone, and a head of zeros, so
    every value starts at 0). Several ``workers`` load their parts of the parameters; the caller then calls ``check_critic`` after
    ``shard_model``. Raises ModelError.
    """
    adapter_chain(model)  # Raises ModelError for a cycle of adapters; the code below would not end.
    if workers.size > 1:
        return _frozen_dropout(
            _in_parts(model, lambda place: _critic(model, dtype, place, _causal_lm), device, workers)
        )
    critic = _frozen_dropout(_critic(model, dtype, device, load_causal_lm))
    if device == META:
        return critic
    with explained(model, "forward pass of the backbone"), torch.inference_mode():
        input_ids = _two_tokens(critic)
        critic(input_ids, torch.ones_like(input_ids, dtype=torch.bool))
    return critic


def check_critic(model: str | Path, critic: ValueModel) -> None:
    """Raise ModelError if the critic cannot compute values, or if they depend on the next token. Runs one forward pass."""
    with explained(model, "forward pass of the backbone"), torch.no_grad():
        _check_causal(model, critic.backbone, lambda ids: hidden_states(critic.backbone, ids))


def _critic(model: str | Path, dtype: str, device: str, load_lm: Callable[..., Any]) -> ValueModel:
    # Imported here because transformers' modelling code takes seconds to import. Loading a tokenizer does not need it.
    from quartet.models.value_head import HEAD_FILE, ValueModel

    has_head = (Path(model) / HEAD_FILE).is_file()
    if is_adapter(model):
        if not has_head:
            return ValueModel.of_causal_lm(load_lm(model, dtype, device))
        base = adapter_base(Path(model))
        with _below(model, base):
            backbone = _critic(base, dtype, device, load_lm).backbone
        _merge(backbone, Path(model))
        with explained(model, "value head"):
            return ValueModel.with_saved_head(backbone, Path(model)).to(device)
    if has_head:
        config = _load_config(model)
        backbone = _load(model, config, transformers.AutoModel, dtype, device)
        with explained(model, "value head"):
            return ValueModel.with_saved_head(backbone, Path(model)).to(device)
    config = _load_config(model)
    names = set(config.architectures or ())
    if names & _names(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES):
        classifier = load_reward_model(model, dtype, device)
        if not isinstance(getattr(classifier, "score", None), nn.Linear):
            raise ModelError(
                f"model {model}: {type(classifier).__name__} scores whole texts and has no value per token; "
                "give the critic a decoder (a causal LM, or a classifier built on one)"
            )
        return ValueModel.of_classifier(classifier)
    return ValueModel.of_causal_lm(load_lm(model, dtype, device))


def _check_causal(model: str | Path, loaded: Any, outputs: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raise ModelError if a token's ``outputs`` depend on the next token, as they do in encoders."""
    input_ids = torch.tensor([[0, 0], [0, 1]], device=loaded.get_input_embeddings().weight.device)
    result = outputs(input_ids)[:, 0]
    first = result.float()
    difference = float((first[0] - first[1]).abs().max() / first.abs().max())
    # False for NaN: scoring and generation report diverged weights.
    if difference > _CAUSAL_TOLERANCE[result.dtype]:
        raise ModelError(
            f"model {model}: {type(loaded).__name__} predicts a token from later tokens, too; give a causal language model"
        )


def _two_tokens(model: Any) -> torch.Tensor:
    """Return an input for a trial forward pass, int64 [1, 2]: the shortest in which a token attends to another."""
    return torch.zeros(1, 2, dtype=torch.long, device=model.get_input_embeddings().weight.device)


def stop_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return every token id that ends a response in the generation config, the model config or the tokenizer.

    Ids outside the vocabulary are ignored, with a warning. Raises ModelError for values that are no token ids.
    """
    name = f"model {model.config.name_or_path}"
    sources = {
        "generation_config.json: eos_token_id": getattr(
            getattr(model, "generation_config", None), "eos_token_id", None
        ),
        "config.json: eos_token_id": getattr(model.config, "eos_token_id", None),
        "config.json: text_config.eos_token_id": getattr(model.config.get_text_config(), "eos_token_id", None),
        "eos_token of the tokenizer, id": getattr(tokenizer, "eos_token_id", None),
    }
    try:
        stop_ids, ignored = select_stop_ids(sources, vocabulary_size(model))
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from None
    for line in dict.fromkeys(ignored):
        log.warning(f"{name}: {line}")
    return stop_ids


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters. Shared parameters count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def snapshot_model(model: Any, adapter: Adapter | None = None) -> Writer:
    """Copy the weights. The returned writer writes them in Hugging Face format. Equal weights give equal bytes.

    With the model's ``adapter`` the writer writes the merged model. The model itself is unchanged.
    """
    if adapter is not None:
        return adapter.snapshot_merged()
    state = host_state(model)

    def write(directory: Path) -> None:
        model.save_pretrained(directory, state_dict=state)
        if (unloaded := unloaded_tensors(model)) is not None:
            unloaded.add_to(directory)

    return write


def _merge(model: Any, adapter: Path) -> None:
    with explained(adapter, "LoRA adapter"), suppress_hf_logging():
        merge_adapter(model, adapter)


@contextlib.contextmanager
def _below(model: str | Path, base: str | Path) -> Iterator[None]:
    """Add the name of the adapter to an error about its base model."""
    try:
        yield
    except ModelError as error:
        if str(model) == str(base):
            raise
        raise ModelError(f"adapter {model}: its base model: {error}") from error


def _load_config(model: str | Path) -> Any:
    directory = model_directory(model, weights=False)
    with explained(model, "config.json"):
        content, _ = transformers.PreTrainedConfig.get_config_dict(str(directory), **SAFE)
        _refuse(model, unreadable_reason(content))
        return transformers.AutoConfig.from_pretrained(str(directory), **SAFE)


def _load(model: str | Path, config: Any, kind: Any, dtype: str, device: str) -> Any:
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    directory = model_directory(model)
    if is_sharded(directory):
        return _load_sharded(model, directory, config, kind, dtype, device)
    outside: list[str] = []
    try:
        with (
            explained(model, "weights"),
            _loading,
            suppress_hf_logging(),
            before_reading(lambda created: outside.extend(remove_towers(created))),
        ):
            headers = read_headers(directory)
            if device == META:
                loaded, report = describe_model(directory, config, kind)
            else:
                loaded, report = kind.from_pretrained(
                    str(directory),
                    config=config,
                    dtype=DTYPES[dtype],
                    use_safetensors=True,
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                    **SAFE,
                )
        notes = check_contents(loaded, report, headers, outside)
    except ModelError as error:
        raise error if str(error).startswith("model ") else ModelError(f"model {model}: {error}") from None
    for note in notes:
        log.warning(f"model {model}: {note}")
    if outside and device != META:
        keep_unloaded(loaded, outside, headers, directory)
    return _frozen_dropout(_on_device(loaded, device))


def _load_sharded(model: str | Path, directory: Path, config: Any, kind: Any, dtype: str, device: str) -> Any:
    """Load a checkpoint of a worker group, which has one file per rank."""
    # Imported here because other checkpoints do not need torch.distributed.
    from quartet.models.workers.sharded_checkpoint import WEIGHTS, ShardedState
    from quartet.models.workers.sharding import distinct_state, read_weights

    if device == META:
        with explained(model, "weights"), _loading, torch.device(META):
            loaded = kind.from_config(config, dtype=DTYPES[dtype])
            loaded.tie_weights()
            remove_towers(loaded)
            check_shapes(
                ShardedState(directory, WEIGHTS), {name: tuple(value.shape) for name, value in distinct_state(loaded)}
            )
        return _frozen_dropout(loaded)
    with explained(model, "weights"), _loading, suppress_hf_logging():
        with no_init_weights():
            loaded = kind.from_config(config, dtype=DTYPES[dtype])
            loaded.tie_weights()
            outside = remove_towers(loaded)
        if loaded.can_generate() and (directory / "generation_config.json").is_file():
            loaded.generation_config = transformers.GenerationConfig.from_pretrained(str(directory))
        read_weights(loaded, ShardedState(directory, WEIGHTS), SINGLE)
        if outside:
            keep_unloaded(loaded, outside, _unloaded_headers(directory), directory)
    return _frozen_dropout(_on_device(loaded, device))


def write_consolidated(directory: Path, target: Path) -> None:
    """Write the weights of a causal LM's sharded checkpoint to ``target`` as ``save_pretrained`` does.

    Host memory holds one tensor at a time. Raises ModelError, and OSError if the disk refuses it.
    """
    from quartet.models.workers.sharded_checkpoint import WEIGHTS, ShardedState

    config, saved = _load_config(directory), ShardedState(directory, WEIGHTS)
    with explained(directory, "config.json"), _loading, torch.device("meta"):
        model = _causal_kind(directory, config).from_config(config)
        model.tie_weights()
        if outside := remove_towers(model):
            keep_unloaded(model, outside, _unloaded_headers(directory), directory)
    state = model.state_dict(keep_vars=True)
    distinct = {id(value): (name, value) for name, value in reversed(state.items())}
    check_shapes(saved, {name: tuple(value.shape) for name, value in distinct.values()})
    # Tied weights stay one object.
    saved_types = {
        id(state[name]): torch.empty(shape, dtype=saved.types[name], device="meta")
        for name, shape in saved.shapes.items()
    }
    with StreamedModel(model, {name: saved_types[id(value)] for name, value in state.items()}, target) as files:
        for name in saved.shapes:
            files.write(name, saved.tensor(name))
    if (unloaded := unloaded_tensors(model)) is not None:
        unloaded.add_to(target)


def _unloaded_headers(directory: Path) -> dict[str, tuple[Path, TensorEntry]]:
    """Return the tensors of a sharded checkpoint that are not in its model."""
    file = unloaded_file(directory)
    return {name: (file, entry) for name, entry in read_header(file).items()} if file.is_file() else {}


def _on_device(model: Any, device: str) -> Any:
    try:
        return model.to(torch.device(device))
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {device!r}: {first_line(error)}; expected cpu or a GPU that is present") from error


def _frozen_dropout(model: _Module) -> _Module:
    """Set evaluation mode and dropout rates of 0, so that a later ``train()`` cannot add dropout to PPO's ratios."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if ("dropout" in name or "pdrop" in name) and isinstance(value, float):
                setattr(module, name, 0.0)
    config: Any = getattr(model, "config", None)
    if getattr(config, "rescale_every", 0):
        # RWKV would divide its weights, which are trained and saved, and undo it in its activations.
        config.rescale_every = 0
    return model.eval()


def _refuse(model: str | Path, reason: str | None) -> None:
    if reason is not None:
        raise ModelError(f"model {model}: {reason}")


def _check_architecture(model: str | Path, config: Any, tables: Sequence[Any], wanted: str) -> None:
    """Raise ModelError for another kind of checkpoint, to which transformers would add a new random or tied head."""
    names = list(config.architectures or ())
    if not set(names) & set().union(*map(_names, tables)):
        raise ModelError(
            f"model {model}: config.json has architectures {names}; expected {wanted}. "
            "Give a checkpoint of that kind, or correct 'architectures' if it is one"
        )


def _names(mapping: Any) -> set[str]:
    """Return the class names in one of transformers' tables, whose entries are one name or several."""
    return {name for entry in mapping.values() for name in ([entry] if isinstance(entry, str) else entry)}


_EXAMPLES = 6


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze every parameter whose name matches one of the shell patterns (``*.layers.0.*``).

    A weight that two layers share (tied) has both names and is frozen if either matches. Raises ModelError if a pattern matches
    nothing, or if every parameter would be frozen.
    """
    if not patterns:
        return
    parameters = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matching = [parameter for name, parameter in parameters if fnmatchcase(name, pattern)]
        if not matching:
            raise ModelError(
                f"freeze {pattern!r}: matches no parameter of {type(model).__name__}; parameters are, for example, "
                f"{_examples([name for name, _ in parameters])}"
            )
        for parameter in matching:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            f"freeze {', '.join(map(repr, patterns))}: every parameter of {type(model).__name__} is frozen, so nothing can be "
            f"trained; keep some trainable, for example {_examples([name for name, _ in parameters])}"
        )


def _examples(names: Sequence[str]) -> str:
    """Return a few names, spread over the model."""
    return ", ".join(names[:: max(1, len(names) // _EXAMPLES)][:_EXAMPLES])
