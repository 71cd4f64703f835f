"""Selection of the generation engine by the config."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quartet.config.root import Config
from quartet.contract.trajectory import Trajectory
from quartet.engines.stop_strings import token_decoder
from quartet.errors import ConfigError, FailedPrecondition
from quartet.models.generation.engine import EngineFactory
from quartet.models.generation.merged_torch import shared_torch_engine
from quartet.system.secret_files import AUTHORITY, CERTIFICATE, KEY

FOLDER = "engine"
"""Folder below the run's directory for weights of engines that read them from disk."""


def engine_factory(config: Config, certificates: Path | None) -> EngineFactory:
    """Return the factory for ``rollout.engine``. ``certificates`` is the actor's folder of certificates. Raises ConfigError."""
    if config.rollout.engine == "triton":
        return _triton(config, certificates)
    if config.rollout.engine != "torch":
        raise ConfigError(
            f"rollout.engine {config.rollout.engine}: needs a generator process, because it cannot share a Python environment "
            "with the actor; start one with this engine, or set rollout.engine torch"
        )
    return torch_engine(config.rollout.max_concurrent_sequences, config.rollout.merge_adapter)


class NoEngine:
    """Stands for the engine of an actor that does not generate with its own weights, because they are sharded."""

    def generate(self, *_: Any) -> Iterator[Trajectory]:
        """Raise FailedPrecondition."""
        raise FailedPrecondition("generate: the weights of this actor are sharded; a generator needs its own copy")

    def release(self, everything: bool = False) -> None:
        """Do nothing."""

    def weights_changed(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def torch_engine(max_concurrent_sequences: int, merge_adapter: bool = False) -> EngineFactory:
    """Return the factory of the engine that decodes with the policy model itself, or with its adapter merged."""
    return lambda policy: shared_torch_engine(
        policy.model,
        policy.adapter,
        policy.stop_ids,
        max_concurrent_sequences,
        merge_adapter,
        token_decoder(policy.tokenizer),
    )


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


def _read(key: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read ({error.strerror}); give a PEM file") from None
