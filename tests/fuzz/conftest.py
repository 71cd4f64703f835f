"""The ground of ``make fuzz-rpc`` within this process: the same servers over TCP, without the seconds that processes take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from quartet.buffer.connection import connect
from quartet.config import parse_config
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.server import HostedRole, Server
from quartet.services.factories import build_model_role
from quartet.services.orchestrator.servicer import OrchestratorServicer
from quartet.types import MODEL_ROLES, Role
from tests.fuzz.ground import LIVE, Ground, Target, root_of, scored_by_both, tree
from tests.training.runs import fleet, orchestrator


def served(stack: ExitStack, role: HostedRole) -> str:
    """Its address, until the stack ends."""
    server = Server([role], "127.0.0.1:0")
    stack.callback(server.stop, 5.0)
    return server.address


@pytest.fixture
def ground(tmp_path: Path, redis_url: str) -> Iterator[Ground]:
    torch.set_num_threads(1)
    result = Ground(tmp_path, redis_url)
    with ExitStack() as stack:
        for role in MODEL_ROLES:
            config = tree(tmp_path, redis_url)
            config["run"]["directory"] = str(tmp_path / f"runs-{role}")
            built = build_model_role(role, parse_config(scored_by_both(config), "test"), ComputeThread(), threads=1)
            result.targets.append(Target(role, served(stack, built), root_of(config, tmp_path)))
        live = tree(tmp_path, redis_url)
        live["run"]["name"] = LIVE
        services = stack.enter_context(fleet(parse_config(live, "test")))
        going = stack.enter_context(orchestrator(services.config))
        address = served(stack, OrchestratorServicer(going.board, going.control, going.live_settings))
        result.targets.append(Target(Role.ORCHESTRATOR, address, services.config.run_directory))
        result.seal()
        yield result
        client = connect(redis_url)
        for key in client.scan_iter(match=f"quartet:{LIVE}:*"):
            client.delete(key)
        client.close()
