"""What services, engines and forward passes do with a model before its use, once for equal models.

Half of a short run was spent on what they measure, and a sixth of the rest on reading checkpoints.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from quartet.models.forward import packing
from quartet.models.generation import torch_engine, trial
from quartet.models.training.update_memory import measure_policy, measure_value
from quartet.models.weights import loading
from quartet.models.weights.towers import unloaded_tensors
from quartet.services.actor import actor
from quartet.services.critic import critic

_RESULTS: dict[Hashable, Any] = {}


def _once(key: Hashable, measure: Callable[[], Any]) -> Any:
    if key not in _RESULTS:
        _RESULTS[key] = measure()
    return _RESULTS[key]


def _shape(model: Any) -> Hashable:
    parameters = tuple((name, item.shape, item.dtype, item.requires_grad) for name, item in model.named_parameters())
    # The string of a config itself would build its defaults, too.
    return type(model), parameters, str(vars(model.config) if hasattr(model, "config") else "")


def _content(model: Any) -> str:
    digest = xxhash.xxh3_64()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _of_model(check: Callable[..., Any], model: Any, measure: Callable[[], Any], *more: Hashable) -> Any:
    """Return the kept result for an equal model. One that a test has changed by more than its weights is measured."""
    if any("forward" in vars(part) or part._forward_pre_hooks or part._forward_hooks for part in model.modules()):
        return measure()
    return _once((check, _shape(model), _content(model), *more), measure)


def _trial_result(untried: str, passes: Callable[[], bool], bits: Any) -> trial.TrialResult:
    # A test may have replaced the trial, with another result.
    if untried or getattr(passes, "__func__", None) is not _TRIAL:
        return trial.trial_result(untried, passes, bits)
    engine: Any = passes.__self__  # type: ignore[attr-defined]
    more = type(engine), trial.processor()
    result: trial.TrialResult = _of_model(
        _TRIAL, engine._model, lambda: trial.trial_result(untried, passes, bits), *more
    )
    return result


def _of_decoding(check: Callable[..., Any]) -> Callable[..., Any]:
    def check_once(model: Any, *arguments: Any) -> Any:
        return _of_model(check, model, lambda: check(model, *arguments), *arguments)

    return check_once


def _difference(engine: torch_engine.TorchEngine) -> str | None:
    kind = (engine._static is not None, engine._uncached)
    result: str | None = _of_model(_DIFFERENCE, engine._model, lambda: _DIFFERENCE(engine), kind)
    return result


def _padded_states(base: Any) -> torch.Tensor:
    result: torch.Tensor = _of_model(_PADDED, base, lambda: _PADDED(base), base.config._attn_implementation)
    return result


def _matches_packed(base: Any, expected: torch.Tensor) -> bool:
    attention = base.config._attn_implementation
    result: bool = _of_model(_PACKED, base, lambda: _PACKED(base, expected), attention)
    return result


def _of_update(measure: Callable[..., Any]) -> Callable[..., Any]:
    def measure_once(model: Any, *arguments: Any) -> Any:
        return _once((measure, _shape(model), *arguments), lambda: measure(model, *arguments))

    return measure_once


_TRIAL = torch_engine.TorchEngine._is_batch_invariant
_DIFFERENCE = torch_engine.TorchEngine._difference
_PADDED, _PACKED = packing._padded_states, packing._matches_packed


@contextmanager
def measured_once(memory: bool = True) -> Iterator[None]:
    """Keep the results of the trials of engines and packed passes, and of the ``memory`` of updates, by model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_engine, "trial_result", _trial_result)
        patch.setattr(torch_engine, "unsupported_reason", _of_decoding(torch_engine.unsupported_reason))
        patch.setattr(torch_engine, "is_recordable", _of_decoding(torch_engine.is_recordable))
        patch.setattr(torch_engine.TorchEngine, "_difference", _difference)
        patch.setattr(packing, "_padded_states", _padded_states)
        patch.setattr(packing, "_matches_packed", _matches_packed)
        if memory:
            patch.setattr(actor, "measure_policy", _of_update(measure_policy))
            patch.setattr(critic, "measure_value", _of_update(measure_value))
        yield


_LOAD, _LOAD_CONFIG = loading._load, loading._load_config
_LOADED: dict[Hashable, Any] = {}
"""Models as they were read, by their files. None: read once so far, as most checkpoints of runs are."""
_LOADED_LIMIT = 64
_loaded_lock = threading.Lock()


def _load(model: str | Path, config: Any, kind: Any, dtype: str, device: str) -> Any:
    """Return a copy of a model that was read at least twice, from files that have not changed."""
    if device != "cpu" or not Path(model).is_dir():
        return _LOAD(model, config, kind, dtype, device)
    key = (str(model), kind, dtype, *map(_state, sorted(Path(model).iterdir())))
    with _loaded_lock:
        if (kept := _LOADED.get(key)) is not None:
            return copy.deepcopy(kept)
    loaded = _LOAD(model, config, kind, dtype, device)
    with _loaded_lock:
        if len(_LOADED) >= _LOADED_LIMIT:
            _LOADED.clear()
        again = key in _LOADED and unloaded_tensors(loaded) is None
        _LOADED[key] = copy.deepcopy(loaded) if again else None
    return loaded


def _load_config(model: str | Path) -> Any:
    """Return a copy of a config that was read before, from a file that has not changed."""
    path = Path(model) / "config.json"
    if not path.is_file():
        return _LOAD_CONFIG(model)
    return copy.deepcopy(_once((_LOAD_CONFIG, str(model), _state(path)), lambda: _LOAD_CONFIG(model)))


def _state(path: Path) -> Hashable:
    stat = path.stat()
    return path.name, stat.st_ino, stat.st_size, stat.st_mtime_ns


@contextmanager
def loaded_once() -> Iterator[None]:
    """Copy models instead of reading the same checkpoint again and again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "_load", _load)
        patch.setattr(loading, "_load_config", _load_config)
        yield
