"""Construction of each role's core and servicer from the config. Imports torch, so the entry point imports it last."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quartet.buffer.connection import ConnectionMonitor, connect_at_start
from quartet.buffer.experience_store import ExperienceStore
from quartet.buffer.redis_url import required_buffer_url
from quartet.buffer.rollout_stream import RolloutStream
from quartet.buffer.turn_records import TurnRecordStore
from quartet.config.deployment import ServiceConfig
from quartet.config.layout import (
    device_of_rank,
    generates_during_updates,
    generates_in_actor,
    num_memory_sharers,
    num_update_threads,
)
from quartet.config.models import MAX_MICRO_BATCH_TOKENS, MAX_MICRO_BATCH_TOKENS_GPU
from quartet.config.root import Config
from quartet.contract.status import Role, ServiceStatus
from quartet.engines.engine import find_engine
from quartet.errors import ConfigError
from quartet.models.generation.torch_kind import load_detached
from quartet.models.torch_settings import check_gpu, set_num_threads
from quartet.models.workers.workers import SINGLE, Workers
from quartet.planner.memory_shares import (
    cache_shape,
    generates_on_its_device,
    gpu_share,
    role_memory,
    shares_gpu_memory,
    torch_cache_bytes,
)
from quartet.rewards.factory import build_reward
from quartet.rpc.base_servicers import Commands, ModelServicer
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.security.credentials import LOCAL, Credentials
from quartet.services.actor.actor import Actor, BufferAccess
from quartet.services.actor.group_generation import GroupGeneration, join_ranks, rank_host
from quartet.services.actor.servicer import ActorServicer
from quartet.services.critic.critic import Critic
from quartet.services.critic.servicer import CriticServicer
from quartet.services.generator.factory import environment_access
from quartet.services.generator.generator import Generator
from quartet.services.generator.sessions.factory import agent_access
from quartet.services.memory_budget import UpdateLimits
from quartet.services.reference.reference import Reference
from quartet.services.reference.servicer import ReferenceServicer
from quartet.services.reward.servicer import RewardServicer
from quartet.services.reward.sharing import SharedTurns
from quartet.system.failpoints import failpoint
from quartet.weight_transfer.cuda_ipc import cuda_runtime
from quartet.weight_transfer.process_group import GroupSenders, GroupSettings, group_settings
from quartet.weight_transfer.shared_memory import machine
from quartet.weight_transfer.slices import SliceWriter
from quartet.weight_transfer.source import WeightSource


def build_model_role(
    role: Role,
    config: Config,
    compute: ComputeThread,
    threads: int,
    workers: Workers = SINGLE,
    commands: Commands | None = None,
    credentials: Credentials = LOCAL,
) -> ModelServicer[Any]:
    """Load the model of one role and return its servicer.

    ``workers`` and ``commands``: the group of the role. ``credentials``: those of the process, with which the ranks of a group
    call each other. Raises ModelError, ConfigError or ServiceUnavailable.
    """
    if role is Role.ACTOR:
        failpoint("actor.loading")
        return _build_actor(config, compute, threads, workers, commands, credentials)
    if role is Role.CRITIC:
        failpoint("critic.loading")
        access, monitor = _buffer(config, credentials)
        return CriticServicer(_critic(config, access, workers), compute, threads, monitor.is_lost, commands)
    if role is Role.REWARD:
        failpoint("reward.loading")
        source = build_reward(config, device_of(config.services.reward, workers.rank), workers, credentials)
        # Functions and scorers run in separate processes. Their callers wait on a separate thread, not on that of the models.
        thread = compute if source.status().parameters else ComputeThread()
        sharing = config.services.reward.sharing
        return RewardServicer(source, thread, threads, commands, SharedTurns(sharing) if sharing is not None else None)
    assert role is Role.REFERENCE, role
    failpoint("reference.loading")
    return ReferenceServicer(_reference(config, workers), compute, threads, commands)


def _buffer(config: Config, credentials: Credentials) -> tuple[Callable[[str], BufferAccess], ConnectionMonitor]:
    """Connect to the buffer. Return the function that gives access to the data of a run, and the monitor of the connection."""
    url = required_buffer_url(config, credentials.folder)
    client = connect_at_start(url, config.timeouts.load_seconds)
    monitor = ConnectionMonitor(client, url)

    def access(run: str) -> BufferAccess:
        return BufferAccess(
            RolloutStream(client, url, run, monitor.mark_lost),
            ExperienceStore(client, url, run, monitor.mark_lost),
            TurnRecordStore(client, url, run, monitor.mark_lost),
        )

    return access, monitor


def _build_actor(
    config: Config,
    compute: ComputeThread,
    threads: int,
    workers: Workers,
    commands: Commands | None,
    credentials: Credentials,
) -> ActorServicer:
    access, monitor = _buffer(config, credentials)
    device = device_of(config.services.actor, workers.rank)
    rollout, ahead = config.rollout, config.rollout.max_off_policy_steps
    kind = find_engine(rollout.engine)
    # Who generates, with which weights, and how they get there:
    #   generators in other processes   their own     pulled from the weight source of rank 0, for which all ranks write
    #   this process, during updates    its own       taken from the weight source of this process
    #   this process, of a group        its own       copied when all ranks publish them
    #   this process                    the policy's  shared
    hosts, detached = not config.has_generators, generates_in_actor(config)
    shares = hosts and not detached
    # A version is needed until its step is generated, and the one after it may be published before.
    groups = None if hosts else group_settings(config, device_of_rank(config.services.actor, workers.rank))
    writer = None if hosts else slice_writer(config, workers, groups)
    source = (
        WeightSource(
            ahead + 2,
            shares=rollout.share_weights,
            writer=writer,
            directory=rollout.share_directory,
            senders=None if groups is None else GroupSenders(groups) if writer is None else writer.senders,
            cuda=None
            if hosts or workers.size > 1
            else cuda_runtime(config, device_of_rank(config.services.actor, workers.rank)),
        )
        if (ahead if hosts else not workers.rank) and not shares
        else None
    )
    share = kind.share
    if shares and share is None:
        raise ConfigError(
            f"rollout.engine {rollout.engine}: needs a generator process, because it cannot share a Python environment "
            "with the actor; start one with this engine, or set rollout.engine torch"
        )
    # torch has one deterministic mode for all threads, and sampling has no deterministic kernel on a GPU.
    concurrent = {"deterministic_updates": False} if generates_during_updates(config) else {}
    actor = Actor(
        config.actor.model_copy(update=concurrent),
        device,
        run_root(config),
        access,
        config.run.seed,
        (lambda policy: share(config, policy, credentials.folder)) if shares and share is not None else None,
        num_update_threads(config, Role.ACTOR),
        limits_of(config, Role.ACTOR, workers.rank),
        config.algorithm.policy_loss,
        workers,
        config.services.actor.offload,
        config.algorithm.loss_parameters,
        rollout.router_replay,
    )
    if not hosts:
        actor.publish_to(source, writer=writer)
        return ActorServicer(actor, compute, threads, monitor.is_lost, weights=source, commands=commands)

    def turns(run: str) -> TurnRecordStore:
        return access(run).turns

    own, served = load_detached(config, device) if detached else (None, actor.served_model())
    generator = Generator(
        actor.engine if own is None else lambda: own,
        served,
        ServiceStatus(Role.ACTOR),
        lambda run: access(run).rollouts,
        environment_access(config, credentials, turns) or agent_access(config, credentials, served, turns),
        actor if shares else source,
        actor.fence,
    )
    if shares:
        return ActorServicer(actor, compute, threads, monitor.is_lost, generator=generator, commands=commands)
    actor.publish_to(source, None if source else generator)
    generation = ComputeThread(set_up_thread(threads, workers), config.timeouts.score_seconds)
    everything: Generator | GroupGeneration = generator
    if workers.size > 1:
        nodes = config.services.actor.nodes
        everything = join_ranks(generator, generation, actor.status, workers, nodes, config.timeouts, credentials)
    return ActorServicer(actor, compute, threads, monitor.is_lost, generation, everything, commands=commands)


def _critic(config: Config, access: Callable[[str], BufferAccess], workers: Workers) -> Critic:
    return Critic(
        config.critic,
        config.critic_model,
        device_of(config.services.critic, workers.rank),
        run_root(config),
        lambda run: access(run).experience,
        config.run.seed,
        num_update_threads(config, Role.CRITIC),
        limits_of(config, Role.CRITIC, workers.rank),
        workers,
        config.services.critic.offload,
    )


def _reference(config: Config, workers: Workers) -> Reference:
    return Reference(
        config.reference_model,
        config.reference.dtype or config.actor.dtype,
        device_of(config.services.reference, workers.rank),
        config.reference.micro_batch_tokens,
        workers,
        run_root(config),
    )


def slice_writer(config: Config, workers: Workers, groups: GroupSettings | None) -> SliceWriter | None:
    """Return this rank's part of publications if the ranks of each machine can share memory, otherwise None.

    All ranks must call it. ``groups``: how they send to generators, if they do. Those above 0 begin to follow rank 0.
    """
    if workers.size == 1:
        return None
    machines = workers.exchange(machine())
    if not all(machines):
        return None
    firsts, senders = [machines.index(each) for each in machines], None
    # Imported here because a single process does not need torch.distributed.
    from quartet.models.workers.group import WorkerGroup, store_connection

    assert isinstance(workers, WorkerGroup)
    if any(firsts) and groups is None:
        groups = GroupSettings(timeout=config.recovery.hang_timeout_seconds)
    if groups is not None:
        senders = GroupSenders(groups, workers.rank, workers.size, store_connection())
    host = rank_host(config.services.actor.nodes, os.environ)
    writer = SliceWriter(workers, firsts=firsts, senders=senders, host=host)
    if senders is not None and workers.rank:
        senders.follow(writer.memory)
    return writer


def set_up_thread(threads: int, workers: Workers) -> Callable[[], None]:
    """Return the initializer of a thread that computes with ``threads`` CPU threads, on the device of this rank."""

    def initialize() -> None:
        set_num_threads(threads)
        workers.set_up_thread()

    return initialize


def device_of(service: ServiceConfig, rank: int = 0) -> str:
    """Return the torch device of a rank of a service. Raises ConfigError if the machine lacks one of the service's devices.

    Every rank checks how many there are, but starts CUDA on its own device only: a start takes memory of the device, and a
    device in exclusive mode admits one process. Rank 0 reports the error of another rank.
    """
    device = device_of_rank(service, rank)
    if device is None:
        return "cpu"
    available = torch.cuda.device_count()
    if missing := [index for index in service.devices if index >= available]:
        raise ConfigError(
            f"devices {list(service.devices)}: this machine has {available} CUDA devices and lacks {missing}; give [] for the CPU"
        )
    check_gpu(device)
    return f"cuda:{device}"


def limits_of(config: Config, role: Role, rank: int = 0) -> UpdateLimits:
    """Return the limits of a role's updates in this run, in one of its ranks."""
    on_gpu = bool(getattr(config.services, role).devices)
    generates = on_gpu and role is Role.ACTOR and generates_on_its_device(config)
    memory = role_memory(config, role) if generates or (role is Role.ACTOR and shares_gpu_memory(config)) else None
    return UpdateLimits(
        max_sequence_tokens=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
        trains_entropy=config.algorithm.trains_entropy,
        num_sharers=num_memory_sharers(config, role, rank),
        share=gpu_share(config, role, rank) if on_gpu else None,
        max_micro_batch_tokens=MAX_MICRO_BATCH_TOKENS_GPU if on_gpu else MAX_MICRO_BATCH_TOKENS,
        cache=torch_cache_bytes(config) if generates else 0,
        cache_shape=cache_shape(config),
        copy=memory.copy if memory is not None else 0,
    )


def run_root(config: Config) -> Path:
    """Return the directory that saves are confined to."""
    return config.run_directory.absolute()
