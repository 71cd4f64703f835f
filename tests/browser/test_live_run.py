"""The dashboard of an active run: live charts, commands, and lost processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quartet.contract.control import Alert
from quartet.contract.status import Role
from quartet.run_directory.run_files import RunFiles
from tests.browser.conftest import Open
from tests.browser.window import Window
from tests.gateway.live_runs import eventually, start_live_run
from tests.gateway.serving import Gateway, serving
from tests.training.conftest import MakeConfig
from tests.training.runs import ActiveRun, Fleet, json_lines


@pytest.fixture(scope="module")
def active(make: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ActiveRun, Fleet]]:
    models = {
        "actor": {"micro_batch_tokens": 2048},
        "critic": {"micro_batch_tokens": 1024, "gradient_checkpointing": True},
    }
    with start_live_run(make, tmp_path_factory.mktemp("browser"), "watched", steps=5000, **models) as result:
        eventually(result[0].board.current, lambda progress: progress.step >= 3)
        yield result


@pytest.fixture(scope="module")
def gateway(active: tuple[ActiveRun, Fleet]) -> Iterator[Gateway]:
    with serving(active[0].config.run.directory) as result:
        yield result


@pytest.fixture
def window(active: tuple[ActiveRun, Fleet], gateway: Gateway, open_dashboard: Open) -> Iterator[Window]:
    """The overview of the run. The run is paused between tests, because it would slow down the browser."""
    run, _ = active
    run.control.pause()
    eventually(run.board.current, lambda progress: progress.state == "paused")
    with open_dashboard(gateway) as result:
        result.show("runs/watched/overview")
        result.wait_for_state("paused")
        yield result
    run.control.pause()


def test_charts_follow_the_run(window: Window, active: tuple[ActiveRun, Fleet]) -> None:
    window.page.wait_for_selector("figure.curve svg.main-svg", state="attached")
    before = eventually(lambda: window.points("Reward"), bool)
    active[0].control.resume()
    # The page updates charts from events, without further requests for curves.
    requests: list[str] = []
    window.page.on("request", lambda request: requests.append(request.url) if "/metrics" in request.url else None)
    window.wait_for_step(before[-1] + 2)
    after = eventually(lambda: window.points("Reward"), lambda points: points[-1] >= before[-1] + 2)
    assert after == list(range(1, after[-1] + 1))
    for title in ("KL to the reference", "Entropy", "Value loss"):
        assert eventually(lambda title=title: window.points(title), lambda points: points[-1] >= after[-1])[0] == 1
    assert requests == []


def test_pause_stops_the_step_counter_and_resume_continues_it(window: Window, active: tuple[ActiveRun, Fleet]) -> None:
    run, _ = active
    run.control.resume()
    window.wait_for_state("training")
    window.press("Pause")
    assert "The current step completes" in window.confirm("Pause")
    window.wait_for_state("paused")
    stopped = run.board.current().step
    assert eventually(window.step, lambda step: step == stopped) == stopped
    window.press("Resume")
    window.confirm("Resume")
    window.wait_for_state("training")
    assert window.wait_for_step(stopped) > stopped


def test_a_changed_kl_coefficient_shows_in_the_next_step(window: Window, active: tuple[ActiveRun, Fleet]) -> None:
    run, _ = active
    window.show("runs/watched/config")
    window.page.get_by_label("kl coefficient").fill("0.125")
    window.press("Change …")
    assert "→ 0.125" in window.confirm("Change")
    row = window.page.get_by_role("region", name="Changes of settings").get_by_role("row").nth(1)
    row.get_by_text("0.125").wait_for()
    first = int(row.get_by_role("cell").first.inner_text().replace(",", ""))
    assert first >= run.board.current().step
    run.control.resume()
    window.wait_for_step(first)
    metrics = json_lines(RunFiles(run.config.run_directory).metrics)
    assert metrics[first - 1]["kl_coefficient"] == 0.125 != metrics[first - 2]["kl_coefficient"]
    window.show(f"runs/watched/steps?step={first}")
    window.page.locator("dl.facts dt", has_text="kl coefficient").locator("xpath=following-sibling::dd[1]").get_by_text(
        "0.125"
    ).wait_for()


def test_a_value_out_of_bounds_is_refused_beside_its_field(window: Window, active: tuple[ActiveRun, Fleet]) -> None:
    changes = RunFiles(active[0].config.run_directory).changes
    before = changes.read_bytes() if changes.exists() else b""
    window.show("runs/watched/config")
    field = window.page.get_by_label("actor learning rate")
    field.fill("7")
    window.press("Change …")
    window.page.get_by_text("Enter a number from 0 to").wait_for()
    assert field.get_attribute("aria-invalid") == "true"
    assert (changes.read_bytes() if changes.exists() else b"") == before


def test_a_dead_service_turns_red_and_green_again(window: Window, active: tuple[ActiveRun, Fleet]) -> None:
    _, services = active
    window.show("runs/watched/services")
    window.page.wait_for_selector('[data-role="reward"][data-health="serving"]')
    services.lose(Role.REWARD)
    window.page.wait_for_selector('[data-role="reward"][data-health="unreachable"]')
    assert window.page.locator('[data-role="reward"] .pill').inner_text() == "unreachable"
    services.start(Role.REWARD)
    window.page.wait_for_selector('[data-role="reward"][data-health="serving"]')
    window.page.get_by_text("processes serving").wait_for()


def test_trained_models_show_their_micro_batch_size(window: Window) -> None:
    window.show("runs/watched/services")
    cards = window.page.locator("[data-role]")
    expected = {"actor": "at most 2,048 tokens", "critic": "at most 1,024 tokens, gradient checkpointing"}
    for role, words in expected.items():
        label = window.page.locator(f'[data-role="{role}"] dt', has_text="Micro-batch")
        assert label.locator("xpath=following-sibling::dd[1]").inner_text() == words
    assert cards.filter(has_text="Micro-batch").count() == len(expected) < cards.count()


def test_an_alert_during_the_page_load_is_counted(
    window: Window, active: tuple[ActiveRun, Fleet], gateway: Gateway
) -> None:
    files = RunFiles(active[0].config.run_directory)
    before = len(json_lines(files.alerts)) if files.alerts.exists() else 0
    held_requests: list[Any] = []
    window.page.goto("about:blank")
    window.page.route("**/api/v1/runs/watched", lambda route: held_requests.append((route, route.fetch())), times=1)
    with gateway.stream("watched") as stream:
        next(iter(stream))
        window.page.goto(f"{window.url}/#/runs/watched/overview")
        while not held_requests:
            window.page.wait_for_timeout(20)
        files.append_alert(Alert(3, "kl_runaway", "warn", "kl_mean 30", "lower it"))
        stream.until("alert")
    route, response = held_requests[0]
    window.page.wait_for_timeout(200)
    route.fulfill(response=response)
    window.page.wait_for_function(
        "many => document.querySelector('[data-section=guards] .count')?.textContent.startsWith(String(many))",
        arg=before + 1,
    )


def test_a_rewind_to_step_0_makes_the_page_read_everything_again(window: Window) -> None:
    window.page.evaluate(
        """async () => {
            const { EventStream } = await import("/static/event_stream.js");
            window.received = [];
            window.stream = new EventStream("watched");
            for (const kind of ["rewind", "step"]) window.stream.on(kind, ({ step }) => window.received.push([kind, step]));
            window.stream.last = "g1.s1.a0.e0.c0.k0";
            window.stream.start();
        }"""
    )
    window.page.wait_for_function("() => window.received.length && window.stream.last !== null")
    assert window.page.evaluate("() => { window.stream.stop(); return window.received; }") == [["rewind", None]]


def test_an_interrupted_stream_resumes_without_a_gap(window: Window, active: tuple[ActiveRun, Fleet]) -> None:
    run, _ = active
    window.page.evaluate(
        """async () => {
            const { EventStream } = await import("/static/event_stream.js");
            window.received = [];
            window.stream = new EventStream("watched");
            window.stream.on("step", ({ step }) => window.received.push(step));
            window.stream.start();
        }"""
    )
    window.page.wait_for_function("() => window.stream.last !== null")
    run.control.resume()
    window.page.wait_for_function("() => window.received.length >= 2")
    # Steps are committed during the delay of at least half a second before the stream reconnects.
    last_before = window.page.evaluate("() => { window.stream.connection.abort(); return window.received.at(-1); }")
    window.page.wait_for_function(
        "(last) => window.received.at(-1) > last && window.stream.state === 'live'", arg=last_before
    )
    received = window.page.evaluate("() => { window.stream.stop(); return window.received; }")
    assert received == list(range(received[0], received[-1] + 1))
    assert received[-1] > last_before
