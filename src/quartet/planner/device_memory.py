"""Memory of a role on one of its devices, by part. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from quartet.model_files.memory import (
    CACHE_COLUMNS,
    LOGIT_COPIES,
    PREFILL_TOKENS,
    activation_bytes,
    backward_bytes,
    cpu_logit_copies,
    graph_columns,
    logit_bytes,
    logit_rows,
    training_state,
)
from quartet.model_files.shape import FLOAT32_BYTES, DecoderSizes, ModelShape
from quartet.planner.gpus import Device
from quartet.planner.roofline import Parallel
from quartet.planner.workload import RoleWork, Workload

PARTS = (
    "parameters",
    "master weights",
    "gradients",
    "optimizer",
    "weight average",
    "activations",
    "logits",
    "KV cache",
    "generation copy",
    "gathered layers",
    "transfer",
    "context",
)
"""Parts of the memory of a device, in the order of the tables."""
KEPT_PARTS = ("parameters", "master weights", "optimizer", "weight average", "KV cache", "generation copy", "context")
"""Parts that a role keeps while another role computes on the same device."""
CONTEXT_BYTES = 700 * 2**20
"""CUDA context of a process with the kernels and workspaces of cuBLAS. One process for each role. An estimate."""
GRAPH_LAYER_BYTES = 2**18
"""Memory of a captured graph per layer of the model: about 20 kernels with their arguments. An estimate, not measured."""
COLLECTIVE_BYTES = 2**30
"""Buffers of NCCL in a process with several ranks."""
CPU_CONTEXT_BYTES = 350 * 2**20
"""Memory of a process that has imported torch."""

Parts = Mapping[str, float]


def trained_memory(
    work: RoleWork, load: Workload, device: Device, parallel: Parallel, tokens: int, checkpointing: bool, offload: bool
) -> Parts:
    """Return the peak memory of an update with micro-batches of ``tokens`` tokens, several in a mini-batch.

    One device keeps the parameters in the model's precision and, for half precision, float32 master weights. Several devices
    shard float32 parameters, gradients and moments (FSDP2), and gather them by layers in the computation's precision.
    ``offload``: the moments are in host memory.
    """
    parts, step_gradients = trained_state(work, device.is_cpu, parallel, offload)
    tokens = max(tokens, load.longest)
    activations = activation_bytes(work.shape, work.dtype_bytes, tokens, load.longest, checkpointing, parallel.tensor)
    response_tokens = tokens * load.max_response // load.longest
    logits = 0.0
    if work.has_logits:
        copies = 1 + LOGIT_COPIES
        if device.is_cpu:
            copies = cpu_logit_copies(work.dtype_bytes, load.temperature, work.trains_entropy)
        logits = logit_bytes(work.shape, work.dtype_bytes, response_tokens, copies)
    backward = backward_bytes(work.shape, work.dtype_bytes, tokens) / parallel.tensor
    context = context_bytes(device, parallel)
    if parallel.shard > 1:
        layer = (
            0.0
            if checkpointing
            else tokens * work.shape.saved_layer_bytes(work.dtype_bytes, load.longest, parallel.tensor)
        )
        return {**parts, **_sharded_pass(work, parallel, activations, layer, backward, logits), "context": context}
    # The backward pass releases the logits before it computes gradients of activations in the layers.
    activations += max(0.0, backward - logits)
    # At the optimizer step there are no activations, but float32 gradients.
    parts["gradients"] += max(0.0, step_gradients - activations - logits)
    return {**parts, "activations": activations, "logits": logits, "context": context}


def trained_state(work: RoleWork, on_cpu: bool, parallel: Parallel, offload: bool) -> tuple[dict[str, float], float]:
    """Return the parts that a trained model keeps on a device, and the further bytes of gradients at an optimizer step."""
    if parallel.devices > 1:
        return _sharded_state(work, parallel, offload), 0.0
    state = training_state(
        work.parameters, work.trained, work.dtype_bytes, FLOAT32_BYTES if work.is_lora else None, work.moment_bytes
    )
    if not on_cpu:
        state = state.without_temporary_gradients()
    parts = {
        "parameters": state.parameters,
        "master weights": state.master_weights,
        "gradients": state.gradients,
        "optimizer": 0.0 if offload else state.moments,
    }
    if on_cpu and work.has_average:
        # The average is in host memory, which is not counted for GPUs.
        parts["weight average"] = float(FLOAT32_BYTES * work.trained)
    return parts, state.step_gradients


def _sharded_state(work: RoleWork, parallel: Parallel, offload: bool) -> dict[str, float]:
    size, ranks = work.dtype_bytes, parallel.shard * parallel.tensor
    # Adapters are whole on every device.
    trained = FLOAT32_BYTES * work.trained / (1 if work.is_lora else ranks)
    is_half = size < FLOAT32_BYTES and not work.is_lora
    return {
        "parameters": size * (work.parameters - work.trained) / ranks + (0 if is_half else trained),
        "master weights": trained if is_half else 0,
        "gradients": trained,
        "optimizer": 0 if offload else work.moment_bytes / FLOAT32_BYTES * trained,
    }


def _sharded_pass(
    work: RoleWork, parallel: Parallel, activations: float, layer_activations: float, backward: float, logits: float
) -> dict[str, float]:
    """Return the parts of a pass with gathered parameters, at the moment that needs the most memory.

    FSDP gathers embedding and vocabulary projection for the whole pass, and each layer for its computation. The moments are:

    - the start of the backward pass, with the logits;
    - the first layer of the backward pass, with its parameters and those of the next one, in the buffers of the exchange, or
      beside its gradients;
    - the next layer, while the gradients of the first are reduced: two buffers, and the result. ``layer_activations`` are gone;
    - the end, when the gradients of embedding and projection are reduced. One of the two is still there as computed.

    A frozen model has no gradients.
    """
    size, trains = work.dtype_bytes, not work.is_lora
    layer, ends = _layer(work.shape) / parallel.tensor, _end_parameters(work) / parallel.tensor
    reduced = FLOAT32_BYTES * trains
    computed, result = size * trains, reduced / parallel.shard
    of_ends = (size + computed / 2) * ends
    moments = (
        {"activations": activations, "logits": logits, "gathered layers": size * ends},
        {
            "activations": activations + backward,
            "logits": 0.0,
            "gathered layers": of_ends + max(3 * size, 2 * size + computed) * layer,
        },
        {
            "activations": activations - layer_activations,
            "logits": 0.0,
            "gathered layers": of_ends + (2 * size + 2 * reduced + result) * layer,
        },
        {"activations": 0.0, "logits": 0.0, "gathered layers": (computed / 2 + 2 * reduced + result) * ends},
    )
    return max(moments, key=lambda parts: sum(parts.values()))


def gathered_bytes(work: RoleWork, parallel: Parallel) -> float:
    """Return the bytes of gathered parameters in a forward pass: two layers, buffers of two more, and both ends of the model."""
    if parallel.shard == 1:
        return 0.0
    return work.dtype_bytes * (4 * _layer(work.shape) + _end_parameters(work)) / parallel.tensor


def _end_parameters(work: RoleWork) -> int:
    """Return the parameters of embedding and vocabulary projection. Without logits there is no projection."""
    shape = work.shape
    return shape.embedding_parameters + (shape.head_parameters if work.has_logits and not shape.tied else 0)


def _layer(shape: ModelShape) -> float:
    return shape.layer_parameters / shape.layers


def frozen_memory(work: RoleWork, load: Workload, device: Device, parallel: Parallel) -> Parts:
    """Return the memory of a model that scores: parameters, states of one layer, and logits of a chunk."""
    shape, size, tokens = work.shape, work.dtype_bytes, max(work.micro_batch_tokens or 0, load.longest)
    logits = 0.0
    if work.has_logits:
        rows = min(tokens, logit_rows(shape.vocabulary))
        logits = rows * shape.vocabulary * (2 * FLOAT32_BYTES + (size if size < FLOAT32_BYTES else 0))
    return {
        "parameters": size * work.parameters / (parallel.shard * parallel.tensor),
        "activations": forward_bytes(shape, size, tokens) / parallel.tensor,
        "logits": logits,
        "gathered layers": gathered_bytes(work, parallel),
        "context": context_bytes(device, parallel),
    }


def forward_bytes(shape: ModelShape, dtype_bytes: int, tokens: int) -> float:
    """Return the bytes of the states that a forward pass without gradients holds at a time."""
    return dtype_bytes * tokens * (3 * shape.intermediate + 4 * shape.hidden)


def cache_bytes(work: RoleWork, load: Workload, sequences: int, tensor: int) -> float:
    """Return the bytes of the states of ``sequences`` sequences of the maximum length on one device of an engine like vLLM.

    Keys and values are divided by heads; recurrent and convolution states are divided by channels.
    """
    state, heads = work.shape.state, max(1, min(tensor, work.shape.key_value_heads))
    kept = state.token_bytes(work.dtype_bytes, load.longest, drops_tokens=True) / heads
    return sequences * (kept + state.fixed_bytes(work.dtype_bytes) / tensor)


def engine_cache_bytes(
    sizes: DecoderSizes | ModelShape, dtype_bytes: int, rows: int, columns: int, graphs: bool
) -> int:
    """Return the bytes that the torch engine keeps between generations: states of sequences, logits, and on a GPU graphs.

    ``rows``: concurrent sequences; ``columns``: tokens of the longest one.
    """
    columns = graph_columns(columns) if graphs else -(-columns // CACHE_COLUMNS) * CACHE_COLUMNS
    buffers = math.ceil(rows * (sizes.state.bytes(dtype_bytes, columns) + sizes.vocabulary * dtype_bytes))
    column_sizes = math.ceil(columns / 64) if columns <= 1024 else 16 + 8 * math.ceil(math.log2(columns / 1024))
    captured = 2 * (column_sizes + rows.bit_length()) if graphs else 0
    return buffers + captured * sizes.layers * GRAPH_LAYER_BYTES


def generator_memory(work: RoleWork, load: Workload, device: Device, tensor: int, sequences: int) -> Parts:
    """Return the memory of a generator. Its transfer buffers hold the largest tensor twice: received, and as a delta."""
    shape, size = work.shape, work.dtype_bytes
    return {
        "parameters": size * work.parameters / tensor,
        "activations": forward_bytes(shape, size, PREFILL_TOKENS) / tensor,
        "logits": 2 * FLOAT32_BYTES * sequences * shape.vocabulary,
        "KV cache": cache_bytes(work, load, sequences, tensor),
        "transfer": 2 * size * shape.head_parameters,
        "context": context_bytes(device, Parallel(tensor=tensor)),
    }


def actor_generation_memory(
    work: RoleWork, load: Workload, device: Device, parallel: Parallel, sequences: int
) -> Parts:
    """Return the memory that generation adds to the actor's: the engine's cache, and weights besides those that are trained.

    Each device of a sharded actor generates a share of the responses, with an unsharded copy in the computation's precision. A
    merged adapter needs copies of the weights, too.
    """
    copies = (parallel.devices > 1) + work.merges_adapter
    copy = copies * work.dtype_bytes * work.parameters
    cache = engine_cache_bytes(work.shape, work.dtype_bytes, sequences, load.longest, graphs=not device.is_cpu)
    return {"KV cache": cache, "generation copy": copy}


def shared_copy_memory(work: RoleWork) -> Parts:
    """Return the memory of the copy that an actor keeps for generators, see rollout.share_gpu_memory."""
    return {"generation copy": work.dtype_bytes * work.parameters}


def context_bytes(device: Device, parallel: Parallel) -> float:
    """Return the bytes that a process needs besides its tensors."""
    if device.is_cpu:
        return CPU_CONTEXT_BYTES
    return CONTEXT_BYTES + (COLLECTIVE_BYTES if parallel.devices > 1 else 0)


def add_parts(*parts: Parts) -> dict[str, float]:
    """Return the sums by part, in the order of ``PARTS``."""
    return {name: sum(each.get(name, 0.0) for each in parts) for name in PARTS}
