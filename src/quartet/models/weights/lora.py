"""LoRA with peft: low-rank adapters on a frozen model (Hu et al. 2021, "LoRA").

A linear layer with weight W computes W x + s B A x, and only A and B are trained. The scaling s is alpha / rank, or alpha / √rank
with rsLoRA. With DoRA, row i of W + s B A is multiplied by m_i / its norm, and the magnitudes m are trained, too. peft replaces
layers of the model in place, so callers keep using the same model object and class.

Mixture-of-experts models keep the weights of all experts of a layer in one parameter, [experts, outputs, inputs] or
[experts, inputs, outputs]. Each expert gets its own A and B. peft adds s B A to such a parameter during the forward pass, in the
model's dtype.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import inspect
import json
import math
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import nn

from quartet.config.models import LoraConfig
from quartet.errors import ModelError
from quartet.model_files.adapter_files import CONFIG_FILE
from quartet.models.forward.lora_dropout import DropoutMasks, TokenDropout
from quartet.models.weights.snapshot import Writer, host_copy, host_state
from quartet.models.weights.towers import unloaded_tensors
from quartet.planner.meta_model import is_linear

if TYPE_CHECKING:
    import peft  # Imported where it is used: it takes seconds, and only runs with an adapter need it.

WEIGHTS_FILE = "adapter_model.safetensors"

_NAME = "default"
_EXAMPLES = 8
_EXPERT_NAMES = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Target modules that peft replaces by parameters of experts in some mixture-of-experts models, because their layers of these
names were experts in transformers 4. Linear layers with these names are therefore targeted by their parameter."""
_computing_experts = threading.RLock()
"""Held while a forward pass adds an adapter to a parameter. torch caches the sums of all threads in one global table, which it
clears only when no thread uses it."""


