"""Construction of a generator from the config. Imports no torch, except for engine torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from quartet.buffer.connection import ConnectionMonitor, connect_at_start
from quartet.buffer.redis_url import required_buffer_url
from quartet.buffer.rollout_stream import RolloutStream
from quartet.config.rollout import VLLMConfig
from quartet.config.root import Config
from quartet.contract.status import Role, ServiceStatus
from quartet.engines.engine import Engine, ServedModel
from quartet.engines.served_model import read_served_model
from quartet.engines.stop_strings import token_decoder
from quartet.errors import ConfigError
from quartet.rpc.clients import WeightClient
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.security.credentials import Credentials
from quartet.services.generator.environment_access import environment_access
from quartet.services.generator.generator import Generator
from quartet.services.generator.servicer import GeneratorServicer
from quartet.weight_transfer.messages import WeightPeer
from quartet.weight_transfer.receiver import WeightMirror


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
    environment = environment_access(config, credentials)
    generator = Generator(
        engine, model, status, lambda run: RolloutStream(client, url, run, monitor.mark_lost), environment
    )

    mirror = WeightMirror(capacity=config.rollout.max_off_policy_steps + 2)
    updates = ComputeThread() if config.rollout.in_flight_updates else None
    return GeneratorServicer(generator, compute, threads, monitor.is_lost, mirror, WeightClients(credentials), updates)


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
        from quartet.models.gpu_settings import set_up_gpu
        from quartet.models.torch_threads import set_num_threads, set_up_torch

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
    devices = config.services.generator.devices
    if config.rollout.engine == "torch":
        from quartet.services.generator.torch_factory import create_torch_engine

        if len(devices) > 1:
            raise ConfigError(f"services.generator.devices {list(devices)}: engine torch uses one device per generator")
        return create_torch_engine(config, f"cuda:{devices[0]}" if devices else "cpu")
    model = _served_model(config)
    device = f"cuda:{','.join(map(str, devices))}" if devices else "default"
    status = ServiceStatus(
        Role.GENERATOR,
        model=config.actor.model,
        device=device,
        dtype=model.dtype,
        vocabulary_size=model.vocabulary_size,
        max_sequence_tokens=model.max_sequence_tokens,
    )
    return _external_engine(config, model), model, status


def _served_model(config: Config) -> ServedModel:
    """Return the description of the policy, with its tokenizer if there are stop strings. Raises ConfigError, ModelError."""
    model = read_served_model(config.actor.model, config.actor.dtype)
    if not config.rollout.stop_strings:
        return model
    try:
        from quartet.models.weights.tokenizer import load_tokenizer
    except ImportError as error:
        raise ConfigError(
            f"rollout.stop_strings: a generator needs the tokenizer for them: {error}; install transformers in its environment"
        ) from None
    return replace(model, decode=token_decoder(load_tokenizer(config.actor.model)))


def _external_engine(config: Config, model: ServedModel) -> Engine:
    rollout = config.rollout
    if rollout.engine == "vllm":
        from quartet.engines.vllm import VLLMEngine, VLLMSettings

        vllm = rollout.vllm or VLLMConfig()
        settings = VLLMSettings(
            max_concurrent_sequences=rollout.max_concurrent_sequences,
            tensor_parallel_size=vllm.tensor_parallel_size,
            memory_fraction=vllm.memory_fraction,
            release_memory=vllm.release_memory,
            prefix_caching=vllm.prefix_caching,
            enforce_eager=vllm.enforce_eager,
            stall_seconds=config.timeouts.score_seconds,
            engine_arguments=vllm.engine_arguments,
        )
        return VLLMEngine(settings, model)
    if rollout.engine == "tensorrt-llm":
        from quartet.engines.tensorrt_llm import create_tensorrt_llm

        return create_tensorrt_llm(rollout, model)
    if rollout.engine == "vllm-server" and rollout.vllm_server is not None:
        from quartet.engines.vllm_server import create_vllm_server

        return create_vllm_server(rollout.vllm_server, model, rollout.max_concurrent_sequences)
    if rollout.engine == "sglang-server" and rollout.sglang_server is not None:
        from quartet.engines.sglang_server import create_sglang_server

        return create_sglang_server(rollout.sglang_server, model, rollout.max_concurrent_sequences)
    raise ConfigError(f"rollout.engine {rollout.engine}: does not run in a generator; set engine torch")
