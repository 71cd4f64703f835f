"""Construction of a generator from the config. Imports no torch, except for engine torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from quartet.buffer.connection import ConnectionMonitor, connect_at_start
from quartet.buffer.redis_url import required_buffer_url
from quartet.buffer.rollout_stream import RolloutStream
from quartet.buffer.traffic import TrafficStore
from quartet.buffer.turn_records import TurnRecordStore
from quartet.config.root import Config
from quartet.contract.status import Role, ServiceStatus
from quartet.engines.engine import Engine, ServedModel, TokenDecoder, find_engine
from quartet.engines.stop_strings import token_decoder
from quartet.errors import ConfigError
from quartet.rpc.clients import WeightClient
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.environment_client import EnvironmentClient
from quartet.rpc.security.credentials import Credentials
from quartet.services.generator.episodes import EnvironmentAccess
from quartet.services.generator.generator import Generator
from quartet.services.generator.servicer import GeneratorServicer
from quartet.services.generator.sessions.factory import agent_access, traffic_sessions
from quartet.weight_transfer.cuda_ipc import cuda_runtime
from quartet.weight_transfer.messages import WeightPeer
from quartet.weight_transfer.process_group import group_settings
from quartet.weight_transfer.receiver import WeightMirror

OPEN_PER_DECODED = 2
"""Episodes that are open for each one that the engine decodes, so that its batch stays full while others wait."""


def build_generator(
    config: Config, compute: ComputeThread, threads: int, credentials: Credentials
) -> GeneratorServicer:
    """Create the engine of ``rollout.engine`` and return the servicer around it.

    Raises ModelError, ConfigError or ServiceUnavailable.
    """
    url = required_buffer_url(config, credentials.folder)
    client = connect_at_start(url, config.timeouts.load_seconds)
    monitor = ConnectionMonitor(client, url)
    engine, model, status = create_engine(config)
    if config.rollout.engine == "torch":
        from quartet.models.matmul_peak import matmul_peak

        status = replace(status, peak_flops=matmul_peak(status.device, status.dtype, threads))

    def records(run: str) -> TurnRecordStore:
        return TurnRecordStore(client, url, run, monitor.mark_lost)

    environment = (
        environment_access(config, credentials, records)
        or agent_access(config, credentials, model, records)
        or traffic_sessions(config, credentials, model, TrafficStore(client, url, config.run.name, monitor.mark_lost))
    )
    generator = Generator(
        lambda: engine, model, status, lambda run: RolloutStream(client, url, run, monitor.mark_lost), environment
    )

    rollout = config.rollout
    # Engines but torch number their devices from 0, see ``set_up_engine``.
    device = next(iter(config.services.generator.devices), None)
    mirror = WeightMirror(
        capacity=rollout.max_off_policy_steps + 2,
        shares=rollout.share_weights,
        directory=rollout.share_directory,
        group=group_settings(config, device if device is None or rollout.engine == "torch" else 0),
        cuda=cuda_runtime(config, device) if rollout.engine == "torch" else None,
    )
    updates = ComputeThread() if rollout.in_flight_updates else None
    return GeneratorServicer(generator, compute, threads, monitor.is_lost, mirror, WeightClients(credentials), updates)


def environment_access(
    config: Config, credentials: Credentials, records: Callable[[str], TurnRecordStore]
) -> EnvironmentAccess | None:
    """Return the access to the environment service at services.environment.address; None for a run without it.

    ``records`` returns the turn records of a run by its name.
    """
    address = config.services.environment.address
    if not config.has_environment_service or config.has_agents or address is None:
        return None
    client = EnvironmentClient(
        address, config.environment.timeout_seconds, config.timeouts, config.recovery, credentials
    )
    decoded = config.rollout.max_concurrent_sequences
    max_open = min(OPEN_PER_DECODED * decoded, config.environment.max_sessions)
    attempts = config.recovery.max_attempts
    return EnvironmentAccess(client, max_open, attempts, lambda batch: records(batch.run).records_of(batch))


class WeightClients:
    """Clients of the sources of the latest update. Clients of other sources are closed. Not thread-safe."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._clients: dict[tuple[Role, str], WeightClient] = {}

    def __call__(self, sources: Sequence[tuple[Role, str]]) -> list[WeightPeer]:
        """Return a client of each source, with the present connection if there is one."""
        wanted = dict.fromkeys(sources)
        for source in [source for source in self._clients if source not in wanted]:
            self._clients.pop(source).close()
        for source in wanted:
            if source not in self._clients:
                self._clients[source] = WeightClient(*source, self._credentials)
        return [self._clients[source] for source in sources]


def set_up_engine(config: Config, threads: int) -> Callable[[], object]:
    """Prepare this process for its engine. Return a function that prepares the thread which computes."""
    if config.rollout.engine == "torch":
        from quartet.models.torch_settings import set_num_threads, set_up_gpu, set_up_torch

        set_up_torch(threads)
        if config.services.generator.devices:
            set_up_gpu()
        return lambda: set_num_threads(threads)
    # The engine's processes read both when they start.
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if devices := config.services.generator.devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    return lambda: None


def create_engine(config: Config) -> tuple[Engine, ServedModel, ServiceStatus]:
    """Create the engine of ``rollout.engine``. Return it with the model that it serves, and its constant status."""
    name, devices = config.rollout.engine, config.services.generator.devices
    create = find_engine(name).create
    if create is None:
        raise ConfigError(f"rollout.engine {name}: does not run in a generator; set engine torch")
    engine, model = create(config)
    if config.rollout.stop_strings and model.decode is None:
        model = replace(model, decode=_tokenizer_of(config))
    status = ServiceStatus(
        Role.GENERATOR,
        model=config.actor.model,
        device=f"cuda:{','.join(map(str, devices))}" if devices else "cpu" if name == "torch" else "default",
        dtype=model.dtype,
        tokenizer_fingerprint=model.tokenizer_fingerprint,
        vocabulary_size=model.vocabulary_size,
        max_sequence_tokens=model.max_sequence_tokens,
    )
    return engine, model, status


def _tokenizer_of(config: Config) -> TokenDecoder:
    """Return the decoder of the policy's tokens, for stop strings. Raises ConfigError, ModelError."""
    try:
        from quartet.models.weights.tokenizer import load_tokenizer
    except ImportError as error:
        raise ConfigError(
            f"rollout.stop_strings: a generator needs the tokenizer for them: {error}; install transformers in its environment"
        ) from None
    return token_decoder(load_tokenizer(config.actor.model))
