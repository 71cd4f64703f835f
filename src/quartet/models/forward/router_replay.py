"""Replay of the experts that the generation engine chose, in the trainer's forward and backward passes.

The routers of a mixture of experts choose again in every pass. Engine and trainer round differently, so some tokens get other
experts, whose outputs differ by far more than rounding. Here a router takes the engine's choice, and computes the weights of
these experts from its own logits, through which the gradients flow (Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by
Aligning Training and Inference Routers": rollout routing replay, R3).

No formula of a router is repeated: its own code runs, in which the call of ``torch.topk`` that chooses the experts returns the
given ones. Each model is tried once.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from quartet.contract.trajectory import TokenBatch
from quartet.errors import ConfigError, MismatchError
from quartet.models.forward.batching import MicroBatch
from quartet.models.forward.lora_dropout import dropout_off
from quartet.models.forward.model_capabilities import backbone, device_of, vocabulary_size
from quartet.models.forward.packing import hidden_states

_TOP_K = (torch.topk, torch.Tensor.topk)
_TRIAL_ROWS, _TRIAL_TOKENS = 2, 4
_models: weakref.WeakKeyDictionary[nn.Module, Routers] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class _Router:
    """The router ``name`` of a layer. Its call of torch.topk number ``call`` chooses ``top_k`` of ``experts`` experts."""

    layer: int
    name: str
    call: int
    experts: int
    top_k: int


class Routers:
    """The routers of one model. See ``routers_of``."""

    def __init__(self, base: nn.Module, routers: list[_Router], layers: int) -> None:
        """``layers``: number of layers of the backbone ``base``, with and without experts."""
        # Modules of a sharded model refer to all of it, which would never be freed.
        self._base = weakref.ref(base)
        self._routers, self._layers = routers, layers
        self._top_k, self._experts = routers[0].top_k, routers[0].experts

    @property
    def shape(self) -> tuple[int, int]:
        """Layers of the model, and experts per token."""
        return self._layers, self._top_k

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        """The smallest type that holds the experts."""
        return np.uint8 if self._experts <= 256 else np.uint16

    @property
    def layers(self) -> list[int]:
        """Indices of the layers with experts."""
        return [router.layer for router in self._routers]

    def check(self, batch: TokenBatch) -> None:
        """Raise MismatchError unless the experts of a batch are a choice that the routers of this model can make."""
        experts = batch.routed_experts
        assert experts is not None
        if experts.shape[1:] != self.shape:
            raise MismatchError(
                f"routed_experts: {experts.shape[2]} experts per token in {experts.shape[1]} layers, the policy has "
                f"{self._top_k} in {self._layers}; start engine and actor with the same model"
            )
        chosen = experts[:, self.layers]
        if int(chosen.max(initial=0)) >= self._experts:
            raise MismatchError(f"routed_experts: expert {int(chosen.max())}, the policy has 0..{self._experts - 1}")
        ordered = np.sort(chosen, axis=-1)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise MismatchError(
                "routed_experts: a token has the same expert twice, so the engine has not recorded its choice; report its "
                "version, and set rollout.router_replay false"
            )

    @contextmanager
    def replaying(self, experts: torch.Tensor) -> Iterator[None]:
        """Let the routers choose ``experts`` [tokens of the input, layers, experts per token] inside the context.

        The backward pass must be inside, too: it computes checkpointed layers again. No other thread may use the model.
        """

        def replay(router: _Router, forward: Callable[..., Any], inputs: tuple[Any, ...], options: Any) -> Any:
            with _TopK(router.call, experts[:, router.layer]):
                return forward(*inputs, **options)

        with self._patched(replay):
            yield

    @contextmanager
    def recording(self) -> Iterator[Callable[[], torch.Tensor]]:
        """Record the experts of the forward passes inside the context.

        Yield a function that returns those of the last pass, int64 [tokens of the input, layers, experts per token], 0 in layers
        without experts.
        """
        chosen: dict[int, torch.Tensor] = {}

        def record(router: _Router, forward: Callable[..., Any], inputs: tuple[Any, ...], options: Any) -> Any:
            with _TopK() as calls:
                result = forward(*inputs, **options)
            chosen[router.layer] = calls.indices[router.call].reshape(-1, self._top_k)
            return result

        def last() -> torch.Tensor:
            like = next(iter(chosen.values()))
            nothing = torch.zeros_like(like)
            return torch.stack([chosen.get(layer, nothing) for layer in range(self._layers)], 1)

        with self._patched(record):
            yield last

    @contextmanager
    def _patched(self, call: Callable[[_Router, Callable[..., Any], tuple[Any, ...], Any], Any]) -> Iterator[None]:
        base = self._base()
        assert base is not None
        modules = [base.get_submodule(router.name) for router in self._routers]
        try:
            for router, module in zip(self._routers, modules, strict=True):
                module.forward = _patch(call, router, module.forward)
            yield
        finally:
            for module in modules:
                vars(module).pop("forward", None)


def _patch(call: Callable[..., Any], router: _Router, own: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *inputs, **options: call(router, own, inputs, options)


class _TopK(TorchFunctionMode):
    """Mode that records the results of torch.topk, or replaces the indices of one call, and with them the values."""

    def __init__(self, call: int = -1, experts: torch.Tensor | None = None) -> None:
        """``experts`` [tokens, k]: the result of the call with the number ``call``, from 0."""
        super().__init__()
        self._call, self._experts = call, experts
        self.indices: list[torch.Tensor] = []
        """The indices that each call returned."""
        self.sizes: list[int] = []
        """The number of values that each call chose from."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _TOP_K:
            return func(*args, **kwargs)
        values: torch.Tensor = args[0] if args else kwargs["input"]
        if self._experts is not None and len(self.indices) == self._call:
            indices = self._experts.to(torch.int64).view(*values.shape[:-1], -1)
            result: Any = torch.return_types.topk((values.gather(-1, indices), indices))
        else:
            result = func(*args, **kwargs)
        self.indices.append(result[1])
        self.sizes.append(values.shape[-1])
        return result


