"""Which address a service listens on, and how many threads it computes with."""

from __future__ import annotations

from typing import Any

import pytest

from quartet import topology
from quartet.config import Config, ServiceConfig, parse_config
from quartet.topology import cores, listen_address, threads_of, update_threads_of
from quartet.types import MODEL_ROLES, Role


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


@pytest.mark.parametrize(("found", "share"), [(1, 1), (2, 1), (4, 1), (8, 2), (9, 2), (64, 16)])
def test_services_started_here_share_the_cores(found: int, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "cores", lambda: found)
    assert [threads_of(config(), role) for role in MODEL_ROLES] == [share] * 4
    assert threads_of(config(), Role.ORCHESTRATOR) == 1


def test_a_service_elsewhere_leaves_its_share_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "cores", lambda: 12)
    elsewhere = config(reward={"address": "far:1"}, critic={"address": "far:2"})
    assert threads_of(elsewhere, Role.ACTOR) == 6
    # On its own machine the reward model shares with nobody who runs elsewhere.
    assert threads_of(elsewhere, Role.REWARD) == 4


def test_told_threads_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "cores", lambda: 8)
    told = config(actor={"threads": 5})
    assert (threads_of(told, Role.ACTOR), update_threads_of(told, Role.ACTOR)) == (5, 5)


@pytest.mark.parametrize(("estimator", "share"), [("gae", 4), ("rloo", 8)])
def test_services_that_learn_share_the_cores_while_they_do(
    estimator: str, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology, "cores", lambda: 8)
    assert update_threads_of(config(estimator), Role.ACTOR) == share


def test_a_critic_elsewhere_leaves_the_cores_to_the_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "cores", lambda: 8)
    assert update_threads_of(config(critic={"address": "far:2"}), Role.ACTOR) == 8


def test_there_is_at_least_one_core() -> None:
    assert cores() >= 1


@pytest.mark.parametrize(
    ("service", "expected"),
    [
        (ServiceConfig(), "127.0.0.1:0"),
        (ServiceConfig(address="gpu-box:7001"), "127.0.0.1:7001"),
        (ServiceConfig(address="gpu-box:7001", listen="0.0.0.0:7002"), "0.0.0.0:7002"),
        (ServiceConfig(listen="[::1]:0"), "[::1]:0"),
    ],
)
def test_a_service_listens_as_told_or_on_loopback(service: ServiceConfig, expected: str) -> None:
    assert listen_address(service) == expected
