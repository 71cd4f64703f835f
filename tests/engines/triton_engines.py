"""Triton engines for the tests' servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quartet.contrib.triton.engine import TritonEngine
from quartet.contrib.triton.engine import TritonServer as Target
from quartet.engines.engine import Policy
from tests.engines.triton_server import TritonServer


def engine_of(server: TritonServer, model: str, policy: Policy, folder: Path, **changes: Any) -> TritonEngine:
    """Return an engine for one of the server's models."""
    server.load(model)
    settings: dict[str, Any] = {"timeout": 20.0, "weights": "lora", "max_in_flight": 32, **changes}
    return TritonEngine(Target(f"127.0.0.1:{server.port}", model, adapters=folder / "engine", **settings), policy)
