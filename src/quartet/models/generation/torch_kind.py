"""Generation with torch in this process. Imports torch when an engine is created."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quartet.engines.engine import Engine, EngineKind, Guarantees, Policy, ServedModel
from quartet.engines.stop_strings import token_decoder
from quartet.errors import ConfigError
from quartet.models.generation.torch_properties import DETACHED, SHARED

if TYPE_CHECKING:
    from quartet.config.root import Config
    from quartet.models.generation.torch_engine import DetachedTorchEngine


def create(config: Config) -> tuple[Engine, ServedModel]:
    """Load the initial policy for a generator. Raises ModelError, ConfigError."""
    devices = config.services.generator.devices
    if len(devices) > 1:
        raise ConfigError(f"services.generator.devices {list(devices)}: engine torch uses one device per generator")
    return load_detached(config, f"cuda:{devices[0]}" if devices else "cpu")


def load_detached(config: Config, device: str) -> tuple[DetachedTorchEngine, ServedModel]:
    """Load the initial policy on ``device``, and return the engine around it. Raises ModelError, ConfigError."""
    from quartet.models.generation.torch_engine import DetachedTorchEngine, served_model
    from quartet.models.weights.loading import load_causal_lm, stop_token_ids
    from quartet.models.weights.lora import add_adapter
    from quartet.models.weights.tokenizer import load_tokenizer, tokenizer_fingerprint

    actor, rollout = config.actor, config.rollout
    model = load_causal_lm(actor.model, actor.dtype, device)
    adapter = add_adapter(model, actor.model, actor.lora, config.run.seed) if actor.lora else None
    tokenizer = load_tokenizer(actor.model)
    served = served_model(model, stop_token_ids(model, tokenizer), token_decoder(tokenizer))
    engine = DetachedTorchEngine(
        model,
        adapter,
        served.stop_ids,
        rollout.max_concurrent_sequences,
        rollout.merge_adapter,
        served.decode,
        rollout.router_replay,
    )
    return engine, replace(served, tokenizer_fingerprint=tokenizer_fingerprint(tokenizer))


def share(config: Config, policy: Policy, certificates: Path | None) -> Engine:
    """Return the engine that decodes with the policy model itself, or with its adapter merged. Raises ModelError."""
    from quartet.models.generation.torch_engine import TorchEngine

    rollout, served = config.rollout, policy.served
    merged: Any = policy.adapter if rollout.merge_adapter else None
    return TorchEngine(
        policy.model,
        served.stop_ids,
        rollout.max_concurrent_sequences,
        decode=served.decode,
        merged=merged,
        routed_experts=rollout.router_replay,
    )


_TRIAL = "The trial needs a CPU and a dense model."
_INVARIANT = "if its trial at the start passes"
KIND = EngineKind(
    "torch",
    "torch",
    (
        Guarantees(SHARED, "the actor's process", "CPU", _TRIAL, _INVARIANT),
        Guarantees(
            DETACHED,
            "a generator in Quartet's environment, or the actor's process with rollout.max_off_policy_steps",
            "CPU",
            _TRIAL,
            _INVARIANT,
        ),
    ),
    create,
    share,
)
