"""What the engines on torch guarantee. Imports no torch, so that it can be listed without it."""

from __future__ import annotations

from dataclasses import replace

from quartet.engines.engine import EngineProperties

SHARED = EngineProperties(
    "torch", seeded=True, batch_invariant=False, log_probs="whole", weights="shared", digest="none"
)
"""Guarantees of an engine that decodes with the trained model itself. A trial decides whether it is batch-invariant."""
DETACHED = replace(SHARED, weights="tensors", digest="read back", in_flight_updates=True)
"""Guarantees of an engine with its own copy of the weights."""