class Adapter:
    """A LoRA adapter on ``model``, whose targeted layers are replaced in place.

    A and B are stored and multiplied in fp32 for every dtype of the model, because half precision would round small updates
    away. The sum of a layer is rounded to the model's dtype once.
    """

    def __init__(self, peft_model: Any, base: str) -> None:
        """``base`` is the name or path of the base model that adapter_config.json records."""
        self._peft = peft_model
        self._base = base
        self.model: Any = peft_model.get_base_model()

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Disable the adapter inside the context, also if it ends with an error. The model is then bit-identical to its base.

        No other thread may use the model inside the context.
        """
        with self._peft.disable_adapter():
            yield

    def snapshot_merged(self) -> Writer:
        """Copy the merged weights W + s B A. The returned writer writes the model in Hugging Face format.

        The model itself is unchanged.
        """
        state = self._merged_state()

        def write(directory: Path) -> None:
            self.model.save_pretrained(directory, state_dict=state)
            if (unloaded := unloaded_tensors(self.model)) is not None:
                unloaded.add_to(directory)

        return write

    def snapshot(self) -> Writer:
        """Copy the adapter. The returned writer writes it in peft's format. Equal weights give equal bytes."""
        tensors = {name: host_copy(value) for name, value in sorted(self.state().items())}
        # peft stores names in sets, whose order differs between processes.
        content = {
            name: sorted(value) if isinstance(value, set) else value
            for name, value in self._peft.peft_config[_NAME].to_dict().items()
        }
        content |= {"base_model_name_or_path": self._base, "inference_mode": True}
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"

        def write(directory: Path) -> None:
            safetensors.torch.save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
            (directory / CONFIG_FILE).write_text(text, encoding="utf-8")

        return write

    def check_linear(self) -> None:
        """Raise ModelError if parameters of experts have adapters, which engines outside this process do not support."""
        for name, layer in _layers(self.model).items():
            if hasattr(layer, "parameter_name"):
                raise ModelError(
                    f"lora: {name} gets an adapter as a parameter, and this engine supports adapters of linear layers only; set "
                    "actor.lora.target_modules to linear layers outside the experts, or rollout.engine torch"
                )

    def matrices(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield each layer's name, A [rank, inputs], and B [outputs, rank] times the scaling, as fp32 copies in host memory.

        Raises ModelError if a parameter of experts has an adapter, which has no single A and B, or if there are magnitudes.
        """
        self.check_linear()
        if self._peft.peft_config[_NAME].use_dora:
            raise ModelError(
                "lora.dora: this engine takes adapters without magnitudes; set lora.dora false, or engine torch"
            )
        for name, layer in _layers(self.model).items():
            a, b = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
            yield name.removesuffix(".weight"), host_copy(a.float()), host_copy(b.float() * layer.scaling[_NAME])

    def linear_layers(self) -> list[Any]:
        """Return peft's layers around the adapted linear layers. Raises ModelError if parameters of experts have adapters."""
        self.check_linear()
        return list(_layers(self.model).values())

    def merged_weight(self, layer: Any) -> torch.Tensor:
        """Return the weight of an adapted linear layer plus its adapter, in the precision of the model, on its device."""
        return _merged_weight(layer, _weight(layer))

    def read(self, directory: Path) -> None:
        """Restore the weights of a ``snapshot`` in ``directory`` in place. Raises ModelError.

        The parameters stay the same objects, so an optimizer can keep them. ``load_optimizer`` restores its state.
        """
        path = directory / WEIGHTS_FILE
        if not path.is_file():
            raise ModelError(
                f"adapter {directory}: no {WEIGHTS_FILE}; pickled adapters are not read, save it as safetensors"
            )
        try:
            tensors = safetensors.torch.load_file(path)
        except Exception as error:  # safetensors raises its own error, or OSError
            raise ModelError(f"adapter {path}: cannot be read: {error}; save it again") from error
        self._check_fit(directory, tensors)
        import peft

        peft.set_peft_model_state_dict(self._peft, tensors, _NAME)

    def merger(self) -> Callable[[str, torch.Tensor], torch.Tensor]:
        """Return a function of a weight's name in the base model and its complete values, which merges the adapter into them."""
        layers = _layers(self.model)

        def merge(name: str, value: torch.Tensor) -> torch.Tensor:
            return _merged_weight(layers[name], value.detach().to("cpu")) if name in layers else value

        return merge

    def _merged_state(self) -> dict[str, torch.Tensor]:
        """Return the state with the adapter merged, in host memory, under the names of the base model."""
        merge = self.merger()
        state = {
            _without_wrappers(name): value for name, value in host_state(self.model).items() if ".lora_" not in name
        }
        return {name: merge(name, value) for name, value in state.items()}

    def _check_fit(self, directory: Path, tensors: dict[str, torch.Tensor]) -> None:
        state = self.state()
        for names, what in ((state.keys() - tensors.keys(), "lacks"), (tensors.keys() - state.keys(), "has too many:")):
            if names:
                raise ModelError(
                    f"adapter {directory}: {what} {len(names)} weights, the first {min(names)!r}; "
                    "expected an adapter of this model, for the layers that its config names"
                )
        for name, value in sorted(tensors.items()):
            if value.shape != state[name].shape:
                raise ModelError(
                    f"adapter {directory}: {name} has shape {tuple(value.shape)}, the model expects "
                    f"{tuple(state[name].shape)}; give the model that the adapter was trained on, and its rank"
                )

    @property
    def rank(self) -> int:
        """Rank of A and B."""
        return int(self._peft.peft_config[_NAME].r)

    @property
    def alpha(self) -> float:
        """Scaling of the adapter, times the rank. With rsLoRA it is not the alpha of the config.

        Engines divide it by the rank, so they need not know how the scaling is defined.
        """
        settings = self._peft.peft_config[_NAME]
        return float(settings.lora_alpha) * (math.sqrt(settings.r) if settings.use_rslora else 1.0)

    @property
    def target_modules(self) -> tuple[str, ...]:
        """Names of the adapted linear layers, as peft stores them."""
        return tuple(sorted(self._peft.peft_config[_NAME].target_modules or ()))

    def parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters of the adapter."""
        return [parameter for name, parameter in self.model.named_parameters() if ".lora_" in name]

    def base_state(self) -> dict[str, torch.Tensor]:
        """Return the state of the base model under its own names, as views."""
        state = self.model.state_dict(keep_vars=True)
        return {_without_wrappers(name): value for name, value in state.items() if ".lora_" not in name}

    def state(self) -> dict[str, torch.Tensor]:
        """Return the weights of the adapter by peft's names, as views."""
        import peft

        # The embeddings are never trained. To find out whether they were, peft would contact the hub.
        result: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(self._peft, save_embedding_layers=False)
        return result


def add_adapter(model: Any, base: str, lora: LoraConfig, seed: int = 0) -> Adapter:
    """Add an adapter to a transformers model and freeze everything else. B starts at 0, so the model's outputs do not change.

    ``base`` is the checkpoint's name or path. The target modules of ``lora`` are full names of linear layers and of parameters of
    experts, or their last parts (``q_proj``, ``experts.down_proj``). Defaults to every linear layer except the vocabulary
    projection, and all experts. A starts uniform in ±1/√inputs, as in peft, from a random stream of (seed, name of the layer).
    Raises ModelError if a name matches neither, or if experts would have dropout.
    """
    import peft

    layers, parameters = _targets(model, lora.target_modules)
    if parameters:
        # See _EXPERT_NAMES.
        renamed = {name for name in layers if name.rpartition(".")[2] in _EXPERT_NAMES}
        layers -= renamed
        parameters |= {f"{name}.weight" for name in renamed}
    if parameters and lora.dora:
        raise ModelError(
            f"lora.dora: {min(parameters)} is a parameter of experts, whose adapters have no magnitudes; set lora.target_modules "
            "to linear layers outside the experts, or lora.dora false"
        )
    if parameters and lora.dropout:
        raise ModelError(
            f"lora.dropout {lora.dropout:g}: the adapter of {min(parameters)} is added to a parameter and has no inputs to drop; "
            "set lora.target_modules to linear layers outside the experts, or lora.dropout 0"
        )
    settings = peft.LoraConfig(
        r=lora.rank,
        # peft's type is int, but its formula accepts any number. Integral values are written as int, as other tools do.
        lora_alpha=int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,  # type: ignore[arg-type]
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        lora_dropout=lora.dropout,
        target_modules=sorted(_short_names(layers, {name for name, _ in model.named_modules()}, 1)),
        target_parameters=sorted(_short_names(parameters, {name for name, _ in model.named_parameters()}, 2)) or None,
        task_type="FEATURE_EXTRACTION" if model.get_output_embeddings() is None else "CAUSAL_LM",
    )
    adapter = Adapter(_on(model, settings), base)
    # peft renames targets of some mixture-of-experts models, see _EXPERT_NAMES.
    if wrong := _layers(model).keys() ^ parameters.union(f"{name}.weight" for name in layers):
        raise ModelError(
            f"lora: peft takes other layers of {type(model).__name__} than the chosen ones, among them "
            f"{min(wrong).removesuffix('.weight')}; set lora.target_modules to other layers"
        )
    with torch.no_grad():
        for name, layer in _layers(model).items():
            matrix = layer.lora_A[_NAME].weight
            bound = 1 / math.sqrt(matrix.shape[1])
            start = torch.empty(matrix.shape).uniform_(
                -bound, bound, generator=_generator(seed, name.removesuffix(".weight"))
            )
            matrix.copy_(start)
            for magnitudes in layer.lora_magnitude_vector.values():
                # peft rounds them to the type of the model in between.
                magnitudes.weight.copy_(_norms(layer, _weight(layer)))
    if lora.dropout:
        masks = DropoutMasks()
        for name, layer in _layers(model).items():
            if lora.dora:
                masks.layers.append(layer)
            layer.lora_dropout[_NAME] = TokenDropout(lora.dropout, name.removesuffix(".weight"), masks).eval()
    return adapter


def plus_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of the adapter that have another learning rate with LoRA+: the matrices B, and magnitudes."""
    parts = (".lora_B.", ".lora_magnitude_vector.")
    return {parameter for name, parameter in model.named_parameters() if any(part in name for part in parts)}


def matrices_without_adapter(model: Any) -> list[str]:
    """Return the names of the matrices that have no adapter, except embeddings, the vocabulary projection and biases.

    Numbers in the names are replaced by ``*``, so layers share an entry.
    """
    known = {id(_weight(layer)) for layer in _layers(model).values()}
    known |= {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    projection = model.get_output_embeddings()
    known |= {id(projection.weight)} if projection is not None else set()
    left_out = [
        _without_wrappers(name)
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1 and not name.endswith("bias") and ".lora_" not in name and id(parameter) not in known
    ]
    return sorted({".".join("*" if part.isdigit() else part for part in name.split(".")) for name in left_out})


def merge_adapter(model: Any, directory: Path) -> None:
    """Merge a saved adapter into the weights of ``model`` in place. The layers of the model stay the same objects.

    Raises ModelError if the adapter is broken or belongs to another model.
    """
    import peft

    settings = peft.LoraConfig.from_pretrained(str(directory))
    # The model may have been loaded under another name than the one in the adapter's config.
    settings.base_model_name_or_path = None
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    peft_model = _on(model, settings)
    Adapter(peft_model, "").read(directory)
    peft_model.merge_and_unload(progressbar=False)
    # peft leaves the weights frozen.
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trainable)


def _on(model: Any, settings: peft.LoraConfig) -> Any:
    """Wrap ``model`` in a peft model, which replaces its targeted layers. Raises ModelError."""
    import peft

    # peft refuses the output projections of Mamba layers, because fused kernels bypass them in training mode. Models here stay in
    # evaluation mode.
    peft.LoraModel._check_target_module_compatiblity = _accept  # type: ignore[assignment, method-assign]
    with warnings.catch_warnings():
        # peft warns about its own changes and about what is checked below. Users of a run cannot act on these warnings.
        warnings.simplefilter("ignore")
        wrapped: Any = peft.get_peft_model(model, settings, _NAME)
    model.eval()
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name, layer in _layers(model).items():
        if uses[id(_weight(layer))] > 1:
            raise ModelError(
                f"target module {name.removesuffix('.weight')}: its weight is shared with another layer (tied) and cannot have "
                "an adapter; leave it out"
            )
        if hasattr(layer, "parameter_name"):
            layer.register_forward_pre_hook(_start_sum)
            layer.register_forward_hook(_end_sum, always_call=True)
    return wrapped


def _accept(*_: Any) -> Any:
    pass


def _start_sum(*_: Any) -> None:
    _computing_experts.acquire()


def _end_sum(*_: Any) -> None:
    _computing_experts.release()


def _layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers that have an adapter, by the name of the adapted parameter in the base model."""
    from peft.tuners.lora import LoraLayer

    return {
        _without_wrappers(f"{name}.{getattr(module, 'parameter_name', 'weight')}"): module
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


def _without_wrappers(name: str) -> str:
    """Return the name in the base model of a parameter of a layer that peft wraps, once or several times."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def _weight(layer: Any) -> torch.Tensor:
    """Return the parameter that an adapter's layer adapts."""
    parameter: torch.Tensor = getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))
    return parameter


