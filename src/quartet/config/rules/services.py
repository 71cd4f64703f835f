"""Conditions on the services: their addresses, processes and devices."""

from __future__ import annotations

from quartet.config.deployment import OffloadConfig, ServiceConfig
from quartet.config.rewards import is_encrypted_or_local
from quartet.config.section import is_loopback
from quartet.config.tree import ConfigTree


def check_processes(config: ConfigTree) -> None:
    """Raise ValueError if a service cannot have its processes or devices."""
    for name in ("actor", "critic", "reward", "reference"):
        service: ServiceConfig = getattr(config.services, name)
        devices = list(service.devices)
        if service.processes > 1 and devices:
            raise ValueError(
                f"services.{name}.processes {service.processes}: counts processes on CPUs, and services.{name}.devices "
                f"{devices} starts one process per device; set processes 1, or devices []"
            )
        if repeated := sorted({device for device in devices if devices.count(device) > 1}):
            raise ValueError(
                f"services.{name}.devices {devices}: {repeated} given more than once; each rank needs another device"
            )
        service.parallel.check(f"services.{name}", service)
        if name in ("actor", "critic") and getattr(config, name).compile and service.parallel.tensor > 1:
            raise ValueError(
                f"{name}.compile: layers of which each rank computes slices cannot be compiled; set {name}.compile false, or "
                f"services.{name}.parallel.tensor 1"
            )
        if name in ("actor", "critic") and service.num_ranks > 1 and (lora := getattr(config, name).lora) and lora.dora:
            raise ValueError(
                f"{name}.lora.dora: needs whole weights for their norms, and services.{name} divides them over "
                f"{service.num_ranks} ranks; use one process or device, or set {name}.lora.dora false"
            )
        kind = getattr(config, name).optimizer.kind if name in ("actor", "critic") else "adamw"
        if kind != "adamw" and service.num_ranks > 1:
            raise ValueError(
                f"{name}.optimizer.kind {kind}: needs whole weights, and services.{name} divides them over {service.num_ranks} "
                "ranks; use one process or device, or set kind adamw"
            )
        if kind != "adamw" and service.offload.optimizer:
            raise ValueError(
                f"services.{name}.offload.optimizer: moves the moments of AdamW only; set it false, or "
                f"{name}.optimizer.kind adamw"
            )
        if name in ("reward", "reference") and service.offload != OffloadConfig():
            raise ValueError(f"services.{name}.offload: only actor and critic are trained; leave it out")
        if service.offload.parameters and len(devices) == 1:
            raise ValueError(
                f"services.{name}.offload.parameters: a model on one device keeps its parameters there; give several "
                "devices, or set parameters false and optimizer true"
            )
        if service.num_ranks == 1:
            continue
        key, one = ("devices", "one device") if devices else ("processes", "1")
        setting = f"services.{name}.{key} {devices or service.processes}"
        if name == "reward" and not config.reward.has_model_only:
            raise ValueError(
                f"{setting}: several processes hold a model together, and the reward has another source; set {key} to "
                f"{one}, or give models only"
            )
        if name == "actor" and config.rollout.engine == "triton":
            raise ValueError(
                f"{setting}: engine triton needs an actor with all of its weights in one process; set {key} to {one}, or "
                "another rollout.engine"
            )
        if name == "actor" and len(devices) == 2 and config.rollout.max_off_policy_steps and not config.has_generators:
            first, second = devices
            raise ValueError(
                f"{setting}: with rollout.max_off_policy_steps this could mean to train on both devices, or to train on one "
                f"and generate on the other. To generate on device {second}, set services.actor.devices [{first}], "
                f"rollout.generators 1 and services.generator.devices [{second}]. To train on both, let generators generate "
                "(rollout.generators), which may share a device with the actor"
            )


def check_reward_addresses(config: ConfigTree) -> None:
    """Raise ValueError if a reward source would be called without encryption."""
    for section, source in config.reward.sources.items():
        for key, url in source.urls.items():
            has_tls = source.service is not None and config.security.certificates is not None
            if not has_tls and not is_encrypted_or_local(url) and not config.security.allow_plaintext:
                raise ValueError(
                    f"{section}.{key} {url}: not a loopback address, and calls are not encrypted; use TLS, or set "
                    "security.allow_plaintext"
                )


def check_environment(config: ConfigTree) -> None:
    """Raise ValueError if environment and rollout.max_turns contradict each other."""
    setting, environment = f"rollout.max_turns {config.rollout.max_turns}", config.environment
    if not config.has_environment:
        named = {
            f"environment.class_name {environment.class_name}": environment.class_name is not None,
            f"environment.kind {environment.kind}": environment.kind != "class",
        }
        for key in (key for key, given in named.items() if given):
            raise ValueError(
                f"{key}: not used with {setting}; set rollout.max_turns to the maximum number of turns, or remove it"
            )
        return
    if config.has_traffic:
        _check_traffic(config)
    elif config.has_agents:
        _check_agent(config)
    elif environment.class_name is None and config.services.environment.address is None:
        raise ValueError(
            f"environment.class_name: missing; {setting} needs an environment: name its class, or set "
            "services.environment.address to the address of one that runs"
        )


