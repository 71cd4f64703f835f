"""The reward of the exercises."""

from __future__ import annotations

from typing import Any

from quartet.verifiers.code import run_tests_batched


def all_tests(prompts: list[str], responses: list[str], fields: list[dict[str, Any]]) -> list[float]:
    """Return 1 for each response that completes its function so that all tests pass, otherwise 0."""
    return run_tests_batched(prompts, responses, fields, prefix_field="start")
