"""Selection of the generation engine by the config."""

from __future__ import annotations

from pathlib import Path

from quartet.config import Config
from quartet.errors import ConfigError
from quartet.models.generation.engine import Engine, EngineFactory, Policy
from quartet.models.generation.torch_engine import TorchEngine
from quartet.secret_files import AUTHORITY, CERTIFICATE, KEY

FOLDER = "engine"
"""Folder below the run's directory for weights of engines that read them from disk."""


def engine_factory(config: Config, certificates: Path | None) -> EngineFactory:
    """Return the factory for ``rollout.engine``. ``certificates`` is the actor's folder of certificates. Raises ConfigError."""
    if config.rollout.engine == "triton":
        return _triton(config, certificates)
    if config.rollout.engine == "tensorrt-llm":
        return _tensorrt_llm(config)
    return torch_engine(config.rollout.max_concurrent_sequences)


def torch_engine(max_concurrent_sequences: int) -> EngineFactory:
    """Return the factory of the engine that decodes with the policy model itself."""
    return lambda policy: TorchEngine(policy.model, policy.stop_ids, max_concurrent_sequences)


def _triton(config: Config, certificates: Path | None) -> EngineFactory:
    from quartet.models.generation.triton_server import TritonEngine, TritonServer

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
    return lambda policy: TritonEngine(server, policy)


def _tensorrt_llm(config: Config) -> EngineFactory:
    from quartet.config import TensorRTLLMConfig
    from quartet.models.generation.tensorrt_llm import TensorRTLLM, TensorRTLLMEngine

    chosen = config.rollout.tensorrt_llm or TensorRTLLMConfig()
    settings = TensorRTLLM(
        config.actor.model,
        (config.run_directory / FOLDER).absolute(),
        config.rollout.max_concurrent_sequences,
        chosen.memory_fraction,
        chosen.release_memory,
        config.actor.lora.rank if config.actor.lora else 0,
    )

    def create(policy: Policy) -> Engine:
        return TensorRTLLMEngine(settings, policy)

    return create


def _read(key: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read ({error.strerror}); give a PEM file") from None
