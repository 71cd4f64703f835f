"""Expected seconds of generation, scoring and updates, from a roofline (Williams et al. 2009). Imports no torch.

A phase takes the longest of its bytes over the memory bandwidth, its FLOPs over the peak, and its traffic over the link, each at
the efficiency below. The efficiencies are estimates from published measurements. Nothing here was measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from quartet.model_files.memory import DTYPE_BYTES, logit_rows
from quartet.model_files.shape import FLOAT32_BYTES, ModelShape
from quartet.planner.gpus import Cluster, Device


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Fractions of the peaks that each phase reaches.

    ``update``: Llama 3 405B trains at 38 to 43 % of the bf16 peak (Grattafiori et al. 2024, table 4), PaLM at 46 % (Chowdhery et
    al. 2022). ``scoring``: forward passes have no optimizer and no gradient traffic. ``decode``: bandwidth, for engines with CUDA
    graphs; vLLM reaches 20,000 to 25,000 of 34,000 tokens/s for a 7B model on one H100. ``decode_torch``: the same for the torch
    engine. ``link``: collectives against the nominal rate.
    """

    update: float = 0.40
    scoring: float = 0.50
    decode: float = 0.65
    decode_torch: float = 0.50
    optimizer: float = 0.70
    link: float = 0.80


GPU_EFFICIENCY = Efficiency()
CPU_EFFICIENCY = Efficiency(update=0.60, scoring=0.70, decode=0.60, decode_torch=0.60, optimizer=0.60, link=0.60)
"""On a CPU the matmul peak is measured, so more of it is reached."""


def efficiency_of(device: Device) -> Efficiency:
    """Return the efficiencies of a kind of device."""
    return CPU_EFFICIENCY if device.is_cpu else GPU_EFFICIENCY


@dataclass(frozen=True, slots=True)
class Parallel:
    """Parallel sizes of a role: ``replicate`` x ``shard`` (FSDP) x ``tensor`` (tensor parallelism) devices."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.replicate * self.shard * self.tensor

    @property
    def data(self) -> int:
        """Number of shares of the sequences."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        return f"{{replicate: {self.replicate}, shard: {self.shard}, tensor: {self.tensor}}}"


@dataclass(frozen=True, slots=True)
class Seconds:
    """Expected duration, and the resource that limits it."""

    seconds: float
    limit: str

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.seconds + other.seconds, max(self, other, key=lambda each: each.seconds).limit)


def longest_of(**seconds: float) -> Seconds:
    """Return the longest of the durations, by the resource that each needs."""
    limit = max(seconds, key=lambda name: seconds[name])
    return Seconds(seconds[limit], limit.replace("_", " "))


def attention_flops(shape: ModelShape, tokens: float, context: float) -> float:
    """Return the FLOPs of causal attention in a forward pass: scores and outputs, half of the pairs in ``context`` tokens."""
    return 2 * shape.attention_layers * shape.query * tokens * context


def forward_flops(shape: ModelShape, tokens: float, logit_tokens: float, context: float) -> float:
    """Return the FLOPs of a forward pass: 2 per weight and token (Kaplan et al. 2020), attention, and the logits."""
    matmuls = 2 * shape.matmul_weights() * tokens
    return matmuls + attention_flops(shape, tokens, context) + 2 * shape.head_parameters * logit_tokens


def decode_bytes(shape: ModelShape, dtype_bytes: int, sequences: float, context: float) -> float:
    """Return the bytes that a decode step reads: the weights once, of experts those that are used, and the state of sequences."""
    weights = shape.layer_parameters + shape.head_parameters
    if shape.experts:
        # The fraction of experts that at least one of the sequences uses, for uniform routing.
        used = 1 - (1 - shape.active_experts / shape.experts) ** sequences
        weights -= (1 - used) * shape.expert_parameters
    return weights * dtype_bytes + sequences * shape.state.bytes(dtype_bytes, context)


def decode_seconds(
    cluster: Cluster, shape: ModelShape, dtype: str, tensor: int, responses: float, lengths: tuple[int, int],
    concurrent: int, engine: str,
) -> Seconds:  # fmt: skip
    """Return the seconds in which one replica on ``tensor`` devices generates ``responses`` responses.

    ``lengths``: tokens of prompt and response. ``concurrent`` sequences are decoded at a time, each step at the mean context.
    """
    device, size = cluster.device, DTYPE_BYTES[dtype]
    rates, (prompt, response) = efficiency_of(device), lengths
    rate = rates.decode_torch if engine == "torch" else rates.decode
    sequences = min(float(concurrent), responses)
    steps = response * responses / sequences
    context = prompt + response / 2
    flops = forward_flops(shape, sequences, sequences, 2 * context)
    # Two all-reduces per layer, each of which moves the states twice.
    traffic = 4 * shape.layers * sequences * shape.hidden * size * (tensor - 1) / tensor
    step = longest_of(
        memory_bandwidth=decode_bytes(shape, size, sequences, context) / tensor / (device.bandwidth * rate),
        compute=flops / tensor / (device.flops(dtype) * rates.scoring),
    )
    step += Seconds(traffic / (cluster.link(tensor) * rates.link), "links between devices")
    prefill = forward_flops(shape, responses * prompt, responses, prompt)
    return Seconds(step.seconds * steps, step.limit) + Seconds(
        prefill / tensor / (device.flops(dtype) * rates.scoring), "compute"
    )


