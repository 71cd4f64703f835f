"""The kinds of engines by their names in rollout.engine."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from quartet.config.rollout import ENGINE_ENTRY_POINTS, ENGINES, check_engine_name
from quartet.engines.engine import EngineKind
from quartet.errors import ConfigError


def find_engine(name: str) -> EngineKind:
    """Return what an engine states about itself. Raises ConfigError if no installed package has it."""
    try:
        check_engine_name(name)
    except ValueError as error:
        raise ConfigError(f"rollout.engine {name}: {error}") from None
    if (module := ENGINES.get(name)) is not None:
        kind: EngineKind = import_module(module).KIND
    else:
        (entry, *_) = entry_points(group=ENGINE_ENTRY_POINTS, name=name)
        kind = entry.load()
    return kind
