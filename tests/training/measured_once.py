"""What services measure at their start, once for equal models. Half of a short run was spent on it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import xxhash

from quartet.models.generation import torch_engine, trial
from quartet.models.training.update_memory import measure_policy, measure_value
from quartet.services.actor import actor
from quartet.services.critic import critic

_RESULTS: dict[Hashable, Any] = {}


def _once(key: Hashable, measure: Callable[[], Any]) -> Any:
    if key not in _RESULTS:
        _RESULTS[key] = measure()
    return _RESULTS[key]


def _shape(model: Any) -> Hashable:
    parameters = tuple((name, item.shape, item.dtype, item.requires_grad) for name, item in model.named_parameters())
    return type(model), parameters, str(getattr(model, "config", ""))


def _content(model: Any) -> str:
    digest = xxhash.xxh3_64()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _trial_result(untried: str, passes: Callable[[], bool], bits: Any) -> trial.TrialResult:
    # A test may have replaced the trial, with another result.
    if untried or getattr(passes, "__func__", None) is not _TRIAL:
        return trial.trial_result(untried, passes, bits)
    engine: Any = passes.__self__  # type: ignore[attr-defined]
    key = (type(engine), _shape(engine._model), _content(engine._model), engine._max_concurrent, trial.processor())
    result: trial.TrialResult = _once(key, lambda: trial.trial_result(untried, passes, bits))
    return result


def _of_decoding(check: Callable[..., Any]) -> Callable[..., Any]:
    def check_once(model: Any, *arguments: Any) -> Any:
        return _once((check, _shape(model), _content(model), *arguments), lambda: check(model, *arguments))

    return check_once


def _difference(engine: torch_engine.TorchEngine) -> str | None:
    model, kind = engine._model, (engine._static is not None, engine._uncached)
    result: str | None = _once((_DIFFERENCE, _shape(model), _content(model), kind), lambda: _DIFFERENCE(engine))
    return result


def _of_update(measure: Callable[..., Any]) -> Callable[..., Any]:
    def measure_once(model: Any, *arguments: Any) -> Any:
        return _once((measure, _shape(model), *arguments), lambda: measure(model, *arguments))

    return measure_once


_TRIAL = torch_engine.TorchEngine._is_batch_invariant
_DIFFERENCE = torch_engine.TorchEngine._difference


@contextmanager
def measured_once() -> Iterator[None]:
    """Keep the results of the engine's trials and of the memory of updates, by model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_engine, "trial_result", _trial_result)
        patch.setattr(torch_engine, "unsupported_reason", _of_decoding(torch_engine.unsupported_reason))
        patch.setattr(torch_engine, "is_recordable", _of_decoding(torch_engine.is_recordable))
        patch.setattr(torch_engine.TorchEngine, "_difference", _difference)
        patch.setattr(actor, "measure_policy", _of_update(measure_policy))
        patch.setattr(critic, "measure_value", _of_update(measure_value))
        yield
