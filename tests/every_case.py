"""A decorator that runs many fast cases as one test and reports every failed case."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def every_case(names: str | tuple[str, ...], cases: Iterable[Any], ids: Any = None) -> Callable[[Any], Any]:
    """Run a test once for each case, like ``pytest.mark.parametrize``, but as one test.

    All cases share the fixtures, which are set up once. ``ids`` is ignored, because the report shows the values of each
    failed case.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    values = [case.values if hasattr(case, "values") and hasattr(case, "marks") else case for case in cases]
    rows = [dict(zip(keys, value if len(keys) > 1 else (value,), strict=True)) for value in values]
    assert rows, "there must be at least one case"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run_every_case(**fixtures: Any) -> None:
            failures: list[BaseException] = []
            for row in rows:
                try:
                    test(**fixtures, **row)
                except (Exception, BaseExceptionGroup, pytest.fail.Exception) as failure:
                    failure.add_note(f"case: {row}")
                    failures.append(failure)
            if failures:
                raise BaseExceptionGroup(f"{len(failures)} of {len(rows)} cases failed", failures)

        signature = inspect.signature(test)
        fixtures = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        run_every_case.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        del run_every_case.__wrapped__
        return run_every_case

    return decorate
