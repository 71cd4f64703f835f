"""A Triton Inference Server as a generation engine. Imports its client when an engine is created."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from quartet.engines.engine import Engine, EngineKind, EngineProperties, Guarantees, Policy
from quartet.errors import ConfigError
from quartet.system.secret_files import AUTHORITY, CERTIFICATE, KEY

if TYPE_CHECKING:
    from quartet.config.root import Config

TritonDialect = Literal["tokens", "llmapi", "vllm"]
"""Tensors of a served model: token ids (TensorRT-LLM's backend up to 1.2), its ``llmapi`` model, or vLLM's backend."""
FOLDER = "engine"
"""Folder below the run's directory for adapters, for servers that read them from disk."""


def triton_properties(
    dialect: TritonDialect | None, weights: Literal["lora", "static"], reports_log_probs: bool
) -> EngineProperties:
    """Return the guarantees of a served model, or of any with dialect None.

    ``reports_log_probs`` is True only if the model reports them at every temperature.
    The token-id backend and vLLM read the seed of a request. The sampler of ``llmapi`` has one random generator for all requests.
    """
    return EngineProperties(
        name=f"triton ({dialect}, {weights})" if dialect else "triton",
        seeded=dialect in ("tokens", "vllm"),
        batch_invariant=False,
        log_probs="whole" if reports_log_probs else "none",
        weights="adapter" if weights == "lora" else "static",
        digest="none",
    )


def share(config: Config, policy: Policy, certificates: Path | None) -> Engine:
    """Return the engine that calls the server of ``rollout.triton``. Raises ConfigError, ModelError."""
    from quartet.contrib.triton.engine import TritonEngine, TritonServer

    triton = config.rollout.triton
    assert triton is not None
    authority = certificate = key = None
    if triton.encrypted and certificates is not None:
        authority, certificate, key = (
            _read("security.certificates", certificates / name) for name in (AUTHORITY, CERTIFICATE, KEY)
        )
    if triton.encrypted and triton.certificate_authority_file is not None:
        authority = _read("rollout.triton.certificate_authority_file", triton.certificate_authority_file)
    server = TritonServer(
        triton.address,
        triton.model,
        triton.timeout_seconds,
        triton.weights,
        config.rollout.max_concurrent_sequences,
        (config.run_directory / FOLDER).absolute(),
        triton.encrypted,
        authority,
        certificate,
        key,
    )
    return TritonEngine(server, policy)


def _read(key: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read ({error.strerror}); give a PEM file") from None


def _guarantees(dialect: TritonDialect, reports_log_probs: bool, depends_on: str = "") -> Guarantees:
    return Guarantees(
        triton_properties(dialect, "lora", reports_log_probs),
        "a Triton server, called by the actor",
        "real server on a CPU, with a model in its Python backend",
        f"{depends_on}rollout.triton.weights static: static weights.",
    )


KIND = EngineKind(
    "triton",
    "tritonclient",
    (
        _guarantees("tokens", True, "No log-probs if the model has no output_log_probs. "),
        _guarantees("llmapi", False),
        _guarantees("vllm", False, "Whole log-probs at temperature 1. "),
    ),
    share=share,
    seed_remedy="serve a model that reads seeds, or set rollout.engine: torch",
)
