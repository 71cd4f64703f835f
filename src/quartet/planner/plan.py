"""The plan of a run on given devices: placement, memory, expected seconds, bottleneck and settings. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from quartet.config.root import Config
from quartet.contract.status import TRAINED_ROLES, Role
from quartet.errors import ConfigError
from quartet.model_files.shape import FLOAT32_BYTES
from quartet.planner.gpus import Cluster
from quartet.planner.placement import (
    USABLE_FRACTION,
    Group,
    Layout,
    Placed,
    Placement,
    layouts,
    place,
    strategies,
)
from quartet.planner.roofline import (
    Seconds,
    UpdateWork,
    decode_seconds,
    efficiency_of,
    scoring_seconds,
    update_seconds,
)
from quartet.planner.workload import RoleWork, Workload, read_workload

PUBLISH_RATE = 9.5e9
"""Bytes/s at which an actor copies a version to the memory of its host and hashes it, on two cores."""
WEIGHT_RATES = {"shared memory": 8.9e9, "gRPC": 1.1e9, "gloo": 1e9}
"""Bytes/s from a published version to one generator that has loaded and hashed it, by way, on two cores. docs/plan.md has the
sources."""
GROUP_COST = 0.02
"""A further group of devices must shorten a step by this fraction. Plans with fewer groups are simpler to run."""
PHASES = ("generation", "weights", "scoring", "update")


@dataclass(frozen=True, slots=True)
class Phase:
    """Work of one role in a step. ``devices``: indices of its devices."""

    name: str
    role: str
    duration: Seconds
    devices: range


@dataclass(frozen=True, slots=True)
class Plan:
    """A placement that fits, the phases of a step, and its seconds."""

    cluster: Cluster
    load: Workload
    placed: Placed
    phases: tuple[Phase, ...]
    seconds: float

    @property
    def bottleneck(self) -> Phase:
        """The phase that takes longest. Phases of the same devices follow each other, so each adds to the step."""
        return max(self.phases, key=lambda phase: phase.duration.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Response tokens per second of a step."""
        return self.load.responses * self.load.mean_response / self.seconds


def make_plan(
    config: Config,
    cluster: Cluster,
    mean_prompt: int | None = None,
    mean_response: int | None = None,
    one_device_per_role: bool = False,
    separate_pods: bool = False,
) -> Plan:
    """Return the plan with the shortest step. Raises ConfigError if nothing fits, or a model cannot be counted.

    ``mean_prompt`` and ``mean_response``: tokens of an average sequence. Default to the maximum. ``one_device_per_role``: only
    plans in which no model is split. ``separate_pods``: only plans for pods, which cannot share GPUs.
    """
    load = read_workload(config, mean_prompt, mean_response)
    if not load.roles:
        raise ConfigError(
            "plan: every model has an address in services, so there is nothing to place; expected at least one model without; "
            "remove services.ROLE.address"
        )
    return best_plan(config, cluster, load, one_device_per_role, separate_pods)


def best_plan(
    config: Config,
    cluster: Cluster,
    load: Workload,
    one_device_per_role: bool = False,
    separate_pods: bool = False,
) -> Plan:
    """Return the plan of a workload with the shortest step. Raises ConfigError if nothing fits."""
    needs_generators = load.generates and (config.rollout.generators > 0 or load.engine != "torch")
    # One process keeps the moving average of all weights.
    actor = load.role(Role.ACTOR)
    whole_actor = actor is not None and actor.has_average
    candidates = [
        layout
        for layout in layouts(cluster, load, needs_generators)
        if not (one_device_per_role and any(group.size > 1 for group in _model_groups(layout)))
        and not (whole_actor and layout.actor.size > 1)
        and not (separate_pods and not _suits_pods(layout, load))
    ]
    # Moments in host memory cost time at every step, so they are the last resort.
    plans: list[Plan] = []
    for offload in (False,) if one_device_per_role else (False, True):
        plans = plans or [plan for layout in candidates for plan in _plans(cluster, load, layout, offload)]
    if not plans:
        raise ConfigError(_does_not_fit(config, cluster, load, bool(candidates), one_device_per_role, separate_pods))
    return min(plans, key=lambda plan: plan.seconds * (1 + GROUP_COST * plan.placed.num_groups))


