"""A causal model of transformers on torch's meta device: tensors have shapes, but neither memory nor values. Imports torch.

Two forward passes over one sequence show what the model keeps of a sequence, and what it saves for the backward pass.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from quartet.model_files.shape import Family, SequenceState
from quartet.planner.measured_shape import MeasuredShape, Saved

HALF_BYTES = 2
CHUNK = 64
"""Tokens that linear attention computes at a time, unless the config has another number."""
LOOP_TOKENS = 37
"""Tokens of the long pass if layers compute one token after the other in Python, which takes long."""
STEP = 16
"""Tokens that the short pass has less than the long one, unless a layer compresses more of them into one."""
MAX_LAYERS, MAX_TOKENS = 1000, 20_480
_ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
"""Names of the number of experts of a token."""
_CACHES = ("past_key_values", "cache_params", "state")
"""Names of the cache in the output of a model."""


def measure(text: str) -> MeasuredShape:
    """Return the sizes of the causal model with this config.json. Raises whatever transformers raises for a bad one."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.ERROR)
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (Path(folder) / "config.json").write_text(text, encoding="utf-8")
            whole = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            # Towers for images and audio are not loaded.
            config = whole.get_text_config(decoder=True)
            if config is not whole and "tie_word_embeddings" in text:
                config.tie_word_embeddings = whole.tie_word_embeddings
            depth = getattr(config, "num_hidden_layers", 0)
            if depth > MAX_LAYERS:
                raise ValueError(f"num_hidden_layers is {depth}; expected at most {MAX_LAYERS}")
            with torch.device("meta"):
                factory: Any = transformers.AutoModelForCausalLM
                model = factory.from_config(config, dtype=torch.bfloat16)
            return _measure(model.eval())
    finally:
        transformers.logging.set_verbosity(verbosity)


def _measure(model: Any) -> MeasuredShape:
    config, layers = model.config, _decoder_layers(model)
    experts = _experts(layers)
    num_experts = max((value.shape[0] for value in experts), default=0)
    named = (getattr(config, name, None) for name in _ACTIVE_EXPERTS)
    active = min(next((count for count in named if isinstance(count, int)), num_experts), num_experts)
    in_experts = sum(value.numel() for value in experts)
    # Layers that share weights are each multiplied with them.
    matrices = sum(value.numel() for _, value in layers.named_parameters(remove_duplicate=False) if value.ndim > 1)
    matrices -= round(in_experts * (1 - active / num_experts)) if num_experts else 0
    inner = [size for module in layers.modules() if is_linear(module) for size in module.weight.shape]
    inner += [active * size for value in experts for size in value.shape[1:]]
    step, tokens = _lengths(config, layers)
    short, long = _Pass.of(model, layers, tokens - step, saves=False), _Pass.of(model, layers, tokens, saves=True)
    state, keys = _sequence_state(short, long)
    embeddings, projection = model.get_input_embeddings(), model.get_output_embeddings()
    tied = projection.weight is embeddings.weight
    head_size = keys[0].shape[-1] if keys else 0
    if getattr(config, "kv_lora_rank", None):
        # The cache has latent keys, which attention expands.
        head_size = getattr(config, "qk_head_dim", None) or head_size
    return MeasuredShape(
        kind=str(config.model_type),
        family=Family(sliceable=False),
        vocabulary=projection.weight.shape[0],
        hidden=projection.weight.shape[1],
        layers=len(layers),
        heads=getattr(config, "num_attention_heads", None) or 1,
        key_value_heads=keys[0].shape[1] if keys else 1,
        head_size=head_size,
        intermediate=max(inner, default=projection.weight.shape[1]),
        positions=0,
        tied=tied,
        query_bias=False,
        output_bias=False,
        mlp_bias=False,
        activation="",
        parallel_residual=False,
        packs=False,
        experts=num_experts,
        active_experts=active,
        backbone=_count(model) - (0 if tied else _count(projection)),
        in_layers=_count(layers),
        in_experts=in_experts,
        matrices=matrices,
        adapted=_adapted(model, projection),
        attending=len(keys),
        kept=state,
        saved_layers=long.saved_inside,
        saved_outside=long.saved_outside,
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _decoder_layers(model: nn.Module) -> Any:
    """Return the list of layers: of all lists of modules, the one with the most parameters."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    return max(lists, key=_count)


def _experts(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters with the weights of all experts of a layer: [experts, outputs, inputs], or transposed."""
    return [
        value
        for module in model.modules()
        if "Expert" in type(module).__name__
        for value in module.parameters(recurse=False)
        if value.ndim == 3
    ]


@torch.no_grad()
def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer with one output. Routers of some models return several."""
    if not isinstance(module, nn.Linear | Conv1D):
        return False
    if type(module).forward in (nn.Linear.forward, Conv1D.forward):
        return True
    try:
        return isinstance(module(module.weight.new_zeros(1, module.weight.shape[1])), torch.Tensor)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False


def _adapted(model: nn.Module, projection: Any) -> int:
    """Return the inputs and outputs of the matrices that `quartet.models.weights.lora` adapts by default."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    linear: list[Any] = [
        module
        for name, module in model.named_modules()
        # The parents of dt_proj multiply with its weight themselves.
        if module is not projection and is_linear(module) and name.rpartition(".")[2] != "dt_proj"
    ]
    linear = [module for module in linear if uses[id(module.weight)] == 1]
    sizes = sum(sum(module.weight.shape) for module in linear)
    return sizes + sum(value.shape[0] * sum(value.shape[1:]) for value in _experts(model))


