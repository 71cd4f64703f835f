"""The toy task of tests/training, a network that can fail, and the run that nothing happens to."""

from __future__ import annotations

import pytest

from tests.faults.network import SHORT
from tests.training.conftest import MakeConfig, _one_thread, make, toy_task, toy_task_tree
from tests.training.runs import Run, run_to_the_end

__all__ = ["_one_thread", "make", "toy_task", "toy_task_tree"]


@pytest.fixture(scope="session")
def undisturbed(make: MakeConfig) -> Run:
    return run_to_the_end(make(**SHORT))
