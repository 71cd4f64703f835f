"""Recording of a computation in torch, and its replay without the Python code that made it.

A decode step of a small model is a few hundred calls of torch between layers of Python. A recording keeps only the calls, as the
lines of a function, and repeats them on the same tensors. It reads tensors that exist already, such as weights and caches, at
each replay, so a replay sees changes in place. The graphs of ``torch.fx`` are the same in principle, and take longer to make
than a step to compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
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
"""Types of arguments that a recording can contain."""


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
    """Mode that records every call of a torch function."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[str] = []
        """The calls, of which the result of number n is the variable ``vn``."""
        self._last_uses: dict[int, int] = {}
        """Number of the last call that uses the result of a call."""
        self._names: dict[int, str] = {}
        """Names of tensors by their address."""
        self._values: dict[str, object] = {}
        """Values of names that are no results: tensors, functions, and other arguments."""
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
                self._name(result, self._add_call(func, args, kwargs))
        elif isinstance(result, (tuple, list)) and any(isinstance(item, torch.Tensor) for item in result):
            call = self._add_call(func, args, kwargs)
            for index, item in enumerate(result):
                if isinstance(item, torch.Tensor):
                    self._name(item, self._add(f"{self._use(call)}[{index}]"))
        elif result is None:
            self._add_call(func, args, kwargs)
        elif name not in _METADATA:
            raise NotRecordable(f"{name or func} reads values of tensors")
        return result

    def replay(self) -> Callable[[], object]:
        """Return the function that repeats the calls."""
        unused: dict[int, list[str]] = {}
        for number, last in self._last_uses.items():
            unused.setdefault(last, []).append(f"v{number} = ")
        lines = [
            (f"v{number} = " if number in self._last_uses else "")
            + call
            # Frees the memory of results that no later call uses.
            + (f"; {''.join(unused[number])}None" if number in unused else "")
            for number, call in enumerate(self._calls)
        ]
        code = compile("\n ".join(["def replay():", *lines, "return"]), "<recording>", "exec")
        exec(code, self._values)  # noqa: S102 - the code has only names of this class, attributes of tensors, and plain values.
        function: Any = self._values.pop("replay")
        return function  # type: ignore[no-any-return]

    def _add_attribute(self, name: str, tensor: torch.Tensor, result: object) -> None:
        if isinstance(result, torch.Tensor):
            self._name(result, self._add(f"{self._argument(tensor)}.{name}"))
        elif name not in _ATTRIBUTES:
            raise NotRecordable(f"the attribute {name} reads a tensor")

    def _add_call(self, func: Any, args: Any, kwargs: Any) -> int:
        named = [f"{key}={self._argument(value)}" for key, value in kwargs.items()]
        return self._add(f"{self._value(func)}({', '.join([*map(self._argument, args), *named])})")

    def _add(self, call: str) -> int:
        self._calls.append(call)
        return len(self._calls) - 1

    def _name(self, tensor: torch.Tensor, call: int) -> None:
        # An operation in place returns a tensor that has a name already.
        self._names.setdefault(id(tensor), f"v{call}")

    def _use(self, call: int) -> str:
        self._last_uses[call] = len(self._calls)
        return f"v{call}"

    def _argument(self, value: Any) -> str:
        """Return the code of an argument, in which tensors are the names of the calls that compute them."""
        if isinstance(value, torch.Tensor):
            name = self._names.get(id(value))
            if name is None:
                name = self._names[id(value)] = self._value(value)
            return self._use(int(name[1:])) if name[0] == "v" else name
        if isinstance(value, (tuple, list)):
            items = "".join(f"{self._argument(item)}, " for item in value)
            return f"[{items}]" if isinstance(value, list) else f"({items})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {self._argument(item)}' for key, item in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({self._argument(value.start)}, {self._argument(value.stop)}, {self._argument(value.step)})"
        if isinstance(value, np.generic):
            value = value.item()
        if not isinstance(value, _PLAIN):
            raise NotRecordable(f"an argument of the type {type(value).__name__}")
        return repr(value) if type(value) in (bool, int, str, type(None)) else self._value(value)

    def _value(self, value: object) -> str:
        """Return a new name of a value."""
        name = f"c{len(self._values)}"
        self._values[name] = value
        return name


def _is_pure(name: str, kwargs: dict[str, Any]) -> bool:
    """Return whether a function of this name leaves its arguments unchanged."""
    return not (name.endswith("_") or "out" in kwargs)