def _lengths(config: Any, layers: nn.Module) -> tuple[int, int]:
    """Return the tokens that the two passes differ by, and those of the long one: whole chunks of every kind of layer."""
    rates = getattr(config, "compress_rates", None)
    step = max([STEP, *(rates.values() if isinstance(rates, Mapping) else [])])
    if any("dt_proj" in name for name, _ in layers.named_parameters()):
        return step, LOOP_TOKENS
    chunks = [getattr(config, name, None) for name in ("chunk_size", "mamba_chunk_size")]
    tokens = 5 * max([CHUNK, step, *(size for size in chunks if isinstance(size, int))])
    if tokens > MAX_TOKENS:
        raise ValueError(f"layers compute {tokens // 5} tokens at a time; expected at most {MAX_TOKENS // 5}")
    return step, tokens


@dataclass(frozen=True, slots=True)
class _Pass:
    """A forward pass over ``tokens`` tokens: the attributes of the layers of its cache, and what it saves for a backward pass."""

    tokens: int
    states: list[Mapping[str, Any]]
    saved_inside: Saved
    saved_outside: Saved

    @classmethod
    def of(cls, model: Any, layers: Any, tokens: int, saves: bool) -> _Pass:
        depth, sums = [0], {where: {"half": 0, "other": 0, "pair": 0} for where in (True, False)}
        own = {value.untyped_storage()._cdata for value in (*model.parameters(), *model.buffers())}
        # The storages are kept, so that no other one gets the address of a counted one.
        counted: dict[int, Any] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own and storage._cdata not in counted:
                counted[storage._cdata] = storage
                # Attention with a sink has a score more per token.
                is_pairs = tensor.ndim > 1 and tensor.shape[-2] == tokens and tensor.shape[-1] - tokens in (0, 1)
                is_half = tensor.dtype == torch.bfloat16
                sums[depth[0] > 0]["pair" if is_pairs else "half" if is_half else "other"] += storage.nbytes()
            return tensor

        caches: list[Any] = []

        def enter(_: Any, args: Any, kwargs: Any) -> None:
            depth[0] += 1
            # Some models return no cache, but every layer gets it.
            caches.extend(value for value in (*args, *kwargs.values()) if isinstance(value, transformers.Cache))

        def leave(*_: Any) -> None:
            depth[0] -= 1

        hooks = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in layers]
        hooks += [layer.register_forward_hook(leave) for layer in layers]
        ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
        saving = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with torch.set_grad_enabled(saves), saving, _FusedAttention():
            output = model.base_model(input_ids=ids, use_cache=True)
        for hook in hooks:
            hook.remove()
        inside, outside = (
            Saved(size["half"] / HALF_BYTES / tokens, size["other"] / tokens, size["pair"] / tokens**2)
            for size in (sums[True], sums[False])
        )
        caches += [getattr(output, name, None) for name in _CACHES]
        return cls(tokens, _states(model, next((cache for cache in caches if cache is not None), {})), inside, outside)


