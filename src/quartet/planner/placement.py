"""Search for the placement of roles that takes the shortest step among those that fit. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from quartet.config.models import MAX_MICRO_BATCH_TOKENS, MAX_MICRO_BATCH_TOKENS_GPU
from quartet.contract.status import TRAINED_ROLES, Role
from quartet.model_files.shape import ModelShape
from quartet.planner.device_memory import (
    KEPT_PARTS,
    Parts,
    actor_generation_memory,
    add_parts,
    frozen_memory,
    generator_memory,
    shared_copy_memory,
    trained_memory,
)
from quartet.planner.gpus import Cluster
from quartet.planner.roofline import Parallel
from quartet.planner.workload import RoleWork, Workload

USABLE_FRACTION = 0.9
"""Fraction of a device's memory that a plan uses. The rest is for fragmentation and for what the formulas leave out."""
TENSOR_SIZES = (1, 2, 4, 8)
RELEASING_ENGINES = ("vllm", "tensorrt-llm")
"""Engines that can release their memory between generations (release_memory)."""
MIN_CONCURRENT = 8
"""Fewest sequences that a generator decodes at a time, unless the config asks for fewer."""


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring devices."""

    first: int
    size: int

    @property
    def devices(self) -> range:
        """Indices of the devices, counted over all nodes."""
        return range(self.first, self.first + self.size)


@dataclass(frozen=True, slots=True)
class Placement:
    """A role on its devices, with its memory on each. ``tokens``: micro-batch size. A generator has one ``tensor`` group each."""

    role: Role
    name: str
    work: RoleWork
    group: Group
    parallel: Parallel
    memory: Parts
    tokens: int = 0
    checkpointing: bool = False
    offload: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """Groups of devices. A role without a group shares that of the actor, except rewards, which share that of the critic.

    ``shared``: the generators are on the actor's devices, and release their memory while they do not generate.
    """

    actor: Group
    critic: Group | None
    frozen: Group | None
    generators: Group | None
    shared: bool = False

    def of(self, role: Role) -> Group:
        """Return the group of a role."""
        critic = self.critic or self.actor
        groups = {
            Role.ACTOR: self.actor,
            Role.CRITIC: critic,
            Role.REFERENCE: self.frozen or self.actor,
            Role.REWARD: self.frozen or critic,
            Role.GENERATOR: self.generators or self.actor,
        }
        return groups[role]


@dataclass(frozen=True, slots=True)
class Strategy:
    """Ways to save memory. Later strategies need less memory and more time.

    ``spread``: replicas over nodes shard within a node only. ``shard_frozen``: frozen models are sharded instead of replicated.
    """

    spread: bool = True
    shard_frozen: bool = False
    offload: bool = False
    tensor: int = 1
    generator_tensor: int = 1


@dataclass(frozen=True, slots=True)
class Placed:
    """A layout that fits: the placements, and the number of sequences that each generator decodes at a time."""

    placements: tuple[Placement, ...]
    concurrent: int
    num_groups: int
    shared: bool = False
    strategy: Strategy = field(default_factory=Strategy)

    def on(self, device: int) -> list[Placement]:
        """Return the placements on a device."""
        return [each for each in self.placements if device in each.group.devices]

    def memory(self, device: int) -> dict[str, float]:
        """Return the memory of a device, by part, in the phase that needs most."""
        placements = self.on(device)
        training = add_parts(*(each.memory for each in placements if not (self.shared and each.role is Role.GENERATOR)))
        if not self.shared:
            return training
        generation = add_parts(*(_while_generating(each) for each in placements))
        return max(training, generation, key=lambda parts: sum(parts.values()))


def _while_generating(placement: Placement) -> Parts:
    """Return the memory of a role while generators on the same devices generate."""
    if placement.role is Role.GENERATOR:
        return placement.memory
    return {name: size for name, size in placement.memory.items() if name in KEPT_PARTS}


def layouts(cluster: Cluster, load: Workload, needs_generators: bool) -> Iterator[Layout]:
    """Yield groups of devices for the roles: sizes that fill nodes evenly, the generators on the rest.

    A role on several nodes gets the same devices on each, so its group is within a node or consists of whole nodes.
    """
    for layout in _all_layouts(cluster, load, needs_generators):
        groups = (layout.actor, layout.critic, layout.frozen)
        if all(_is_within_nodes(group, cluster) for group in groups if group is not None):
            yield layout


def _all_layouts(cluster: Cluster, load: Workload, needs_generators: bool) -> Iterator[Layout]:
    """Yield the layouts of one role after the other, also those with groups that begin in the middle of a node."""
    total = cluster.total
    sizes = [size for size in range(1, total + 1) if _is_even(size, cluster)]
    critics = [0, *sizes] if load.role(Role.CRITIC) and load.role(Role.ACTOR) else [0]
    frozen_roles = load.role(Role.REFERENCE) or load.role(Role.REWARD)
    for actor in sizes:
        for critic in critics:
            for frozen in [0, *sizes] if frozen_roles and actor + critic < total else [0]:
                rest = total - actor - critic - frozen
                if rest < 0 or (rest and not load.generates):
                    continue
                if needs_generators and not rest:
                    if load.engine in RELEASING_ENGINES and not load.off_policy:
                        yield _shared_layout(actor, critic, frozen)
                    continue
                starts = (actor, actor + critic, actor + critic + frozen)
                groups = [
                    Group(first, size) if size else None
                    for first, size in zip(starts, (critic, frozen, rest), strict=True)
                ]
                yield Layout(Group(0, actor), groups[0], groups[1], groups[2])


def _shared_layout(actor: int, critic: int, frozen: int) -> Layout:
    """Return the layout with the generators on the actor's devices."""
    first = Group(0, actor)
    others = (Group(actor, critic) if critic else None, Group(actor + critic, frozen) if frozen else None)
    return Layout(first, *others, generators=first, shared=True)


