"""Resource presets of the chart: CPU and memory by role and size of the model, from the planner's arithmetic.

Written to files/resources.json by `make generate`. A preset has milli-CPUs of each rank and MiB of a container for the parts of
``quartet.planner.helm_values.HostMemory``, for pods with and without GPUs. Only the template knows the roles, ranks and nodes
of a pod, which are values, so it adds the parts up like ``HostMemory.pod_bytes``.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any

from quartet.config.loading import config_of
from quartet.config.root import Config
from quartet.contract.status import TRAINED_ROLES, Role
from quartet.model_files.shape import ModelShape, model_shape
from quartet.planner.device_memory import (
    actor_generation_memory,
    add_parts,
    frozen_memory,
    generator_memory,
    trained_memory,
)
from quartet.planner.gpus import CPU
from quartet.planner.helm_values import (
    CPU_PROCESS_BYTES,
    GPU_PROCESS_BYTES,
    HOST_FRACTION,
    HostMemory,
    generator_host_memory,
    host_memory,
)
from quartet.planner.roofline import Parallel
from quartet.planner.workload import RoleWork, Workload, role_work

MIB = 2**20
QWEN2 = {"model_type": "qwen2", "vocab_size": 151_936, "tie_word_embeddings": True}
LARGE_QWEN2 = {"model_type": "qwen2", "vocab_size": 152_064, "tie_word_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "qwen2",
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "0.5b": QWEN2
    | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    | {"num_attention_heads": 14, "num_key_value_heads": 2},
    "1.5b": QWEN2
    | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
    | {"num_attention_heads": 12, "num_key_value_heads": 2},
    "3b": QWEN2
    | {"hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36}
    | {"num_attention_heads": 16, "num_key_value_heads": 2},
    "7b": LARGE_QWEN2
    | {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28}
    | {"num_attention_heads": 28, "num_key_value_heads": 4},
    "14b": LARGE_QWEN2
    | {"hidden_size": 5120, "intermediate_size": 13_824, "num_hidden_layers": 48}
    | {"num_attention_heads": 40, "num_key_value_heads": 8},
    "32b": LARGE_QWEN2
    | {"hidden_size": 5120, "intermediate_size": 27_648, "num_hidden_layers": 64}
    | {"num_attention_heads": 40, "num_key_value_heads": 8},
    "70b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}
"""Models of each size, as in their config.json: those of Qwen2.5 and, for 70b, Llama 3.1."""
CPU_TOKENS = {"tiny": 1024}
"""Tokens of a micro-batch without a GPU. The services choose smaller ones if the memory does not suffice."""
DEFAULT_CPU_TOKENS = 2048
GPU_MILLICPUS = (2000, 8000)
"""Request and limit of each rank with a GPU."""
CPU_MILLICPUS = {"tiny": (250, 2000)}
DEFAULT_CPU_MILLICPUS = (4000, 16_000)
"""The same without a GPU."""
ROLES = (Role.ACTOR, Role.CRITIC, Role.REWARD, Role.REFERENCE, Role.GENERATOR)


def presets() -> str:
    """Return the presets as JSON, one line each."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(_preset(name))}" for name in MODELS)
    return "{\n" + lines + "\n}\n"


def _preset(name: str) -> dict[str, Any]:
    shape = model_shape(MODELS[name], f"preset {name}")
    gpu, cpu = _config("bfloat16"), _config("float32")
    tokens = CPU_TOKENS.get(name, DEFAULT_CPU_TOKENS)
    return {
        "gpu": _entry(GPU_MILLICPUS, GPU_PROCESS_BYTES, {role: _on_gpu(gpu, role, shape) for role in ROLES}),
        "cpu": _entry(
            CPU_MILLICPUS.get(name, DEFAULT_CPU_MILLICPUS),
            CPU_PROCESS_BYTES,
            {role: _on_cpu(cpu, role, shape, tokens) for role in ROLES},
        ),
    }


def _entry(millicpus: tuple[int, int], process: float, roles: dict[Role, HostMemory]) -> dict[str, Any]:
    """Return the values of one kind of pod. ``process``: of a role without a model, the reward function."""
    return {
        "millicpus": dict(zip(("requests", "limits"), millicpus, strict=True)),
        "roles": {name: _parts(memory) for name, memory in {**roles, "function": HostMemory(process, 0.0)}.items()},
    }


def _parts(memory: HostMemory) -> dict[str, int]:
    return {name: math.ceil(size / HOST_FRACTION / MIB) for name, size in asdict(memory).items()}


def _config(dtype: str) -> Config:
    return config_of(
        {
            "data": {"prompts": "prompts.jsonl", "max_prompt_tokens": 256},
            "rollout": {"max_response_tokens": 256, "max_concurrent_sequences": 32},
            "actor": {"model": "policy", "dtype": dtype},
            "critic": {"dtype": dtype},
            "reward": {"model": "reward", "dtype": dtype},
        }
    )


def _work(config: Config, role: Role, shape: ModelShape) -> RoleWork:
    role = Role.ACTOR if role is Role.GENERATOR else role
    return role_work(config, f"{role}.model", role, shape)


def _on_gpu(config: Config, role: Role, shape: ModelShape) -> HostMemory:
    measure = generator_host_memory if role is Role.GENERATOR else host_memory
    return measure(_work(config, role, shape), on_gpu=True)


def _on_cpu(config: Config, role: Role, shape: ModelShape, tokens: int) -> HostMemory:
    work, parallel = _work(config, role, shape), Parallel()
    load = _workload(config, work)
    if role is Role.GENERATOR:
        parts = generator_memory(work, load, CPU, 1, load.concurrent)
        return generator_host_memory(work, on_gpu=False, device_bytes=sum(parts.values()))
    if role in TRAINED_ROLES:
        parts = trained_memory(work, load, CPU, parallel, tokens, checkpointing=False, offload=False)
    else:
        parts = frozen_memory(replace(work, micro_batch_tokens=tokens), load, CPU, parallel)
    if role is Role.ACTOR:
        parts = add_parts(parts, actor_generation_memory(work, load, CPU, parallel, load.concurrent))
    return host_memory(work, on_gpu=False, device_bytes=sum(parts.values()))


def _workload(config: Config, work: RoleWork) -> Workload:
    rollout, algorithm = config.rollout, config.algorithm
    return Workload(
        roles=(work,),
        prompts=rollout.prompts_per_step,
        samples=rollout.samples_per_prompt,
        max_prompt=config.data.max_prompt_tokens,
        max_response=rollout.max_response_tokens,
        mean_prompt=config.data.max_prompt_tokens,
        mean_response=rollout.max_response_tokens,
        concurrent=rollout.max_concurrent_sequences,
        epochs=algorithm.num_epochs,
        mini_batches=algorithm.num_mini_batches,
        temperature=rollout.temperature,
        engine=rollout.engine,
        off_policy=0,
    )
