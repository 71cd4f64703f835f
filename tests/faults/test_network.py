"""A network that fails for a while, or is slow, costs time and nothing else: the run ends with the undisturbed run's bits."""

from __future__ import annotations

import time

import pytest

from quartet.errors import ServiceUnavailable
from quartet.services.orchestrator.algorithm.update_request import start_update
from quartet.services.orchestrator.service_clients import ServiceClients
from quartet.types import Role
from tests.e2e.commands import wait_until
from tests.faults.network import BUFFER_OF_THE_SERVICES, SHORT, heal_after, network, struck
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, assert_same, orchestrator

LIMIT = 120.0
"""Seconds that a run may take, whatever the network does for 30 of them; then it hangs."""
CUTS = [
    ("actor", "generate"),
    ("actor", "update"),
    ("critic", "generate"),
    ("critic", "update"),
    ("reward", "generate"),
    ("reference", "generate"),
    ("buffer", "generate"),
    ("buffer", "commit"),
    (BUFFER_OF_THE_SERVICES, "generate"),
    (BUFFER_OF_THE_SERVICES, "update"),
]
"""Which link is cut, and what it carries then."""


def cut_and_run(
    link: str,
    moment: str,
    how: str,
    seconds: float,
    make: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    **recovery: float,
) -> Run:
    """A run of which one link is cut for a while, right after a request has crossed it and before its answer does."""
    cuts: list[str] = []
    with network(make(**SHORT, recovery={"backoff_seconds": 0.2, **recovery})) as parts:
        proxy = parts.links[link]

        def cut() -> None:
            cuts.append(link)
            heal_after(seconds, proxy)
            getattr(proxy, how)()

        def strike() -> None:
            proxy.before_answer = cut

        with struck(moment, strike, monkeypatch), orchestrator(parts.config) as going:
            run = going.finish(LIMIT)
    assert cuts, "nothing crossed the link"
    return run


@pytest.mark.parametrize(("link", "moment"), CUTS)
@pytest.mark.sampled(3)
def test_a_one_second_network_outage_delays_the_run_and_changes_nothing(
    link: str, moment: str, make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = time.monotonic()
    run = cut_and_run(link, moment, "silence", 1.0, make, monkeypatch)
    assert_same(run, undisturbed)
    assert run.progress.recoveries == 0, run.progress.notes
    assert time.monotonic() - start > 1.0


@pytest.mark.parametrize(("link", "moment"), CUTS)
@pytest.mark.sampled(3)
def test_broken_connections_are_reconnected_and_the_step_is_repeated(
    link: str, moment: str, make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cut_and_run(link, moment, "reset", 0.2, make, monkeypatch)
    assert_same(run, undisturbed)
    assert run.progress.recoveries >= 1


@pytest.mark.parametrize("moment", ["generate", "update"])
def test_the_run_waits_for_a_buffer_that_is_unreachable_for_longer_than_all_retries(
    moment: str, make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = BUFFER_OF_THE_SERVICES
    run = cut_and_run(link, moment, "reset", 2.0, make, monkeypatch, backoff_seconds=0.01, max_recoveries=3)
    assert_same(run, undisturbed)
    assert run.progress.recoveries >= 1


def test_a_service_reports_an_unreachable_buffer_until_it_reaches_it_again(make: MakeConfig) -> None:
    with network(make(**SHORT)) as parts:
        service_clients, proxy = ServiceClients(parts.config), parts.links[BUFFER_OF_THE_SERVICES]

        def cut_off() -> set[Role]:
            start = time.monotonic()
            statuses = [
                client.wait_until_ready()
                for client in (service_clients.actor, service_clients.critic, service_clients.reward)
                if client
            ]
            assert time.monotonic() - start < 1.0
            return {status.role for status in statuses if status.buffer_unreachable}

        assert cut_off() == set()
        proxy.reset()
        for client in service_clients.trained:
            with pytest.raises(ServiceUnavailable, match="rollout buffer"):
                start_update(client, parts.config, 1, 1).result()
        assert cut_off() == {Role.ACTOR, Role.CRITIC}
        proxy.heal()
        assert wait_until(lambda: cut_off() == set(), 20)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [5.0, 30.0])
@pytest.mark.parametrize(("link", "moment"), CUTS)
def test_the_run_waits_for_the_end_of_a_longer_network_outage(
    link: str, moment: str, seconds: float, make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same(cut_and_run(link, moment, "silence", seconds, make, monkeypatch), undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(("link", "moment"), CUTS)
def test_connections_that_stay_silent_are_given_up_within_a_minute(
    link: str, moment: str, make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = time.monotonic()
    run = cut_and_run(link, moment, "forget", 0.0, make, monkeypatch)
    assert_same(run, undisturbed)
    # A service is missed after 30 seconds (10 without a word, 20 for an answer to a ping), Redis after 10.
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("link", ["buffer", BUFFER_OF_THE_SERVICES])
def test_a_slow_redis_changes_nothing(link: str, make: MakeConfig, undisturbed: Run) -> None:
    with network(make(**SHORT)) as parts:
        parts.links[link].delay = 0.02
        with orchestrator(parts.config) as going:
            run = going.finish(LIMIT)
    assert_same(run, undisturbed)
    assert run.progress.recoveries == 0, run.progress.notes