def _targets(model: Any, target_modules: Sequence[str]) -> tuple[set[str], set[str]]:
    """Return the names of the linear layers and of the parameters of experts that get an adapter. Raises ModelError."""
    projection = model.get_output_embeddings()
    modules = dict(model.named_modules())
    linear = {name for name, module in modules.items() if is_linear(module)}
    bypassed = {name for name in linear if _is_bypassed(modules, name)}
    linear -= bypassed
    # Outside the language model of a multimodal model.
    frozen = {name for name in linear if not modules[name].weight.requires_grad}
    experts = {
        f"{name}.{parameter}"
        for name, module in modules.items()
        if "Expert" in type(module).__name__
        for parameter, value in module.named_parameters(recurse=False)
        if value.ndim == 3
    }
    if not target_modules:
        uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
        every = {
            name for name in linear - frozen if modules[name] is not projection and uses[id(modules[name].weight)] == 1
        }
        if not every | experts:
            raise ModelError(f"lora: {type(model).__name__} has no linear layer for an adapter")
        return every, experts
    results = set[str]()
    for target in target_modules:
        matching = {name for name in modules.keys() | experts if _matches(name, target)}
        if not matching or not matching <= linear | experts:
            known = sorted({name.rpartition(".")[2] for name in linear | experts})
            reason = "no layer has this name"
            if matching:
                name = min(matching - linear - experts)
                is_bypassed = "is read by its parent, which never calls it, so an adapter has no effect"
                reason = f"{name} {is_bypassed if name in bypassed else 'is not a linear layer'}"
            raise ModelError(
                f"lora.target_modules {target!r}: {reason} in {type(model).__name__}; linear layers are, for example, "
                f"{', '.join(known[:_EXAMPLES])}"
            )
        results |= matching
    return (results & linear) - frozen, results & experts


