"""A network that fails for a while or is slow only delays a run, which stays bit-identical."""

from __future__ import annotations

import time

import pytest

from quartet.contract.status import Role
from quartet.errors import ServiceUnavailable
from quartet.services.orchestrator.algorithm.update_request import start_update
from quartet.services.orchestrator.service_clients import ServiceClients
from tests.faults.network import SERVICES_TO_BUFFER, SETTINGS, fault_at, heal_after, network
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, assert_same, orchestrator
from tests.waiting import wait_until

LIMIT = 120.0
"""Maximum duration of a run in seconds, with network faults of up to 30 seconds."""
LINKS_AND_MOMENTS = [
    ("actor", "generate"),
    ("actor", "update"),
    ("critic", "generate"),
    ("critic", "update"),
    ("reward", "generate"),
    ("reference", "generate"),
    ("buffer", "generate"),
    ("buffer", "commit"),
    (SERVICES_TO_BUFFER, "generate"),
    (SERVICES_TO_BUFFER, "update"),
]
"""Faulty links, each with the moment of the fault. The tests that are not slow have some of them."""


def run_with_fault(
    link: str,
    moment: str,
    how: str,
    seconds: float,
    make: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    **recovery: float,
) -> Run:
    """Run training with a fault in one link, after the link has carried a request and before it carries the response.

    ``how``: the method of ``Proxy`` that injects the fault.
    """
    faulty: list[str] = []
    with network(make(**SETTINGS, recovery={"backoff_seconds": 0.2, **recovery})) as parts:
        proxy = parts.links[link]

        def inject() -> None:
            faulty.append(link)
            heal_after(seconds, proxy)
            getattr(proxy, how)()

        def before_next_response() -> None:
            proxy.before_response = inject

        with fault_at(moment, before_next_response, monkeypatch), orchestrator(parts.config) as active:
            run = active.finish(LIMIT)
    assert faulty, "nothing crossed the link"
    return run


@pytest.mark.parametrize(("link", "moment"), [("actor", "generate"), ("buffer", "commit")])
def test_a_one_second_network_outage_delays_the_run_and_changes_nothing(
    link: str, moment: str, make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = time.monotonic()
    run = run_with_fault(link, moment, "silence", 1.0, make, monkeypatch)
    assert_same(run, undisturbed)
    assert run.progress.recoveries == 0, run.progress.notes
    assert time.monotonic() - start > 1.0


@pytest.mark.parametrize(("link", "moment"), [("actor", "generate"), (SERVICES_TO_BUFFER, "update")])
def test_broken_connections_are_reconnected_and_the_step_is_repeated(
    link: str, moment: str, make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with_fault(link, moment, "reset", 0.2, make, monkeypatch)
    assert_same(run, undisturbed)
    assert run.progress.recoveries >= 1


@pytest.mark.parametrize("moment", [pytest.param("generate", marks=pytest.mark.slow), "update"])
def test_the_run_waits_for_a_buffer_that_is_unreachable_for_longer_than_all_retries(
    moment: str, make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = SERVICES_TO_BUFFER
    run = run_with_fault(link, moment, "reset", 2.0, make, monkeypatch, backoff_seconds=0.01, max_recoveries=3)
    assert_same(run, undisturbed)
    assert run.progress.recoveries >= 1


def test_a_service_reports_an_unreachable_buffer_until_it_reaches_it_again(make: MakeConfig) -> None:
    with network(make(**SETTINGS)) as parts:
        service_clients, proxy = ServiceClients(parts.config), parts.links[SERVICES_TO_BUFFER]

        def roles_without_buffer() -> set[Role]:
            start = time.monotonic()
            statuses = [
                client.wait_until_ready()
                for client in (service_clients.actor, service_clients.critic, service_clients.reward)
                if client
            ]
            assert time.monotonic() - start < 1.0
            return {status.role for status in statuses if status.buffer_unreachable}

        assert roles_without_buffer() == set()
        proxy.reset()
        for client in service_clients.trained:
            with pytest.raises(ServiceUnavailable, match="rollout buffer"):
                start_update(client, parts.config, 1, 1).result()
        assert roles_without_buffer() == {Role.ACTOR, Role.CRITIC}
        proxy.heal()
        wait_until(lambda: roles_without_buffer() == set())


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [5.0, 30.0])
@pytest.mark.parametrize(("link", "moment"), LINKS_AND_MOMENTS)
def test_the_run_waits_for_the_end_of_a_longer_network_outage(
    link: str, moment: str, seconds: float, make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same(run_with_fault(link, moment, "silence", seconds, make, monkeypatch), undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(("link", "moment"), LINKS_AND_MOMENTS)
def test_connections_that_stay_silent_are_given_up_within_a_minute(
    link: str, moment: str, make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = time.monotonic()
    run = run_with_fault(link, moment, "forget", 0.0, make, monkeypatch)
    assert_same(run, undisturbed)
    # gRPC detects this after 30 seconds (10 without data, 20 without a response to a ping), the Redis client after 10.
    assert time.monotonic() - start < 60


def test_a_slow_redis_changes_nothing(make: MakeConfig, undisturbed: Run) -> None:
    with network(make(**SETTINGS)) as parts:
        parts.links["buffer"].delay = parts.links[SERVICES_TO_BUFFER].delay = 0.005
        with orchestrator(parts.config) as active:
            run = active.finish(LIMIT)
    assert_same(run, undisturbed)
    assert run.progress.recoveries == 0, run.progress.notes
