"""Pages of the dashboard: accessibility, phones, themes, sign-in, errors and shortcuts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.conftest import Open
from tests.browser.window import Window
from tests.gateway.serving import Gateway, serving
from tests.training.runs import Run

pytestmark = pytest.mark.slow
"""`make test-all PYTEST_ARGS=tests/browser` runs these tests; `make test` runs only those with an active run."""

axe = pytest.importorskip("axe_playwright_python.base", reason="needs axe-playwright-python")

PAGES = (
    "runs",
    "runs/finished/overview",
    "runs/finished/steps",
    "runs/finished/trajectories",
    "runs/finished/evaluations",
    "runs/finished/checkpoints",
    "runs/finished/services",
    "runs/finished/guards",
    "runs/finished/logs?log=actor",
    "runs/finished/config",
    "compare?runs=finished,finished",
    "compare?runs=finished,finished&group=setting",
)


CONTRAST = {"runOnly": {"type": "rule", "values": ["color-contrast"]}}
"""The other theme differs in colours only."""


def violations(window: Window, options: dict[str, Any]) -> list[str]:
    if not window.page.evaluate("() => 'axe' in window"):
        window.page.evaluate(axe.AXE_SCRIPT)
    result = window.page.evaluate(
        "async (options) => (await axe.run(document, { ...options, resultTypes: ['violations'] })).violations", options
    )
    return [f"{item['id']}: {item['nodes'][0]['html'][:200]}" for item in result]


@pytest.mark.parametrize(("theme", "options"), [("dark", {}), ("light", CONTRAST)])
def test_no_page_has_accessibility_violations(
    run_gateway: Gateway, open_dashboard: Open, theme: str, options: dict[str, Any]
) -> None:
    with open_dashboard(run_gateway, theme=theme) as window:
        trajectory = (
            run_gateway.client.get("/runs/finished/trajectories?step=1").json()["items"][0]["id"].split("/", 1)[1]
        )
        results = {}
        for page in (*PAGES, f"runs/finished/trajectories/{trajectory}"):
            window.show(page)
            results[page] = violations(window, options)
        assert {page: items for page, items in results.items() if items} == {}


def test_no_page_is_wider_than_a_phone(run_gateway: Gateway, open_dashboard: Open) -> None:
    with open_dashboard(run_gateway, phone=True) as window:
        trajectory = (
            run_gateway.client.get("/runs/finished/trajectories?step=1").json()["items"][0]["id"].split("/", 1)[1]
        )
        overflows = {}
        for page in (*PAGES, f"runs/finished/trajectories/{trajectory}"):
            window.show(page)
            overflow = window.page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
            if overflow > 0:
                overflows[page] = overflow
        assert overflows == {}


def test_the_token_is_removed_from_the_address_and_a_wrong_one_asks_again(
    run_gateway: Gateway, open_dashboard: Open
) -> None:
    with open_dashboard(run_gateway) as window:
        assert "token" not in window.page.url
        window.press("Sign out")
        window.heading("Sign in to Quartet")
        window.page.get_by_label("Token").fill("not-the-token-of-this-gateway")
        window.press("Sign in")
        window.page.get_by_role("alert").wait_for()
        # The browser logs the refused request in its console. There must be no other error.
        assert all("401" in error for error in window.errors)
        window.errors.clear()


def test_a_missing_run_shows_an_error(run_gateway: Gateway, open_dashboard: Open) -> None:
    with open_dashboard(run_gateway) as window:
        window.page.goto(f"{window.url}/#/runs/nowhere/overview")
        window.page.get_by_text("Not found").wait_for()
        assert "nowhere" in window.page.get_by_role("alert").inner_text()
        assert window.errors
        assert all("404" in error for error in window.errors)
        window.errors.clear()


def test_a_viewer_sees_no_commands(finished_run: Run, open_dashboard: Open) -> None:
    viewer = "the-token-of-the-viewer"
    with (
        serving(finished_run.files.root.parent, viewer_token=viewer, start_runs=True) as gateway,
        open_dashboard(gateway) as window,
    ):
        window.page.get_by_role("button", name="Start a run").wait_for()
        window.sign_in(viewer)
        window.page.get_by_text("read only").wait_for()
        assert window.page.get_by_role("button", name="Start a run").count() == 0


def test_the_theme_is_remembered(run_gateway: Gateway, open_dashboard: Open) -> None:
    with open_dashboard(run_gateway, theme="light") as window:
        window.page.keyboard.press("t")
        window.page.reload()
        assert window.page.locator("html").get_attribute("data-theme") == "dark"


def test_shortcuts_open_sections_and_can_be_disabled(run_gateway: Gateway, open_dashboard: Open) -> None:
    with open_dashboard(run_gateway) as window:
        window.show("runs/finished/overview")
        window.page.keyboard.press("7")
        window.heading("Guards")
        window.page.keyboard.press("?")
        window.page.get_by_label("Enable keyboard shortcuts").uncheck()
        window.page.keyboard.press("Escape")
        window.page.keyboard.press("2")
        assert window.page.url.endswith("/guards")


def test_events_are_parsed_from_chunks_of_any_size(run_gateway: Gateway, open_dashboard: Open) -> None:
    text = (
        "id: a\r\nevent: step\r\ndata: 1\r\n\r\n: heartbeat\n\ndata: x\ndata: ä\n\nid: b\nevent: progress\ndata:{}\n\n"
    )
    expected = [
        {"id": "a", "type": "step", "data": "1"},
        {"id": None, "type": "message", "data": "x\nä"},
        {"id": "b", "type": "progress", "data": "{}"},
    ]
    with open_dashboard(run_gateway) as window:
        for size in (1, 2, 3, 7, len(text)):
            results = window.page.evaluate(
                """async ([text, size]) => {
                    const { Parser } = await import("/static/event_stream.js");
                    const events = [];
                    const parser = new Parser((event) => events.push(event));
                    for (let at = 0; at < text.length; at += size) parser.feed(text.slice(at, at + size));
                    return events;
                }""",
                [text, size],
            )
            assert results == expected
