"""The servers of ``python -m tests.fuzz`` in this process, over TCP, without the start-up time of separate processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from quartet.buffer.connection import connect
from quartet.config.environment import EnvironmentConfig
from quartet.config.loading import parse_config
from quartet.contract.status import MODEL_ROLES, Role
from quartet.environments.agents import AgentHost
from quartet.environments.host import EnvironmentHost
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.security.credentials import LOCAL
from quartet.rpc.server import HostedRole, Server
from quartet.services.environment.agents.servicer import AgentServicer
from quartet.services.environment.servicer import EnvironmentServicer
from quartet.services.generator.factory import build_generator
from quartet.services.orchestrator.servicer import OrchestratorServicer
from quartet.services.profile.servicer import ProfileServicer
from quartet.services.roles import build_model_role
from tests.fuzz.environment import (
    LIVE,
    FuzzEnvironment,
    Target,
    config_tree,
    create_run_directory,
    environment_config_tree,
    generator_config_tree,
    published_policies,
    with_combined_reward,
)
from tests.training.runs import fleet, orchestrator


def serve(stack: ExitStack, role: HostedRole, compute: ComputeThread | None = None) -> str:
    """Serve a role until the stack ends, with profiles of ``compute`` if it is given. Return the address."""
    profiles = {} if compute is None else {"register": ProfileServicer(compute).register}
    server = Server([role], "127.0.0.1:0", **profiles)
    stack.callback(server.stop, 5.0)
    return server.address


@pytest.fixture
def environment(tmp_path: Path, redis_url: str) -> Iterator[FuzzEnvironment]:
    torch.set_num_threads(1)
    result = FuzzEnvironment(tmp_path, redis_url)
    with ExitStack() as stack:
        for role in MODEL_ROLES:
            config = config_tree(tmp_path, redis_url)
            config["run"]["directory"] = str(tmp_path / f"runs-{role}")
            compute = ComputeThread()
            built = build_model_role(role, parse_config(with_combined_reward(config), "test"), compute, threads=1)
            trained = compute if role in (Role.ACTOR, Role.CRITIC) else None
            result.targets.append(Target(role, serve(stack, built, trained), create_run_directory(config, tmp_path)))
        policies = stack.enter_context(published_policies(tmp_path))
        generator = build_generator(
            parse_config(generator_config_tree(tmp_path, redis_url), "test"), ComputeThread(), 1, LOCAL
        )
        result.targets.append(Target(Role.GENERATOR, serve(stack, generator), policies=policies))
        played = parse_config(environment_config_tree(tmp_path, redis_url), "test")
        host = EnvironmentHost(played.environment, played.actor.model)
        stack.callback(host.close)
        result.targets.append(Target(Role.ENVIRONMENT, serve(stack, EnvironmentServicer(host, 1))))
        agents = EnvironmentConfig.model_validate(
            {"kind": "agent", "agent": {"command": ["true"], "timeout_seconds": 5}}
        )
        result.targets.append(Target(Role.ENVIRONMENT, serve(stack, AgentServicer(AgentHost(agents), 1))))
        live = config_tree(tmp_path, redis_url)
        live["run"]["name"] = LIVE
        services = stack.enter_context(fleet(parse_config(live, "test")))
        active = stack.enter_context(orchestrator(services.config))
        address = serve(stack, OrchestratorServicer(active.board, active.control, active.live_settings))
        result.targets.append(Target(Role.ORCHESTRATOR, address, services.config.run_directory))
        result.seal()
        yield result
        client = connect(redis_url)
        for key in client.scan_iter(match=f"quartet:{LIVE}:*"):
            client.delete(key)
        client.close()
