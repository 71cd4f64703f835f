"""The package vllm: its import, the arguments that a user may set, and the models that it accepts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quartet.errors import ConfigError

NAME = "vLLM"
"""Name of the engine in messages."""
BACKEND = "quartet"
"""Name of the backend of vLLM's weight transfer that reads shared memory, see ``vllm_transfer``."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks that vLLM allocates memory for."""
_OWN_ARGUMENTS = frozenset(
    {
        "model", "tokenizer", "hf_config_path", "skip_tokenizer_init", "trust_remote_code", "load_format", "dtype",
        "max_model_len", "tensor_parallel_size", "gpu_memory_utilization", "max_num_seqs", "enforce_eager",
        "enable_prefix_caching", "logprobs_mode", "generation_config", "enable_lora", "max_loras", "max_lora_rank",
        "lora_target_modules", "enable_sleep_mode", "worker_cls", "worker_extension_cls", "quantization",
        "quantization_config", "speculative_config", "pipeline_parallel_size", "data_parallel_size",
        "logits_processors", "scheduler_cls", "runner", "convert", "weight_transfer_config", "io_processor_plugin",
        "reasoning_parser_plugin", "model_class_overrides", "hf_token", "offload_backend", "cpu_offload_gb",
        "cpu_offload_params", "max_logprobs", "override_generation_config", "enable_return_routed_experts", "aux_output_config",
    }
)  # fmt: skip
"""Arguments that Quartet sets, and those that would run other code, load other weights or change their values."""


@dataclass(frozen=True, slots=True)
class Library:
    """Classes of the package."""

    AsyncLLM: Any
    AsyncEngineArgs: Any
    SamplingParams: Any
    WeightTransferUpdateRequest: Any


def import_vllm() -> Library:
    """Import vLLM with settings for its processes. Raises ConfigError without a vLLM that works."""
    # vLLM's processes must not be forked from a process with threads of gRPC. No reports of usage leave the machine.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # By default each engine on a CPU binds its threads to all cores but one, and training uses the same cores.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    try:
        import vllm
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
        from vllm.v1.engine.async_llm import AsyncLLM
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"the engine vllm: {error}; run the generator in an environment with vLLM 0.32 or newer, for example the image of "
            "docker/Dockerfile.generator"
        ) from error
    return Library(AsyncLLM, vllm.AsyncEngineArgs, vllm.SamplingParams, WeightTransferUpdateRequest)


def on_cpu() -> bool:
    """Return whether vLLM computes on the CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def check_speculation(temperature: float) -> None:
    """Raise ConfigError for a sampled response with speculative decoding on a CPU.

    There, vLLM's rejection sampler divides the logits at drafted tokens by memory that it has not written, instead of the
    temperature: tests/detached_engines/test_vllm.py shows it for vLLM 0.32.
    """
    if temperature and on_cpu():
        raise ConfigError(
            f"rollout.vllm.speculative: at temperature {temperature:g}, vLLM on a CPU draws drafted tokens from another "
            "distribution than the policy's; remove it, or generate on a GPU"
        )


def check_head_size(size: int, model: str) -> None:
    """Raise ConfigError for a head size that CPU attention refuses. vLLM only finds out in the middle of a generation."""
    if not on_cpu():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if not CPUAttentionBackend.supports_head_size(size):
        raise ConfigError(
            f"{NAME}: the model {model} has heads of size {size}; on a CPU vLLM takes "
            f"{', '.join(map(str, CPUAttentionBackend.get_supported_head_sizes()))}; use a GPU or engine torch"
        )


def check_arguments(arguments: Mapping[str, Any], engine_args: Any) -> None:
    """Raise ConfigError for an argument that vLLM does not have, or that a user may not set."""
    known = {item.name for item in dataclasses.fields(engine_args)}
    for name in arguments:
        if name in _OWN_ARGUMENTS:
            raise ConfigError(
                f"rollout.vllm.engine_arguments.{name}: Quartet sets it, or it loads other code or weights; remove it"
            )
        if name not in known:
            raise ConfigError(
                f"rollout.vllm.engine_arguments.{name}: not an argument of the EngineArgs of this {NAME}; check its name"
            )


def lora_rank(rank: int) -> int:
    """Return the rank that vLLM allocates memory for. Raises ConfigError if the adapter is too large for it."""
    for allowed in LORA_RANKS:
        if rank <= allowed:
            return allowed
    raise ConfigError(f"{NAME}: an adapter of rank {rank}; vLLM takes up to {LORA_RANKS[-1]}")
