"""Construction of the torch engine of a generator process."""

from __future__ import annotations

from quartet.config.root import Config
from quartet.contract.status import Role, ServiceStatus
from quartet.engines.engine import ServedModel
from quartet.engines.stop_strings import token_decoder
from quartet.models.generation.detached_torch import DetachedTorchEngine
from quartet.models.generation.validation import served_model
from quartet.models.weights.loading import check_cacheable_config, load_causal_lm, stop_token_ids
from quartet.models.weights.lora import add_adapter
from quartet.models.weights.tokenizer import load_tokenizer, tokenizer_fingerprint


def create_torch_engine(config: Config, device: str) -> tuple[DetachedTorchEngine, ServedModel, ServiceStatus]:
    """Load the initial policy on ``device``, and return the engine around it. Raises ModelError, ConfigError."""
    actor = config.actor
    check_cacheable_config(actor.model)
    model = load_causal_lm(actor.model, actor.dtype, device)
    lora = actor.lora
    adapter = (
        add_adapter(model, actor.model, lora.rank, lora.alpha, lora.target_modules, config.run.seed) if lora else None
    )
    tokenizer = load_tokenizer(actor.model)
    served = served_model(model, stop_token_ids(model, tokenizer), token_decoder(tokenizer))
    rollout = config.rollout
    engine = DetachedTorchEngine(
        model, adapter, served.stop_ids, rollout.max_concurrent_sequences, rollout.merge_adapter, served.decode
    )
    status = ServiceStatus(
        Role.GENERATOR,
        model=actor.model,
        device=device,
        dtype=actor.dtype,
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        vocabulary_size=served.vocabulary_size,
        max_sequence_tokens=served.max_sequence_tokens,
    )
    return engine, served, status
