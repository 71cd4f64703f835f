"""The kinds of engines by their names in rollout.engine."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from quartet.engines.engine import EngineKind
from quartet.errors import ConfigError

BUILT_IN = {
    "torch": "quartet.models.generation.torch_kind",
    "vllm": "quartet.engines.vllm",
    "vllm-server": "quartet.engines.vllm_server",
}
"""Modules whose ``KIND`` is the engine."""
GROUP = "quartet.engines"
"""Entry points of contrib/ and of other packages. Each names an ``EngineKind``."""


def engine_names() -> list[str]:
    """Return the names of all engines."""
    return list(dict.fromkeys([*BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))]))


def find_engine(name: str) -> EngineKind:
    """Return what an engine states about itself. Raises ConfigError if no installed package has it."""
    if (module := BUILT_IN.get(name)) is not None:
        kind: EngineKind = import_module(module).KIND
    elif entries := tuple(entry_points(group=GROUP, name=name)):
        kind = entries[0].load()
    else:
        names = ", ".join(engine_names())
        raise ConfigError(f"rollout.engine {name}: no installed package has it; expected one of {names}")
    return kind