def _model_groups(layout: Layout) -> list[Group]:
    return [group for group in (layout.actor, layout.critic, layout.frozen) if group is not None]


def _suits_pods(layout: Layout, load: Workload) -> bool:
    """Return whether the roles of each group of several devices are one role, and generators have their own devices."""
    roles: dict[Group, set[Role]] = defaultdict(set)
    for each in load.roles:
        roles[layout.of(each.role)].add(each.role)
    return not layout.shared and all(group.size == 1 or len(names) == 1 for group, names in roles.items())


def _plans(cluster: Cluster, load: Workload, layout: Layout, offload: bool) -> Iterator[Plan]:
    """Yield the first plan that fits for each pair of tensor parallel sizes."""
    done = set()
    for strategy in strategies(cluster, layout, load.engine, offload):
        sizes = (strategy.tensor, strategy.generator_tensor)
        if sizes not in done and (placed := place(cluster, load, layout, strategy)) is not None:
            done.add(sizes)
            yield evaluate(cluster, load, placed)


def _does_not_fit(
    config: Config, cluster: Cluster, load: Workload, tried: bool, one_device_per_role: bool, separate_pods: bool
) -> str:
    if not tried and separate_pods:
        roles = ", ".join(dict.fromkeys(each.role for each in load.roles))
        return (
            f"--gpus {cluster}: too few devices for pods, which cannot share GPUs: {roles} and generators need separate ones; "
            "expected more; give more with --gpus or --nodes"
        )
    if not tried:
        return (
            f"--gpus {cluster}: too few devices: the generators of rollout.generators need devices besides the actor's; expected "
            "at least 2; give more with --gpus or --nodes, or set rollout.generators to 0"
        )
    trained = [each for each in load.roles if each.trained]
    state = sum(16 * each.trained for each in trained) / 2**30
    memory = USABLE_FRACTION * cluster.device.memory / 2**30
    lora = "" if config.actor.lora else "train an adapter (actor.lora), "
    lora += "set actor.ema_decay null to divide the actor, " if config.actor.ema_decay else ""
    one = " with one device per role" if one_device_per_role else ""
    one += " in pods that share no GPUs" if separate_pods else ""
    return (
        f"--gpus {cluster}: the run does not fit{one}: weights, gradients and optimizer of {', '.join(w.name for w in trained)} "
        f"take {state:.0f} GiB by themselves, the longest sequence has {load.longest} tokens, and {cluster.total} x {memory:.1f} "
        f"GiB are usable; expected less; give more devices, {lora}or lower rollout.max_response_tokens or data.max_prompt_tokens"
    )


def evaluate(cluster: Cluster, load: Workload, placed: Placed) -> Plan:
    """Return the plan of a placement, with its expected seconds.

    Phases on the same devices follow each other. Generation overlaps with scoring on other devices, and the updates of actor and
    critic overlap if they are on different ones. With off-policy steps, generation overlaps with everything on other devices.
    """
    phases = tuple(_phases(cluster, load, placed))
    together = [PHASES] if load.off_policy else [("generation", "weights", "scoring"), ("update",)]
    seconds = 0.0
    for names in together:
        busy: dict[int, float] = defaultdict(float)
        for phase in phases:
            if phase.name in names:
                # All devices of a group are equally busy, so the first stands for them: groups are equal or disjoint.
                busy[phase.devices[0]] += phase.duration.seconds
        seconds += max(busy.values(), default=0.0)
    return Plan(cluster, load, placed, phases, seconds)