class _FusedAttention(TorchFunctionMode):
    """Attention that saves what a fused kernel saves. On the meta device, torch would save the scores of all pairs."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace scaled_dot_product_attention, and call all other functions."""
        given = kwargs or {}
        if function is not functional.scaled_dot_product_attention:
            return function(*args, **given)
        named = [given[name] for name in ("query", "key", "value", "attn_mask") if name in given]
        query, key, value, *masks = [*args, *named][:4]
        # A mask of numbers is computed, as that of chosen tokens. One of flags is left out: tokens are not padded.
        biases = [mask for mask in masks if isinstance(mask, torch.Tensor) and mask.is_floating_point()]
        attention: Any = _SavedAttention
        return attention.apply(query, key, value, *biases)


class _SavedAttention(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *masks: Any) -> torch.Tensor:
        outputs = query.new_empty(*query.shape[:-1], value.shape[-1])
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        context.save_for_backward(query, key, value, outputs, sums, *masks)
        return outputs


def _states(model: Any, cache: Any) -> list[Mapping[str, Any]]:
    """Return the attributes of the layers of a cache, and the tensors that are beside them or in modules of the model."""
    layers = [
        {**vars(layer), "is_sliding": getattr(layer, "is_sliding", False)} for layer in getattr(cache, "layers", [])
    ]
    beside = {"all": cache} if isinstance(cache, list | dict) else {**vars(cache), "layers": None}
    modules = [
        {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
        for module in model.modules()
    ]
    return [*layers, beside, *modules]


def _sequence_state(short: _Pass, long: _Pass) -> tuple[SequenceState, list[torch.Tensor]]:
    """Return what a model keeps of a sequence, and the keys of the layers that have some.

    Keys and values are counted by their tokens, which are those of a window in some layers. What else depends on the length is
    counted by the difference of the two passes.
    """
    token, fixed, float32, all_keys = 0.0, 0, 0, []
    windows: dict[int, float] = defaultdict(float)
    for before, after in zip(short.states, long.states, strict=True):
        keys = [value for value in _tensors([after.get(name) for name in ("keys", "values")]) if value.numel()]
        size = sum(each.numel() / each.shape[-2] for each in keys)
        all_keys += keys[:1]
        if after.get("is_sliding"):
            windows[after["sliding_window"]] += size
        else:
            token += size
        (shorter, _), (elements, others) = (_sizes(states) for states in (before, after))
        grown = (elements - shorter) / (long.tokens - short.tokens)
        token += grown
        fixed += round(elements - grown * long.tokens)
        float32 += others
    return SequenceState(
        token, tuple(sorted((w, size) for w, size in windows.items() if size)), fixed, float32
    ), all_keys


def _sizes(states: Mapping[str, Any]) -> tuple[int, int]:
    """Return the elements of the states besides keys and values: in the model's precision, and in float32."""
    tensors = _tensors([value for name, value in states.items() if name not in ("keys", "values")])
    return (
        sum(each.numel() for each in tensors if each.dtype == torch.bfloat16),
        sum(each.numel() for each in tensors if each.dtype == torch.float32),
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value, each once. A single number, such as the size of a window, is no state."""
    if isinstance(value, torch.Tensor):
        return [value] if value.ndim else []
    if isinstance(value, Mapping):
        value = list(value.values())
    tensors = [tensor for each in value for tensor in _tensors(each)] if isinstance(value, list | tuple) else []
    return list({id(tensor): tensor for tensor in tensors}.values())
