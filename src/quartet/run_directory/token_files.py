"""A step's trajectories token by token, in one safetensors file. They are for inspection: a run never reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet.contract.arrays import BoolArray, FloatArray
from quartet.errors import ConfigError

_OF_RESPONSES = ("log_probs", "reference_log_probs", "kl", "advantages", "returns")
"""float32 [response tokens], flat, in the order of the trajectories and their branches. With a critic also ``values``."""


@dataclass(frozen=True, slots=True)
class TrajectoryTokens:
    """One trajectory: ids int32 [prompt tokens] and [response tokens]; all else float32 [response tokens].

    ``log_probs`` are the engine's. ``kl`` is log π minus log π_ref, nats, with log π of ``algorithm.kl_log_probs``.
    ``advantages`` are those that the update used. ``values`` is None without a critic. ``response_mask`` bool [response tokens]
    is True at the policy's own tokens; the others are of observations, where all numbers are 0. If the trajectory has several
    branches, this is the first one, and ``further_branches`` are the others.
    """

    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    log_probs: FloatArray
    reference_log_probs: FloatArray
    kl: FloatArray
    advantages: FloatArray
    returns: FloatArray
    values: FloatArray | None
    response_mask: BoolArray
    further_branches: tuple[TrajectoryTokens, ...] = ()


def write_tokens(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write the result of ``step_artifacts.token_arrays`` to a temporary file and rename it, without a flush. Raises OSError."""
    from safetensors.numpy import save

    partial = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(exist_ok=True)
    try:
        with partial.open("wb") as file:
            file.write(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def read_tokens(path: Path, index: int) -> TrajectoryTokens | None:
    """Return the trajectory at ``index``, in the order of the lines of ``trajectories/``, or None if there is no file.

    Reads only this trajectory and the lengths. Raises ConfigError for a damaged file or an index out of range.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            prompts, responses = file.get_tensor("prompt_lengths"), file.get_tensor("response_lengths")
            several = "branches" in set(file.keys())
            counts = file.get_tensor("branches") if several else np.ones(len(responses), np.int32)
            if not 0 <= index < len(counts):
                raise ConfigError(f"tokens {path}: has {len(counts)} trajectories, expected one at {index}")
            branches = _slice_of(counts, index)
            if counts.min() < 1 or counts.sum(dtype=np.int64) != len(responses) or len(prompts) != len(responses):
                raise _different_lengths(path)
            first, *further = (
                _sequence(file, prompts, responses, number, path) for number in range(branches.start, branches.stop)
            )
            return replace(first, further_branches=tuple(further))
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"tokens {path}: cannot be read ({error}); remove the file: the run does not need it, and trajectories/ has the texts"
        ) from None


def _sequence(file: Any, prompts: NDArray[Any], responses: NDArray[Any], index: int, path: Path) -> TrajectoryTokens:
    """Return one sequence of an open file, by the lengths of all. Raises ConfigError."""
    prompt, response = _slice_of(prompts, index), _slice_of(responses, index)
    numbers = {name: file.get_slice(name)[response] for name in _OF_RESPONSES}
    names = set(file.keys())
    values = file.get_slice("values")[response] if "values" in names else None
    has_mask = "response_mask" in names
    mask = file.get_slice("response_mask")[response] if has_mask else np.ones(int(responses[index]), np.bool_)
    result = TrajectoryTokens(
        prompt_ids=file.get_slice("prompt_ids")[prompt],
        response_ids=file.get_slice("response_ids")[response],
        **numbers,
        values=values,
        response_mask=mask,
    )
    if {len(result.response_mask), *(len(numbers[name]) for name in _OF_RESPONSES)} != {len(result.response_ids)}:
        raise _different_lengths(path)
    return result


def _different_lengths(path: Path) -> ConfigError:
    return ConfigError(f"tokens {path}: its arrays have different lengths; remove the file: the run does not need it")


def _slice_of(lengths: NDArray[Any], index: int) -> slice:
    """Return the slice of one sequence's tokens, or of one trajectory's branches, in a flat array."""
    start = int(lengths[:index].sum(dtype=np.int64))
    return slice(start, start + int(lengths[index]))


def token_files(folder: Path) -> list[tuple[int, Path]]:
    """Return the step and path of every token file, oldest first."""
    files = folder.glob("step-*.safetensors")
    return sorted((int(path.stem.removeprefix("step-")), path) for path in files)
