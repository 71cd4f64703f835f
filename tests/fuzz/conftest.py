"""The servers of ``make fuzz-rpc`` in this process, over TCP, without the start-up time of separate processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
import torch

from quartet.buffer.connection import connect
from quartet.config import parse_config
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.server import HostedRole, Server
from quartet.rpc.weight_servicer import WeightServicer
from quartet.services.factories import build_model_role
from quartet.services.orchestrator.servicer import OrchestratorServicer
from quartet.types import MODEL_ROLES, Role
from quartet.weight_transfer.source import WeightSource
from tests.fuzz.environment import (
    LIVE,
    FuzzEnvironment,
    Target,
    config_tree,
    create_run_directory,
    with_combined_reward,
)
from tests.training.runs import fleet, orchestrator
from tests.unit.weight_transfer.samples import weights


def serve(stack: ExitStack, role: HostedRole) -> str:
    """Serve a role until the stack ends. Return the address."""
    server = Server([role], "127.0.0.1:0")
    stack.callback(server.stop, 5.0)
    return server.address


def serving_weights(role: HostedRole, source: WeightSource) -> HostedRole:
    """Return the role with the weights of ``source``."""
    register = role.register

    def register_both(server: grpc.Server) -> None:
        register(server)
        WeightServicer(source).register(server)

    role.register = register_both  # type: ignore[method-assign]
    return role


@pytest.fixture
def environment(tmp_path: Path, redis_url: str) -> Iterator[FuzzEnvironment]:
    torch.set_num_threads(1)
    result = FuzzEnvironment(tmp_path, redis_url)
    with ExitStack() as stack:
        for role in MODEL_ROLES:
            config = config_tree(tmp_path, redis_url)
            config["run"]["directory"] = str(tmp_path / f"runs-{role}")
            built = build_model_role(
                role, parse_config(with_combined_reward(config), "test"), ComputeThread(), threads=1
            )
            if role is Role.ACTOR:
                source = WeightSource(num_threads=1)
                stack.callback(source.close)
                source.publish(0, weights())
                built = serving_weights(built, source)
            result.targets.append(Target(role, serve(stack, built), create_run_directory(config, tmp_path)))
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
