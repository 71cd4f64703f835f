"""A comparison of one function with a peer's: settings, both results, and their difference."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests.parity.losses.batch import Batch, make_batch

Results = Mapping[str, Tensor | float]
"""Results by name, for example ``loss`` and ``gradient``."""

TOLERANCE = 1e-6
RESULTS = Path(__file__).with_name("results")
DIGITS = 12


@dataclass(frozen=True, slots=True)
class Case:
    """``name`` is Quartet's, ``theirs`` the peer's, both as their configs or code spell them. ``settings`` tells the values.

    ``run`` computes the peer's results. ``transcribed``: with a formula written from the peer's source, because the peer
    cannot be imported. ``precision`` is that of the peer's computation. ``remark`` tells how the results are made comparable.
    """

    name: str
    peer: str
    theirs: str
    ours: Callable[[Batch], Results]
    run: Callable[[Batch], Results]
    settings: str = ""
    remark: str = ""
    precision: str = "float64"
    transcribed: bool = False

    @property
    def key(self) -> str:
        return f"{self.name} | {self.peer} {self.theirs} | {self.settings}"


@dataclass(frozen=True, slots=True)
class Group:
    """Cases of one section. ``file`` holds the results of their peers."""

    title: str
    file: str
    cases: tuple[Case, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """The result of a case: a representative number of both sides, and the largest difference of all results."""

    case: Case
    ours: float
    theirs: float
    difference: float

    @property
    def holds(self) -> bool:
        return self.difference <= TOLERANCE


def compare(case: Case, theirs: Results) -> Row:
    """Compute Quartet's results and compare them with the peer's.

    The difference is the largest one of a result, relative to the result's largest magnitude. Raises ValueError if the results
    have other names or sizes.
    """
    ours = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in case.ours(make_batch()).items()}
    peers = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in theirs.items()}
    if {name: value.shape for name, value in ours.items()} != {name: value.shape for name, value in peers.items()}:
        raise ValueError(f"{case.key}: {_shapes(ours)} here, {_shapes(peers)} there")
    difference = max(_difference(ours[name], peers[name]) for name in ours)
    first = next(iter(ours))
    return Row(case, _number(ours[first]), _number(peers[first]), difference)


def save(group: Group, results: Mapping[str, Results]) -> None:
    """Write the peers' results of a group's cases."""
    content = {
        key: {name: _rounded(torch.as_tensor(value, dtype=torch.float64)) for name, value in case.items()}
        for key, case in results.items()
    }
    text = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{group.file}.json").write_text("{\n" + text + "\n}\n", encoding="utf-8")


def load(group: Group) -> dict[str, Results]:
    """Return the peers' results that ``save`` has written, by the key of the case."""
    return dict(json.loads((RESULTS / f"{group.file}.json").read_text(encoding="utf-8")))


def unique(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Return the cases. Raises ValueError if two have the same key."""
    listed = tuple(cases)
    keys = [case.key for case in listed]
    repeated = {key for key in keys if keys.count(key) > 1}
    if repeated:
        raise ValueError(f"two cases have the key {sorted(repeated)[0]}")
    return listed


def _difference(ours: Tensor, theirs: Tensor) -> float:
    if ours.numel() == 0:
        raise ValueError("no numbers to compare")
    if not (ours.isfinite().all() and theirs.isfinite().all()):
        return float("inf")
    scale = theirs.abs().max()
    return float((ours - theirs).abs().max() / scale) if scale > 0 else float(ours.abs().max())


def _number(result: Tensor) -> float:
    """Return a scalar as it is, and the root mean square of an array."""
    return float(result) if result.ndim == 0 else float(result.square().mean().sqrt())


def _rounded(result: Tensor) -> float | list[float]:
    if result.ndim == 0:
        return float(f"{float(result):.{DIGITS}g}")
    return [float(f"{value:.{DIGITS}g}") for value in result.flatten().tolist()]


def _shapes(results: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(value.shape)}" for name, value in results.items())