def routers_of(model: Any) -> Routers:
    """Return the routers of a causal LM. Each model is tried once.

    All ranks of a group must call it, the first time in ``Workers.evaluate``. Raises ConfigError if the model has no routers
    whose choice can be given.
    """
    base = backbone(model)
    if base not in _models:
        with dropout_off(model), torch.no_grad():
            _models[base] = _try_routers(base)
    return _models[base]


@contextmanager
def replayed_routing(model: Any, micro_batch: MicroBatch) -> Iterator[None]:
    """Let the routers choose the experts of a micro-batch inside the context, if it has any. See ``Routers.replaying``."""
    if micro_batch.routed_experts is None:
        yield
        return
    with routers_of(model).replaying(micro_batch.routed_experts):
        yield


def check_routing(model: Any, batch: TokenBatch) -> None:
    """Raise MismatchError if the experts of a batch, if it has any, are none of the model's. See ``Routers.check``."""
    if batch.routed_experts is not None:
        routers_of(model).check(batch)


def _try_routers(base: Any) -> Routers:
    """Find the routers in a forward pass, and compare passes in which their choice is given."""
    name = type(base).__name__
    remedy = f"set rollout.router_replay false, or give another model than this {name}"
    ids = torch.arange(_TRIAL_ROWS * _TRIAL_TOKENS, device=device_of(base)).view(_TRIAL_ROWS, -1) % vocabulary_size(
        base
    )
    routers, expected = _find_routers(base, ids)
    if not routers:
        raise ConfigError(
            "rollout.router_replay: no module of the model returns the experts of a token, as routers in transformers do; "
            + remedy
        )
    if len({(router.top_k, router.experts) for router in routers}) > 1 or len(
        {router.layer for router in routers}
    ) < len(routers):
        raise ConfigError(
            f"rollout.router_replay: expected one router per layer, all with the same number of experts; {remedy}"
        )
    found = Routers(base, routers, int(base.config.get_text_config().num_hidden_layers))
    with found.recording() as last:
        hidden_states(base, ids)
        own = last()
    with found.replaying(own):
        same = hidden_states(base, ids)
    others = own.clone()
    for router in routers:
        others[:, router.layer] = (own[:, router.layer] + 1) % router.experts
    with found.replaying(others):
        different = hidden_states(base, ids)
    if not torch.equal(same, expected) or torch.equal(different, expected) or not different.isfinite().all():
        raise ConfigError(
            f"rollout.router_replay: the model does not use the experts that are given to its {len(routers)} routers; {remedy}"
        )
    return found


def _find_routers(base: Any, ids: torch.Tensor) -> tuple[list[_Router], torch.Tensor]:
    """Return the innermost modules whose call of torch.topk chooses the experts that they return, and the hidden states."""
    found: dict[str, _Router] = {}
    numbers: Mapping[str, int] = {
        name: int(digits[0]) for name, _ in base.named_modules() if (digits := re.findall(r"\.(\d+)\.", f".{name}."))
    }

    def observe(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*inputs: Any, **options: Any) -> Any:
            with _TopK() as calls:
                result = own(*inputs, **options)
            indices = _experts_in(result, ids.numel())
            matches = [
                number
                for number, chosen in enumerate(calls.indices)
                if indices is not None
                and chosen.numel() == indices.numel()
                and torch.equal(chosen.flatten(), indices.flatten())
            ]
            if indices is not None and matches and name in numbers:
                call = matches[-1]
                found[name] = _Router(numbers[name], name, call, calls.sizes[call], calls.indices[call].shape[-1])
            return result

        return forward

    with ExitStack() as stack:
        for name, module in base.named_modules():
            if "forward" not in vars(module):
                module.forward = observe(name, module.forward)
                stack.callback(vars(module).pop, "forward", None)
        states = hidden_states(base, ids)
    inner = [name for name in found if not any(other.startswith(f"{name}.") for other in found)]
    return sorted((found[name] for name in inner), key=lambda router: router.layer), states


def _experts_in(result: Any, tokens: int) -> torch.Tensor | None:
    """Return the integer tensor [tokens, k] in the result of a module, or None."""
    if not isinstance(result, tuple):
        return None
    integers = [value for value in result if isinstance(value, torch.Tensor) and value.dtype == torch.int64]
    return next((value for value in integers if value.ndim > 1 and value.numel() == tokens * value.shape[-1]), None)
