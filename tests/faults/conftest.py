"""Fixtures of the fault tests: the toy task of tests/training, and a run without faults."""

from __future__ import annotations

import pytest

from tests.faults.network import SETTINGS
from tests.training.conftest import MakeConfig, _measured_once, _one_thread, make, toy_task, toy_task_tree
from tests.training.runs import Run, run_to_completion

__all__ = ["_measured_once", "_one_thread", "make", "toy_task", "toy_task_tree"]


@pytest.fixture(scope="session")
def undisturbed(make: MakeConfig) -> Run:
    return run_to_completion(make(**SETTINGS))