def _check_agent(config: ConfigTree) -> None:
    """Raise ValueError if the agent is missing, or if it and the policy could not reach each other safely."""
    agent = config.environment.agent
    if not agent.kind and config.services.environment.address is None:
        raise ValueError(
            "environment.agent: names no agent; give one of command, url and function, or set services.environment.address to "
            "the address of a service that runs agents"
        )
    if agent.url is not None and not is_encrypted_or_local(agent.url) and not config.security.allow_plaintext:
        raise ValueError(
            f"environment.agent.url {agent.url}: not a loopback address, and calls are not encrypted; use https://, or set "
            "security.allow_plaintext"
        )
    _check_endpoint(config)
    port = (agent.listen or "127.0.0.1:0").rpartition(":")[2]
    if port == "0" and not (agent.advertise or ":0").endswith(":0"):
        raise ValueError(
            f"environment.agent.advertise {agent.advertise}: the process that generates listens on a free port; set a port in "
            "environment.agent.listen, or port 0 here for the same one"
        )


def check_prompts(config: ConfigTree) -> None:
    """Raise ValueError unless the run has prompts, or users who send them."""
    given = config.data.prompts is not None or bool(config.data.sets)
    if config.has_traffic and given:
        raise ValueError(
            f"data.{'sets' if config.data.sets else 'prompts'}: not used with environment.kind traffic, whose prompts come from "
            "users; remove it"
        )
    if not config.has_traffic and not given:
        raise ValueError("data: expected either prompts, the path of a file, or sets, a list of sets of prompts")


def _check_traffic(config: ConfigTree) -> None:
    """Raise ValueError if the settings of steps do not fit sessions of users, each of which exists once."""
    rollout, kind = config.rollout, "environment.kind traffic"
    if config.services.environment.address is not None:
        raise ValueError(f"services.environment.address: not used with {kind}, which has no such service; remove it")
    if rollout.samples_per_prompt != 1 or rollout.extra_samples or rollout.dynamic_sampling:
        raise ValueError(
            f"{kind}: each session of a user is one trajectory, so there are no groups; set rollout.samples_per_prompt 1, "
            "extra_samples 0 and dynamic_sampling false"
        )
    if config.num_greedy_baselines:
        raise ValueError(
            f"algorithm.estimator {config.algorithm.estimator}: needs a second, greedy answer to each session; set an estimator "
            f"without one for {kind}"
        )
    if not rollout.in_flight_updates:
        raise ValueError(
            f"{kind}: users are answered while the policy is trained; set rollout.generators to 1 or more, "
            "rollout.max_off_policy_steps to the number of updates that a session may be old, and rollout.in_flight_updates true"
        )
    _check_endpoint(config)


def _check_endpoint(config: ConfigTree) -> None:
    """Raise ValueError if the endpoint of the processes that generate would be unsafe or ambiguous."""
    agent, encrypted = config.environment.agent, config.security.certificates is not None
    host, _, port = (agent.listen or "127.0.0.1:0").rpartition(":")
    if not is_loopback(host) and not encrypted and not config.security.allow_plaintext:
        raise ValueError(
            f"environment.agent.listen {agent.listen}: not a loopback address, and calls are not encrypted; listen on "
            "127.0.0.1, give security.certificates, or set security.allow_plaintext true inside a network that you trust"
        )
    ranks = 0 if config.has_generators else config.services.actor.num_ranks
    if port != "0" and max(config.rollout.generators, ranks) > 1:
        raise ValueError(
            f"environment.agent.listen {agent.listen}: several processes on this machine generate, and each needs a port; set "
            "port 0"
        )


def check_services(config: ConfigTree) -> None:
    """Raise ValueError if an address or the buffer does not fit the services."""
    for name in ("actor", "critic"):
        if not isinstance(getattr(config.services, name).address, str | None):
            raise ValueError(
                f"services.{name}.address: one process has the trained model; give one HOST:PORT. Lists are for reward and "
                "reference"
            )
    if not config.has_reference and config.services.reference.address:
        raise ValueError(
            "services.reference.address: the actor serves the reference, with its adapter disabled; leave it null, "
            "or set reference.model"
        )
    if config.buffer.url is None and (config.services.actor.address or config.services.critic.address):
        raise ValueError(
            "buffer.url: an actor or critic at an address needs a Redis server that it shares with this run; set buffer.url"
        )
