"""Reward and reference with replicas: the same run as with one of each, also while replicas are lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from quartet.config.loading import load_config
from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.server import Server
from quartet.run_directory.run_files import RunFiles
from quartet.services.roles import build_model_role
from tests.training.conftest import MakeConfig
from tests.training.runs import assert_same, orchestrator, run_to_completion, services, wait_for

SETTINGS = {"run": {"steps": 4}, "rollout": {"score_batch_size": 2}}


@contextmanager
def with_second_replicas(config: Config) -> Iterator[tuple[Config, dict[Role, Server]]]:
    """Run the services of a config and a second replica of each frozen model. Yield the config and these replicas."""
    with services(config) as addressed:
        second: dict[Role, Server] = {}
        overrides = []
        for role in (Role.REWARD, Role.REFERENCE):
            second[role] = Server([build_model_role(role, config, ComputeThread(), threads=1)], "127.0.0.1:0")
            [first] = getattr(addressed.services, role).addresses
            overrides.append(f"services.{role}.address={json.dumps([second[role].address, first])}")
        for role in ("actor", "critic"):
            overrides.append(f"services.{role}.address={getattr(addressed.services, role).address}")
        try:
            yield load_config(RunFiles(config.run_directory).config, overrides), second
        finally:
            for server in second.values():
                server.stop(0.0)


@pytest.mark.parametrize("lost", [(), (Role.REWARD, Role.REFERENCE)])
def test_replicas_change_no_bit_of_a_run_also_if_they_are_lost(make: MakeConfig, lost: tuple[Role, ...]) -> None:
    undisturbed = run_to_completion(make(**SETTINGS))
    with with_second_replicas(make(**SETTINGS)) as (config, second), orchestrator(config) as running:
        for step, role in enumerate(lost, 1):
            wait_for(running, lambda step=step: running.board.current().step >= step)  # type: ignore[misc]
            second.pop(role).stop(0.0)
        run = running.finish()
    assert_same(run, undisturbed)
    assert run.progress.recoveries == 0