def _is_even(size: int, cluster: Cluster) -> bool:
    """Return whether groups of this size divide a node, or consist of whole nodes."""
    return cluster.per_node % size == 0 if size <= cluster.per_node else size % cluster.per_node == 0


def _is_within_nodes(group: Group, cluster: Cluster) -> bool:
    """Return whether a group is within one node, or consists of whole nodes."""
    per_node = cluster.per_node
    first, last = group.devices[0] // per_node, group.devices[-1] // per_node
    return first == last or (group.first % per_node == 0 and group.size % per_node == 0)


def strategies(cluster: Cluster, layout: Layout, engine: str, offload: bool) -> Iterator[Strategy]:
    """Yield the strategies for a layout, those that need the most memory first, with or without ``offload``."""
    generators = layout.generators
    tensors = [size for size in TENSOR_SIZES if size <= min(cluster.per_node, layout.actor.size)]
    if generators is None or engine == "torch":
        generator_tensors = [1]
    else:
        generator_tensors = [size for size in TENSOR_SIZES if size <= cluster.per_node and generators.size % size == 0]
    for shard_frozen in (False, True):
        for spread in (True, False) if cluster.nodes > 1 else (True,):
            for tensor in tensors:
                for generator_tensor in generator_tensors:
                    yield Strategy(spread, shard_frozen, offload, tensor, generator_tensor)


