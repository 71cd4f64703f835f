"""Roles and listen addresses of a run's services, and their shares of a machine. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from quartet.config.deployment import (
    EnvironmentServiceConfig,
    GeneratorServiceConfig,
    OrchestratorServiceConfig,
    ServiceConfig,
)
from quartet.config.root import Config
from quartet.config.section import is_loopback
from quartet.contract.status import MODEL_ROLES, TRAINED_ROLES, Role
from quartet.errors import ConfigError
from quartet.system.machine import available_cores


def listen_address(
    service: ServiceConfig | OrchestratorServiceConfig | GeneratorServiceConfig | EnvironmentServiceConfig,
) -> str:
    """Return the listen address of a local service: configured, or on loopback at its address's port or a free one."""
    if service.listen is not None:
        return service.listen
    addresses = service.addresses if isinstance(service, ServiceConfig | EnvironmentServiceConfig) else ()
    return f"127.0.0.1:{addresses[0].rpartition(':')[2] if len(addresses) == 1 else 0}"


def check_listen_address(listen: str, allow_plaintext: bool) -> None:
    """Raise ConfigError for an address beyond loopback, unless plaintext is allowed explicitly."""
    if not allow_plaintext and not is_loopback(listen.rpartition(":")[0]):
        raise ConfigError(
            f"listen {listen}: not a loopback address, and calls are not encrypted; listen on 127.0.0.1, give "
            "security.certificates, or set security.allow_plaintext true inside a network that you trust"
        )


def model_roles(config: Config) -> tuple[Role, ...]:
    """Return the model services of this run. Fewer are needed with an estimator without a critic, with reward.source none, or
    with an actor that serves the reference.
    """
    absent = {
        Role.CRITIC: not config.has_critic,
        Role.REWARD: not config.has_reward,
        Role.REFERENCE: not config.has_reference,
    }
    return tuple(role for role in MODEL_ROLES if not absent.get(role))


def service_roles(config: Config) -> tuple[Role, ...]:
    """Return the services of this run that have an address: the model services and the environment."""
    return (*model_roles(config), *((Role.ENVIRONMENT,) if config.has_environment_service else ()))


def num_threads(config: Config, role: Role) -> int:
    """Return the CPU threads of a service: configured, or its share of the cores among the local model services.

    More threads than cores slow every service down, because idle threads of a pool spin.
    """
    if role is Role.ORCHESTRATOR:
        return 1
    configured: int | None = getattr(config.services, role).num_threads
    if configured is not None:
        return configured
    if role is Role.ENVIRONMENT:
        return 1
    if role is Role.GENERATOR:
        return max(1, available_cores() // max(1, config.rollout.generators))
    return _share(config, role, model_roles(config))


def generates_in_actor(config: Config) -> bool:
    """Return whether the actor has an engine with separate weights: to generate during updates, or as its own are sharded."""
    return generates_during_updates(config) or (config.services.actor.num_ranks > 1 and not config.has_generators)


def generates_during_updates(config: Config) -> bool:
    """Return whether the actor's processes generate while they are trained."""
    return config.rollout.max_off_policy_steps > 0 and not config.has_generators


def devices_of_generator(config: Config, index: int) -> tuple[int, ...]:
    """Return the CUDA devices of one of the local generators, by its index from 0."""
    devices = config.services.generator.devices
    count = len(devices) // max(1, config.rollout.generators)
    return devices[index * count : (index + 1) * count]


def num_update_threads(config: Config, role: Role) -> int | None:
    """Return the CPU threads of an update: configured, or the service's share of the cores among the local trained services.

    The scoring services are idle during an update. Return None, which leaves the number unchanged, if the actor also generates
    meanwhile: torch has one number of threads for the whole process.
    """
    if generates_during_updates(config):
        return None
    configured: int | None = getattr(config.services, role).num_threads
    return configured or _share(config, role, [other for other in model_roles(config) if other in TRAINED_ROLES])


def device_of_rank(service: ServiceConfig, rank: int) -> int | None:
    """Return the CUDA device of a rank of a service, None on the CPU. Each machine of a group has the same devices."""
    return service.devices[rank % len(service.devices)] if service.devices else None


def num_memory_sharers(config: Config, role: Role, rank: int = 0) -> int:
    """Return how many processes of services, this one included, share the memory of the device of a rank of ``role``."""
    on_gpu = bool(getattr(config.services, role).devices)
    # A group has one process on each of its GPUs, and all of its processes in the memory of the machine.
    return sum(
        1 if on_gpu else getattr(config.services, other).processes for other in memory_sharers(config, role, rank)
    )


def memory_sharers(config: Config, role: Role, rank: int = 0) -> list[Role]:
    """Return the services, ``role`` first, that share the memory of the device of a rank of ``role``.

    Generators count on a GPU only: in the memory of the machine, their number must not change the run.
    """
    own: ServiceConfig = getattr(config.services, role)
    device = device_of_rank(own, rank)
    services = {other: getattr(config.services, other) for other in model_roles(config) if other is not role}
    sharers = [
        other
        for other, service in services.items()
        if (service.address is None or _machines(service) & _machines(own))
        and (device in service.devices if own.devices else not service.devices)
    ]
    if own.devices and "" in _machines(own):
        devices = [devices_of_generator(config, index) for index in range(config.rollout.generators)]
        sharers += [Role.GENERATOR for each in devices if device in each]
    return [role, *sharers]


def _share(config: Config, role: Role, roles: Sequence[Role]) -> int:
    local = [other for other in roles if getattr(config.services, other).address is None or other is role]
    ranks: int = getattr(config.services, role).num_ranks
    return max(1, available_cores() // len(local) // ranks)


def _machines(service: ServiceConfig) -> set[str]:
    """Return the hosts of a service, "" for this machine."""
    hosts = {address.rpartition(":")[0] for address in service.addresses} or {""}
    return {"" if is_loopback(host) else host for host in hosts}
