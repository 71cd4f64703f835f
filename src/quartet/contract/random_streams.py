"""Random numbers that depend on ids and not on history: one counter-based stream per turn of a trajectory, one
permutation per epoch.

The run's name is not part of the key: the same config and seed under another name give the same run. The numbers are the raw
output of Philox, whose definition is fixed. NumPy's distributions may change between versions.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from quartet.contract.trajectory import TrajectoryId


def uniforms(seed: int, id: TrajectoryId, count: int, turn: int = 0) -> NDArray[np.float64]:
    """Return ``count`` numbers of the stream of a trajectory's turn, float64 [count], multiples of 2^-32 in [0, 1).

    A longer request starts with the numbers of a shorter one: number t always samples token t of the turn.
    """
    words = _stream("sample", seed, *_turn(id, turn)).random_raw(count)
    high: NDArray[np.float64] = (words >> np.uint64(32)).astype(np.float64) * 2.0**-32
    return high


def engine_seed(seed: int, id: TrajectoryId, turn: int = 0) -> int:
    """Return the seed of one turn of a trajectory for an engine with its own random numbers, 0 <= seed < 2^63."""
    return int(_stream("engine", seed, *_turn(id, turn)).random_raw()) >> 1


def environment_seed(seed: int, id: TrajectoryId) -> int:
    """Return the seed of one trajectory for its environment, 0 <= seed < 2^63."""
    return int(_stream("environment", seed, id.step, id.prompt, id.sample).random_raw()) >> 1


def permutation(seed: int, step: int, epoch: int, n: int) -> NDArray[np.int64]:
    """Return the order of ``n`` sequences in one epoch of a step's update, int64 [n]."""
    return np.argsort(_stream("permutation", seed, step, epoch).random_raw(n), kind="stable")


def selection_order(seed: int, step: int, epoch: int, mini_batch: int, n: int) -> NDArray[np.int64]:
    """Return a random order of ``n`` tokens of one mini-batch of a step's update, int64 [n]."""
    return np.argsort(_stream("selection", seed, step, epoch, mini_batch).random_raw(n), kind="stable")


def prompt_order(seed: int, number: int, n: int, prompt_set: str = "") -> NDArray[np.int64]:
    """Return the order of ``n`` prompts in one pass over the data set or over one of its sets, int64 [n]."""
    name = [prompt_set] if prompt_set else []
    return np.argsort(_stream("prompts", seed, number, *name).random_raw(n), kind="stable")


def _turn(id: TrajectoryId, turn: int) -> tuple[int, ...]:
    """Return the key of a turn. That of the first turn is the trajectory's."""
    return (id.step, id.prompt, id.sample, turn) if turn else (id.step, id.prompt, id.sample)


def _stream(purpose: str, *numbers: int | str) -> np.random.Philox:
    """Return the Philox stream whose key is a hash of purpose, numbers and names. Different keys give independent streams."""
    name = "/".join([purpose, *map(str, numbers)])
    return np.random.Philox(key=int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little"))
