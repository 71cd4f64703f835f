"""The workers of ``quartet.preflight`` in the process of a test, which has imported torch and transformers already."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO

import pytest

from quartet.preflight.prompt_worker import WITH_TORCH


@contextmanager
def _worker(
    module: str, request: str, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[IO[bytes], None]]:
    options = [WITH_TORCH] if module.endswith("prompt_worker") else []
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as results:
        importlib.import_module(module)._main(request, str(writer), *options)
        with suppress(OSError):  # One of the two workers closes it.
            os.close(writer)
        yield results, None


def run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check models and prompts without a process each, which imports torch or transformers first."""
    for name in ("contents", "prompts"):
        monkeypatch.setattr(f"quartet.preflight.{name}.checking_process", _worker)
