"""Random streams depend only on their keys."""

from __future__ import annotations

import numpy as np

from quartet.contract.random_streams import permutation, uniforms
from quartet.contract.trajectory import TrajectoryId


def test_a_stream_is_the_same_for_every_run_name_and_length() -> None:
    one, other = TrajectoryId("a", 3, 5, 1), TrajectoryId("b", 3, 5, 1)
    assert np.array_equal(uniforms(7, one, 8), uniforms(7, other, 20)[:8])


def test_every_part_of_the_key_changes_the_stream() -> None:
    keys = [(7, 3, 5, 1), (8, 3, 5, 1), (7, 4, 5, 1), (7, 3, 6, 1), (7, 3, 5, 2), (7, 35, 1, 0), (7, 3, 51, 0)]
    streams = {tuple(uniforms(seed, TrajectoryId("r", *rest), 4)) for seed, *rest in keys}
    assert len(streams) == len(keys)


def test_the_numbers_never_change_between_versions() -> None:
    # Recorded once. If these numbers changed, resumed runs would differ.
    result = uniforms(0, TrajectoryId("r", 0, 0, 0), 3)
    assert result.dtype == np.float64
    assert (result * 2**32).astype(np.uint64).tolist() == [1102616201, 1021577881, 1760184160]
    assert permutation(0, 0, 0, 6).tolist() == [2, 5, 4, 3, 0, 1]


def test_numbers_are_uniform_multiples_of_two_to_the_minus_32() -> None:
    numbers = np.concatenate([uniforms(1, TrajectoryId("r", 0, index, 0), 100) for index in range(200)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert np.array_equal(numbers * 2**32, np.floor(numbers * 2**32))
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001


def test_the_permutation_depends_on_seed_step_and_epoch() -> None:
    orders = [permutation(*key, 50) for key in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]]
    assert all(sorted(order.tolist()) == list(range(50)) for order in orders)
    assert len({tuple(order.tolist()) for order in orders}) == 4
    assert np.array_equal(orders[0], permutation(0, 0, 0, 50))
