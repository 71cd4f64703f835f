"""Listen addresses of services, and their shares of cores and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quartet.config import layout
from quartet.config.deployment import ServiceConfig
from quartet.config.layout import (
    generates_in_actor,
    listen_address,
    num_memory_sharers,
    num_threads,
    num_update_threads,
)
from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.contract.status import MODEL_ROLES, Role
from quartet.system.machine import available_cores, free_memory_bytes


def config(estimator: str = "gae", **services: dict[str, Any]) -> Config:
    tree = {
        "data": {"prompts": "p"},
        "actor": {"model": "a"},
        "reward": {"model": "r"},
        "buffer": {"url": "redis://far"},
        "services": services,
        "algorithm": {"estimator": estimator},
        "rollout": {"samples_per_prompt": 2},
    }
    return parse_config(tree, "test")


@pytest.mark.parametrize(("result", "share"), [(1, 1), (2, 1), (4, 1), (8, 2), (9, 2), (64, 16)])
def test_local_services_share_the_cores(result: int, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "available_cores", lambda: result)
    assert [num_threads(config(), role) for role in MODEL_ROLES] == [share] * 4
    assert num_threads(config(), Role.ORCHESTRATOR) == 1


def test_a_remote_service_takes_no_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "available_cores", lambda: 12)
    remote = config(reward={"address": "far:1"}, critic={"address": "far:2"})
    assert num_threads(remote, Role.ACTOR) == 6
    # On its own machine, the reward model does not share cores with processes on other machines.
    assert num_threads(remote, Role.REWARD) == 4


def test_configured_threads_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "available_cores", lambda: 8)
    configured = config(actor={"num_threads": 5})
    assert (num_threads(configured, Role.ACTOR), num_update_threads(configured, Role.ACTOR)) == (5, 5)


@pytest.mark.parametrize(("estimator", "share"), [("gae", 4), ("rloo", 8)])
def test_trained_services_share_all_cores_during_an_update(
    estimator: str, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "available_cores", lambda: 8)
    assert num_update_threads(config(estimator), Role.ACTOR) == share


def test_the_ranks_of_an_actor_share_its_cores_during_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "available_cores", lambda: 8)
    group = config(critic={"address": "far:2"}, actor={"processes": 2})
    assert num_update_threads(group, Role.ACTOR) == 4


def test_the_actor_gets_all_cores_if_the_critic_is_remote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "available_cores", lambda: 8)
    assert num_update_threads(config(critic={"address": "far:2"}), Role.ACTOR) == 8


def test_the_processes_of_a_group_divide_its_share_of_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "available_cores", lambda: 16)
    group = config(actor={"processes": 2})
    assert [num_threads(group, role) for role in MODEL_ROLES] == [2, 4, 4, 4]
    assert [num_memory_sharers(group, role) for role in MODEL_ROLES] == [5] * 4


def test_each_rank_of_a_group_on_gpus_shares_the_memory_of_its_own_device() -> None:
    group = config(actor={"devices": [0, 1, 2]}, critic={"devices": [2, 3]}, reward={"devices": [2]})
    assert group.services.actor.num_ranks == 3
    assert [num_memory_sharers(group, Role.ACTOR, rank) for rank in range(3)] == [1, 1, 3]
    assert [num_memory_sharers(group, Role.CRITIC, rank) for rank in range(2)] == [3, 1]
    # A second machine has the same devices.
    assert num_memory_sharers(group, Role.ACTOR, 5) == 3


def test_an_actor_of_several_processes_generates_with_separate_weights() -> None:
    assert not generates_in_actor(config())
    assert generates_in_actor(config(actor={"processes": 2}))
    assert generates_in_actor(config(actor={"devices": [0, 1]}))
    assert generates_in_actor(config(actor={"nodes": 2, "address": "box:1"}))
    assert not generates_in_actor(config(actor={"processes": 2}, generators=["box:1"]))


def test_there_is_at_least_one_core() -> None:
    assert available_cores() >= 1


@pytest.mark.parametrize(
    ("service", "expected"),
    [
        (ServiceConfig(), "127.0.0.1:0"),
        (ServiceConfig(address="gpu-box:7001"), "127.0.0.1:7001"),
        (ServiceConfig(address="gpu-box:7001", listen="0.0.0.0:7002"), "0.0.0.0:7002"),
        (ServiceConfig(listen="[::1]:0"), "[::1]:0"),
    ],
)
def test_a_service_listens_at_its_configured_address_or_on_loopback(service: ServiceConfig, expected: str) -> None:
    assert listen_address(service) == expected


@pytest.mark.parametrize(
    ("services", "expected"),
    [
        ({}, [4, 4, 4, 4]),
        # Critic and reward model share the memory of the second GPU.
        ({"actor": {"devices": [0]}, "critic": {"devices": [1]}, "reward": {"devices": [1]}}, [1, 2, 2, 1]),
        # A group of two shares its GPUs with the critic, and with the reward model.
        ({"actor": {"devices": [0, 1]}, "critic": {"devices": [0]}, "reward": {"devices": [1]}}, [2, 2, 2, 1]),
        # A remote critic. In its view, services without an address are on its machine.
        ({"critic": {"address": "far:1"}}, [3, 4, 3, 3]),
        ({role: {"address": f"{role}:1"} for role in MODEL_ROLES}, [1, 1, 1, 1]),
        ({role: {"address": f"box:{port}"} for port, role in enumerate(MODEL_ROLES, 1)}, [4, 4, 4, 4]),
        ({"actor": {"address": "127.0.0.1:1"}, "critic": {"address": "localhost:2"}}, [4, 4, 4, 4]),
    ],
)
def test_memory_is_shared_with_the_services_of_the_same_machine_and_device(
    services: dict[str, Any], expected: list[int]
) -> None:
    assert [num_memory_sharers(config(**services), role) for role in MODEL_ROLES] == expected


@pytest.mark.parametrize(
    ("actor", "generators", "devices", "expected"),
    [
        ([0], 2, [0, 1], 2),
        ([0], 2, [1, 2], 1),
        ([0], 2, [0, 0], 3),
        # In the memory of the machine, the number of generators does not change the run.
        ([], 4, [], 1),
    ],
)
def test_generators_share_the_memory_of_a_gpu(
    actor: list[int], generators: int, devices: list[int], expected: int
) -> None:
    others: dict[str, dict[str, Any]] = {role: {"devices": [7]} for role in ("critic", "reward", "reference")}
    tree = config(actor={"devices": actor}, generator={"devices": devices}, **others).model_dump()
    tree["rollout"]["generators"] = generators
    assert num_memory_sharers(parse_config(tree, "test"), Role.ACTOR) == expected


def system(root: Path, available: int, limit: str = "max", used: int = 0, inactive_file: int = 0) -> Path:
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(f"MemTotal: 999 kB\nMemAvailable: {available} kB\n")
    group = root / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\n")
    return root


def test_available_memory_is_free(tmp_path: Path) -> None:
    assert free_memory_bytes(system(tmp_path, available=500)) == 500 * 1024


def test_the_control_group_limits_free_memory(tmp_path: Path) -> None:
    assert free_memory_bytes(system(tmp_path, 500, limit="9000", used=6000, inactive_file=1000)) == 4000


def test_a_full_control_group_has_no_free_memory(tmp_path: Path) -> None:
    assert free_memory_bytes(system(tmp_path, 500, limit="9000", used=9500)) == 0


def test_a_limit_above_the_available_memory_has_no_effect(tmp_path: Path) -> None:
    assert free_memory_bytes(system(tmp_path, 5, limit="900000", used=0)) == 5 * 1024


def test_without_meminfo_all_memory_counts_as_free(tmp_path: Path) -> None:
    assert free_memory_bytes(tmp_path) > 0