def place(cluster: Cluster, load: Workload, layout: Layout, strategy: Strategy) -> Placed | None:
    """Return the placements of a layout, with the most concurrent sequences and the largest micro-batches that fit, or None."""
    limit = USABLE_FRACTION * cluster.device.memory
    replicas = _replicas(load, layout, strategy, cluster)
    if replicas is None:
        return None
    concurrent = min(load.concurrent, -(-load.responses // replicas))
    while True:
        placed = _with_micro_batches(cluster, load, layout, strategy, concurrent, limit)
        if placed is not None or concurrent <= MIN_CONCURRENT:
            return placed
        concurrent = max(MIN_CONCURRENT, concurrent // 2)


def parallel_of(shape: ModelShape, size: int, strategy: Strategy, cluster: Cluster, tensor: int) -> Parallel | None:
    """Return the parallel sizes of a trained role, or None if its heads cannot be split.

    A model that is not tensor parallel has ``tensor`` 1.
    """
    tensor = tensor if shape.family.sliceable else 1
    if size % tensor or shape.heads % tensor or (shape.key_value_heads % tensor):
        return None
    replicate = size // cluster.per_node if strategy.spread and size > cluster.per_node else 1
    return Parallel(replicate, size // tensor // replicate, tensor)


def _replicas(load: Workload, layout: Layout, strategy: Strategy, cluster: Cluster) -> int | None:
    """Return the number of generators, or None if the strategy does not suit the actor."""
    actor = load.role(Role.ACTOR)
    if actor is None:
        return 1
    parallel = parallel_of(actor.shape, layout.actor.size, strategy, cluster, strategy.tensor)
    if parallel is None or actor.shape.heads % strategy.generator_tensor:
        return None
    return layout.generators.size // strategy.generator_tensor if layout.generators else parallel.devices


def _with_micro_batches(
    cluster: Cluster, load: Workload, layout: Layout, strategy: Strategy, concurrent: int, limit: float
) -> Placed | None:
    placements = _placements(cluster, load, layout, strategy, concurrent)
    if placements is None:
        return None
    placed = Placed(tuple(placements), concurrent, _num_groups(layout), layout.shared, strategy)
    # Start from the least memory.
    if any(sum(placed.memory(device).values()) > limit for device in _distinct_devices(layout)):
        return None
    # Recomputation costs more than small micro-batches, so first as many roles as fit do without it, then micro-batches grow.
    for grow in (False, True):
        for index, placement in enumerate(placed.placements):
            if placement.role not in TRAINED_ROLES:
                continue
            for tokens, checkpointing in _micro_batches(cluster, placement.work, load):
                if (checkpointing != placement.checkpointing) if grow else (tokens != placement.tokens):
                    continue
                larger = _trained(cluster, load, placement, strategy, tokens, checkpointing, layout, concurrent)
                others = placed.placements
                trial = replace(placed, placements=(*others[:index], larger, *others[index + 1 :]))
                if sum(trial.memory(placement.group.first).values()) <= limit:
                    placed = trial
                    break
    return placed


def _max_micro_batch_tokens(cluster: Cluster) -> int:
    """Return the upper limit of the services' default."""
    return MAX_MICRO_BATCH_TOKENS if cluster.device.is_cpu else MAX_MICRO_BATCH_TOKENS_GPU


def _micro_batches(cluster: Cluster, work: RoleWork, load: Workload) -> Iterator[tuple[int, bool]]:
    """Yield micro-batch sizes and whether activations are recomputed, in the order of the services' choice."""
    for checkpointing in (False, True) if work.checkpointing is None else (work.checkpointing,):
        if work.micro_batch_tokens is not None:
            yield work.micro_batch_tokens, checkpointing
            continue
        tokens = _max_micro_batch_tokens(cluster)
        while tokens > load.longest:
            yield tokens, checkpointing
            tokens //= 2
        yield tokens, checkpointing


def _placements(
    cluster: Cluster, load: Workload, layout: Layout, strategy: Strategy, concurrent: int
) -> list[Placement] | None:
    """Return the placements with the smallest micro-batches, or None if a model cannot be split so."""
    results = []
    for work in load.roles:
        group = layout.of(work.role)
        if work.role in TRAINED_ROLES:
            tensor = min(strategy.tensor, group.size)
            parallel = parallel_of(work.shape, group.size, strategy, cluster, tensor)
            if parallel is None:
                return None
            *_, (tokens, checkpointing) = _micro_batches(cluster, work, load)
            empty = Placement(work.role, work.name, work, group, parallel, {})
            results.append(_trained(cluster, load, empty, strategy, tokens, checkpointing, layout, concurrent))
        else:
            shard = strategy.shard_frozen
            parallel = Parallel(1, group.size, 1) if shard else Parallel(group.size, 1, 1)
            memory = frozen_memory(work, load, cluster.device, parallel)
            tokens = work.micro_batch_tokens or _max_micro_batch_tokens(cluster)
            results.append(Placement(work.role, work.name, work, group, parallel, memory, tokens))
    actor = load.role(Role.ACTOR)
    if layout.generators is not None and actor is not None:
        tensor = strategy.generator_tensor
        memory = generator_memory(actor, load, cluster.device, tensor, concurrent)
        parallel = Parallel(layout.generators.size // tensor, 1, tensor)
        results.append(Placement(Role.GENERATOR, "generators", actor, layout.generators, parallel, memory))
    return results


def _trained(
    cluster: Cluster,
    load: Workload,
    placement: Placement,
    strategy: Strategy,
    tokens: int,
    checkpointing: bool,
    layout: Layout,
    concurrent: int,
) -> Placement:
    """Return the placement of a trained role with this micro-batch size, and with generation if it is the actor's."""
    work, parallel = placement.work, placement.parallel
    memory = trained_memory(work, load, cluster.device, parallel, tokens, checkpointing, strategy.offload)
    if work.role is Role.ACTOR and layout.generators is None and load.generates:
        memory = add_parts(memory, actor_generation_memory(work, load, cluster.device, parallel, concurrent))
    elif work.role is Role.ACTOR and load.shares_gpu_memory and parallel.devices == 1 and not cluster.device.is_cpu:
        memory = add_parts(memory, shared_copy_memory(work))
    return replace(placement, memory=memory, tokens=tokens, checkpointing=checkpointing, offload=strategy.offload)


def _distinct_devices(layout: Layout) -> list[int]:
    """Return one device of each group, because all devices of a group are equal."""
    groups = (layout.actor, layout.critic, layout.frozen, layout.generators)
    return sorted({group.first for group in groups if group is not None})


def _num_groups(layout: Layout) -> int:
    return len(_distinct_devices(layout))