def scoring_seconds(
    cluster: Cluster, shape: ModelShape, dtype: str, parallel: Parallel, tokens: float, logit_tokens: float,
    context: float, micro_batch_tokens: int,
) -> Seconds:  # fmt: skip
    """Return the seconds of a forward pass over ``tokens`` tokens, split over the ranks."""
    device = cluster.device
    rate = efficiency_of(device).scoring
    flops = forward_flops(shape, tokens, logit_tokens, context) / parallel.devices
    passes = max(1.0, tokens / parallel.data / micro_batch_tokens)
    gather = _gathered(shape.parameters * DTYPE_BYTES[dtype], parallel) * passes
    return longest_of(
        compute=flops / (device.flops(dtype) * rate),
        links_between_devices=_link_seconds(cluster, parallel, gather)
        + _tensor_seconds(cluster, shape, dtype, parallel, 2 * tokens / parallel.data),
    )


@dataclass(frozen=True, slots=True)
class UpdateWork:
    """Work of one update. ``tokens`` and ``response_tokens`` are those of one epoch.

    ``recomputed``: tokens of forward passes for old log-probs. ``offloaded``: the optimizer's moments are in host memory.
    """

    tokens: float
    response_tokens: float
    recomputed: float
    context: float
    epochs: int
    mini_batches: int
    micro_batch_tokens: int
    checkpointing: bool
    has_logits: bool
    parameters: int
    trained: int
    offloaded: bool = False


def update_flops(shape: ModelShape, work: UpdateWork) -> float:
    """Return the FLOPs of an update: 6 per weight, token and epoch, 8 with checkpointing, and the logits of response tokens.

    The backward pass takes twice the forward pass, except for frozen weights, which have no gradient. The backward pass computes
    logits in several chunks again.
    """
    passes = 1 + (1 if work.trained < work.parameters / 2 else 2) + work.checkpointing
    body = forward_flops(shape, work.tokens, 0, work.context)
    flops = work.epochs * passes * body + forward_flops(shape, work.recomputed, 0, work.context)
    if work.has_logits:
        again = 1 if min(work.micro_batch_tokens, work.response_tokens) > logit_rows(shape.vocabulary) else 0
        share = work.recomputed / work.tokens if work.tokens else 0
        flops += 2 * shape.head_parameters * work.response_tokens * (work.epochs * (3 + again) + share)
    return flops


def update_seconds(cluster: Cluster, shape: ModelShape, dtype: str, parallel: Parallel, work: UpdateWork) -> Seconds:
    """Return the seconds of an update.

    FSDP gathers the parameters of a micro-batch twice and reduces its gradients once (Zhao et al. 2023), on GPUs while it
    computes. Tensor parallelism waits for its all-reduces. The optimizer reads weights, gradients and moments and writes weights
    and moments.
    """
    device, size = cluster.device, DTYPE_BYTES[dtype]
    rates = efficiency_of(device)
    compute = update_flops(shape, work) / parallel.devices / (device.flops(dtype) * rates.update)
    micro_batches = work.epochs * max(float(work.mini_batches), work.tokens / parallel.data / work.micro_batch_tokens)
    moved = 2 * work.parameters * size + work.trained * FLOAT32_BYTES
    traffic = _link_seconds(cluster, parallel, _gathered(moved, parallel) * micro_batches)
    steps, share = work.epochs * work.mini_batches, work.trained / (parallel.shard * parallel.tensor)
    if parallel.replicate > 1:
        reduced = 2 * FLOAT32_BYTES * share * (parallel.replicate - 1) / parallel.replicate
        traffic += steps * reduced / (cluster.link(cluster.total) * rates.link)
    tensor = _tensor_seconds(cluster, shape, dtype, parallel, 4 * work.epochs * work.tokens / parallel.data)
    optimizer = steps * share * 8 * FLOAT32_BYTES / (device.bandwidth * rates.optimizer)
    if work.offloaded:
        optimizer += steps * share * 4 * FLOAT32_BYTES / (device.host_link * rates.link)
    result = longest_of(compute=compute, links_between_devices=traffic)
    if device.is_cpu:
        # The cores that compute also move the data.
        result = Seconds(compute, "compute") + Seconds(traffic, "links between devices")
    return result + Seconds(tensor, "links between devices") + Seconds(optimizer, "memory bandwidth")


def _gathered(size: float, parallel: Parallel) -> float:
    """Return the bytes that a device receives when all shards of ``size`` bytes are gathered."""
    return size / parallel.tensor * (parallel.shard - 1) / parallel.shard


def _link_seconds(cluster: Cluster, parallel: Parallel, size: float) -> float:
    link = cluster.link(parallel.shard * parallel.tensor)
    return size / (link * efficiency_of(cluster.device).link)


def _tensor_seconds(cluster: Cluster, shape: ModelShape, dtype: str, parallel: Parallel, tokens: float) -> float:
    """Return the seconds of one all-reduce of hidden states per layer for ``tokens`` tokens."""
    size = 2 * shape.layers * tokens * shape.hidden * DTYPE_BYTES[dtype] * (parallel.tensor - 1) / parallel.tensor
    return size / (cluster.link(parallel.tensor) * efficiency_of(cluster.device).link)
