"""The controller of the entropy coefficient."""

from __future__ import annotations

import json
import math

import pytest

from quartet.errors import ComputationFailed, InvalidRequest
from quartet.ppo.entropy import AdaptiveEntropyController


def controller(coefficient: float = 0.0) -> AdaptiveEntropyController:
    return AdaptiveEntropyController(coefficient, 0.5, 0.25, 0.0, 0.5)


def test_a_worked_example() -> None:
    # Target 0.5, step 0.25, bounds 0 and 0.5. The coefficient: 0, 0.25, 0.5, 0.5 (bound), 0.25, 0, 0 (bound), 0.25.
    # It applies only after an entropy of at most 0.5.
    steered, applied = controller(), []
    for entropy in (0.5, 0.4, 0.1, 0.6, 0.9, 0.7, 0.2):
        applied.append(steered.value)
        steered.update(entropy)
    assert [*applied, steered.value] == [0.0, 0.25, 0.5, 0.5, 0.0, 0.0, 0.0, 0.25]


def test_the_initial_coefficient_applies_only_once_an_entropy_is_known() -> None:
    steered = controller(0.25)
    assert steered.value == 0.0
    steered.update(0.5)
    assert steered.value == 0.5


@pytest.mark.parametrize("entropies", [[], [0.1], [0.1, 0.6], [0.3, 0.3, 0.9, 0.2]])
def test_a_restored_controller_continues_identically(entropies: list[float]) -> None:
    original, restored = controller(0.1), controller()
    for entropy in entropies:
        original.update(entropy)
    restored.load(json.loads(json.dumps(original.state())))
    for entropy in (0.45, 0.55, 0.1, 0.2):
        assert restored.value == original.value
        original.update(entropy)
        restored.update(entropy)
    assert restored.state() == original.state()


@pytest.mark.parametrize("entropy", [math.nan, math.inf])
def test_an_infinite_entropy_is_an_error(entropy: float) -> None:
    with pytest.raises(ComputationFailed, match="expected a finite number"):
        controller().update(entropy)


@pytest.mark.parametrize(
    "state",
    [{}, {"coefficient": -1.0, "entropy": None}, {"coefficient": math.nan}, {"coefficient": 0.1, "entropy": math.inf}],
)
def test_a_malformed_state_is_refused(state: dict[str, float | None]) -> None:
    with pytest.raises(InvalidRequest, match="entropy controller state"):
        controller().load(state)


def test_a_state_with_coefficient_0_is_restored() -> None:
    restored = controller(0.1)
    restored.load({"coefficient": 0.0, "entropy": None})
    assert restored.value == 0.0