def _phases(cluster: Cluster, load: Workload, placed: Placed) -> list[Phase]:
    has_generators = any(each.role is Role.GENERATOR for each in placed.placements)
    has_reference = any(each.role is Role.REFERENCE for each in placed.placements)
    phases = []
    for each in placed.placements:
        devices = each.group.devices
        if each.role is Role.GENERATOR or (each.role is Role.ACTOR and load.generates and not has_generators):
            phases.append(Phase("generation", each.name, _generation(cluster, load, placed, each), devices))
        if each.role is Role.GENERATOR:
            phases.append(Phase("weights", each.name, _weights(cluster, load, placed, each.work), devices))
        if each.role in (Role.CRITIC, Role.REWARD, Role.REFERENCE) or (
            each.role is Role.ACTOR and each.work.is_lora and not has_reference
        ):
            phases.append(Phase("scoring", each.name, scoring(cluster, load, each), devices))
        if each.role in TRAINED_ROLES:
            phases.append(Phase("update", each.name, update(cluster, load, each), devices))
    return sorted(phases, key=lambda phase: PHASES.index(phase.name))


def _weights(cluster: Cluster, load: Workload, placed: Placed, work: RoleWork) -> Seconds:
    """Return the time from a trained policy to loaded generators, those on another node than the actor if there are any."""
    size = FLOAT32_BYTES * work.trained if work.is_lora else work.parameters * work.dtype_bytes
    shares = cluster.nodes == 1 and load.shares_weights
    way = "shared memory" if shares else "gRPC" if load.process_group == "none" else load.process_group
    actor = next(each for each in placed.placements if each.role is Role.ACTOR)
    # Each node of the first copy of the sharded model publishes what its ranks hold.
    nodes = max(1.0, actor.group.size / cluster.per_node / actor.parallel.replicate)
    seconds = size / PUBLISH_RATE / nodes + size / WEIGHT_RATES["shared memory" if way == "nccl" else way]
    if way == "nccl":
        # To a GPU of the generator, and from there to its host.
        seconds += size / (cluster.link(cluster.total) * efficiency_of(cluster.device).link)
    return Seconds(seconds, way)


def _generation(cluster: Cluster, load: Workload, placed: Placed, each: Placement) -> Seconds:
    is_generator = each.role is Role.GENERATOR
    # Each device of an actor generates a share of the responses, with a complete copy of the weights.
    replicas, tensor = (each.parallel.replicate, each.parallel.tensor) if is_generator else (each.parallel.devices, 1)
    lengths = (load.mean_prompt, load.mean_response)
    responses = load.responses / replicas
    return decode_seconds(
        cluster,
        each.work.shape,
        each.work.dtype,
        tensor,
        responses,
        lengths,
        placed.concurrent,
        load.engine,
    )


def scoring(cluster: Cluster, load: Workload, each: Placement) -> Seconds:
    """Return the seconds in which a role scores the responses of a step."""
    work = each.work
    tokens = load.tokens(work.shape, each.tokens)
    logit_tokens = load.responses * load.mean_response if work.has_logits else 0
    return scoring_seconds(
        cluster, work.shape, work.dtype, each.parallel, tokens, logit_tokens, load.mean_length, each.tokens
    )


def update(cluster: Cluster, load: Workload, each: Placement) -> Seconds:
    """Return the seconds of a trained role's update."""
    work, tokens = each.work, load.tokens(each.work.shape, each.tokens)
    # The first mini-batch is computed at the old weights, so only the others need a separate pass for the old log-probs.
    recomputed = tokens * (load.mini_batches - 1) / load.mini_batches if work.has_logits else 0.0
    update_work = UpdateWork(
        tokens=tokens,
        response_tokens=load.responses * load.mean_response,
        recomputed=recomputed,
        context=load.mean_length,
        epochs=load.epochs,
        mini_batches=load.mini_batches,
        micro_batch_tokens=each.tokens,
        checkpointing=each.checkpointing,
        has_logits=work.has_logits,
        parameters=work.parameters,
        trained=work.trained,
        offloaded=each.offload,
    )
    return update_seconds(cluster, work.shape, work.dtype, each.parallel, update_work)
