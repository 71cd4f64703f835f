"""Recording of a computation in torch, and its replay without the Python code that made it.

A decode step of a small model is a few hundred calls of torch between layers of Python. A recording keeps only the calls, as a
``torch.fx`` graph, and repeats them on the same tensors. It reads tensors that exist already, such as weights and caches, at each
replay, so a replay sees changes in place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.overrides import TorchFunctionMode

_METADATA = frozenset(
    {"size", "dim", "numel", "stride", "is_contiguous", "is_floating_point", "is_complex", "element_size", "__len__"}
)
"""Methods whose result depends on the shape and type of a tensor, not on its values."""
_ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout", "is_meta", "is_cpu"})
"""Attributes of this kind."""


_PLAIN = (
    *(bool, int, float, complex, str, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Types of arguments that a graph can contain."""


class NotRecordable(Exception):
    """The computation reads values of tensors outside torch, so that a replay could be wrong."""


def record(compute: Callable[[], object]) -> Callable[[], object]:
    """Compute once, and return a function that repeats the same calls of torch on the same tensors.

    Sizes, and all Python values, are those of the recording. Raises NotRecordable if the computation reads values of tensors, for
    example to branch on them.
    """
    recorder = _Recorder()
    with recorder:
        compute()
    return recorder.replay()


class _Recorder(TorchFunctionMode):
    """Mode that adds every call of a torch function to a graph."""

    def __init__(self) -> None:
        super().__init__()
        self._graph = fx.Graph()
        self._nodes: dict[int, Any] = {}
        self._constants: list[torch.Tensor] = []
        self._last_placeholder: Any = None
        # Objects are known by their address, so none may be freed before the end.
        self._alive: list[object] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._alive += [args, kwargs, result]
        name = getattr(func, "__name__", "")
        if name == "__get__":
            self._add_attribute(func.__self__.__name__, args[0], result)
        elif isinstance(result, torch.Tensor):
            # A conversion that changes nothing returns its argument.
            if not (_is_pure(name, kwargs) and any(result is value for value in args)):
                self._name(result, self._add(func, args, kwargs))
        elif isinstance(result, (tuple, list)) and any(isinstance(item, torch.Tensor) for item in result):
            node = self._add(func, args, kwargs)
            for index, item in enumerate(result):
                if isinstance(item, torch.Tensor):
                    self._name(item, self._graph.call_method("__getitem__", (node, index)))
        elif result is None:
            self._add(func, args, kwargs)
        elif name not in _METADATA:
            raise NotRecordable(f"{name or func} reads values of tensors")
        return result

    def replay(self) -> Callable[[], object]:
        """Return the function that repeats the calls."""
        self._graph.output(None)
        module = fx.GraphModule({}, self._graph)
        return partial(module.forward, *self._constants)

    def _add_attribute(self, name: str, tensor: torch.Tensor, result: object) -> None:
        if isinstance(result, torch.Tensor):
            self._name(result, self._graph.call_function(getattr, (self._node(tensor), name)))
        elif name not in _ATTRIBUTES:
            raise NotRecordable(f"the attribute {name} reads a tensor")

    def _add(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self._graph.call_function(func, self._convert(args), self._convert(kwargs))

    def _name(self, tensor: torch.Tensor, node: Any) -> None:
        # An operation in place returns a tensor that has a name already.
        self._nodes.setdefault(id(tensor), node)

    def _convert(self, value: Any) -> Any:
        """Replace tensors in an argument by the nodes that compute them."""
        if isinstance(value, torch.Tensor):
            return self._node(value)
        if isinstance(value, (tuple, list)):
            return [*map(self._convert, value)] if isinstance(value, list) else tuple(map(self._convert, value))
        if isinstance(value, dict):
            return {key: self._convert(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(self._convert(value.start), self._convert(value.stop), self._convert(value.step))
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, _PLAIN):
            raise NotRecordable(f"an argument of the type {type(value).__name__}")
        return value

    def _node(self, tensor: torch.Tensor) -> Any:
        if id(tensor) not in self._nodes:
            last = self._last_placeholder
            with self._graph.inserting_after(last) if last is not None else self._graph.inserting_before():
                node = self._graph.placeholder(f"constant_{len(self._constants)}")
            self._nodes[id(tensor)] = self._last_placeholder = node
            self._constants.append(tensor)
            self._alive.append(tensor)
        return self._nodes[id(tensor)]


def _is_pure(name: str, kwargs: dict[str, Any]) -> bool:
    """Return whether a function of this name leaves its arguments unchanged."""
    return not (name.endswith("_") or "out" in kwargs)