def _is_bypassed(modules: dict[str, nn.Module], name: str) -> bool:
    """Return whether the layer's parent multiplies with its weight itself, as Mamba's does with dt_proj.

    tests/architectures checks that every adapter has an effect.
    """
    parent, _, attribute = name.rpartition(".")
    kind: Any = type(modules[parent])
    weight = rf"\bself\.{attribute}\.weight\b"
    return bool(re.search(rf"{weight} @|\blinear\(.*{weight}", _source_of(kind)))


@functools.cache
def _source_of(kind: Any) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # a class made at run time
        return ""


def _short_names(chosen: set[str], every: set[str], parts: int) -> set[str]:
    """Return names that match exactly ``chosen``: their last ``parts`` if those are unambiguous, else the full names."""
    short = {".".join(name.split(".")[-parts:]) for name in chosen}
    matched = {name for name in every if any(_matches(name, target) for target in short)}
    return short if matched == chosen else chosen


def _matches(name: str, target: str) -> bool:
    """Return whether a target matches the name of a module or parameter, by peft's rule."""
    return name == target or name.endswith(f".{target}")


def _merged_weight(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """Return the complete ``weight`` of an adapter's layer plus its adapter, on the device of ``weight``."""
    with torch.no_grad():
        merged: torch.Tensor = weight.float() + layer.get_delta_weight(_NAME).to(weight.device)
        for magnitudes in getattr(layer, "lora_magnitude_vector", {}).values():
            factors = magnitudes.weight.to(weight.device) / _norms(layer, weight)
            merged = merged * (factors if layer.fan_in_fan_out else factors[:, None])
    return merged.to(weight.dtype)


def _norms(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """Return the norm of each output of a layer with DoRA: of the rows of its complete ``weight`` plus the adapter."""
    factors = [layer.lora_B[_NAME].weight, layer.lora_A[_NAME].weight]
    b, a = (factor.to(weight.device) for factor in factors)
    result: torch.Tensor = layer.lora_magnitude_vector[_NAME].get_weight_norm(
        weight.float(), b @ a, layer.scaling[_NAME]
    )
    return result


def _generator(seed: int, name: str) -> torch.Generator:
    """Return a generator for one layer that does not depend on the other layers or on the device."""
    digest = hashlib.blake2b(f"lora/{seed}/{name}".encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


class MergedWeights:
    """A model without adapter that computes what ``adapter.model`` does, up to rounding.

    Only the matrices of adapted layers are copies, in the precision of the model. All other weights are those of the adapted
    model itself. The base weights stay as they are, so nothing has to be restored.
    """

    def __init__(self, adapter: Adapter) -> None:
        """Raises ModelError if parameters of experts have adapters."""
        self._layers: list[tuple[Any, nn.Parameter]] = []
        # A deep copy in which weights, and the layers that replace adapted ones, count as copied.
        copies: dict[int, object] = {
            id(tensor): tensor for tensor in (*adapter.model.parameters(), *adapter.model.buffers())
        }
        for layer in adapter.linear_layers():
            plain = copy.deepcopy(layer.get_base_layer(), copies)
            plain.weight = nn.Parameter(torch.empty_like(plain.weight), requires_grad=False)
            copies[id(layer)] = plain
            self._layers.append((layer, plain.weight))
        self.model: Any = copy.deepcopy(adapter.model, copies)
        self._adapter = adapter
        self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Compute the matrices again from the base weights and the adapter. They stay at their addresses, unless released."""
        for layer, merged in self._layers:
            result = self._adapter.merged_weight(layer)
            if merged.shape == result.shape:
                merged.copy_(result)
            else:
                merged.data = result

    def release(self) -> None:
        """Free the matrices until the next ``update``."""
        for _, merged in self._layers:
            merged.data = merged.new_empty(0)
