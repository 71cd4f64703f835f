"""Trajectories in the dashboard: list, filters, tokens and keyboard navigation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.conftest import Open
from tests.browser.window import Window
from tests.gateway.serving import Gateway
from tests.training.runs import Run

pytestmark = pytest.mark.slow
"""`make test-all PYTEST_ARGS=tests/browser` runs these tests; `make test` runs only those with an active run."""


@pytest.fixture
def window(run_gateway: Gateway, open_dashboard: Open) -> Iterator[Window]:
    with open_dashboard(run_gateway) as result:
        yield result


def test_a_trajectory_shows_the_values_of_every_token(window: Window, run_gateway: Gateway, finished_run: Run) -> None:
    window.show("runs/finished/trajectories?step=2&sort=-score")
    window.page.locator("tbody tr").first.get_by_role("link").click()
    window.heading("Response")
    trajectory_id = window.page.url.split("/trajectories/")[1].split("?")[0]
    detail = run_gateway.client.get(f"/runs/finished/trajectories/{trajectory_id}").json()
    assert detail["score"] == max(line["score"] for line in finished_run.trajectories(2))
    tokens = window.page.locator(".token")
    assert tokens.count() == detail["response_tokens"]
    assert "".join(tokens.all_text_contents()).replace("↵", "").replace("∅", "") == "".join(
        token["text"] for token in detail["tokens"]
    )
    rows = window.page.get_by_role("region", name="Tokens of the response").get_by_role("row")
    assert rows.count() == detail["response_tokens"] + 1
    tokens.nth(1).hover()
    assert f"id {detail['tokens'][1]['id']}" in window.page.locator(".token-facts").inner_text()


def test_tokens_are_coloured_by_the_selected_measure(window: Window) -> None:
    window.show("runs/finished/trajectories?step=1")
    window.page.locator("tbody tr").first.get_by_role("link").click()
    colours = {}
    for name in ("Advantage", "Value", "Log-prob"):
        window.press(name)
        colours[name] = window.page.locator(".token").evaluate_all(
            "(tokens) => tokens.map((token) => getComputedStyle(token).backgroundColor)"
        )
    assert all(len(set(result)) > 1 for result in colours.values())
    assert colours["Advantage"] != colours["Value"] != colours["Log-prob"]


def test_arrow_keys_go_to_the_neighbours_by_reward(window: Window, finished_run: Run) -> None:
    window.show("runs/finished/trajectories?step=3&sort=score")
    window.page.locator("tbody tr").first.get_by_role("link").click()
    window.heading("Response")
    scores = sorted(line["score"] for line in finished_run.trajectories(3))
    # The heading contains prompt and sample. Wait for it before the next key.
    ids = {line["score"]: line["id"].split("/")[-2:] for line in finished_run.trajectories(3)}
    for score in scores[1:]:
        window.page.keyboard.press("ArrowRight")
        prompt, sample = ids[score]
        window.heading(f"Step 3, prompt {prompt}" + (f", sample {sample}" if int(sample) else ""))
        assert window.page.url.split("?")[0].endswith(f"/3/{prompt}/{sample}")
    assert window.page.get_by_role("button", name="Higher reward").is_disabled()


def test_filters_are_kept_in_the_address(window: Window, finished_run: Run) -> None:
    window.show("runs/finished/trajectories")
    min_score = sorted(line["score"] for step in (1, 2, 3) for line in finished_run.trajectories(step))[5]
    window.page.get_by_label("Reward, at least").fill(str(min_score))
    window.press("Apply")
    window.page.wait_for_url("**min_score=*")
    window.page.wait_for_selector("main .waiting", state="detached")
    count = sum(line["score"] >= min_score for step in (1, 2, 3) for line in finished_run.trajectories(step))
    window.page.get_by_text(f"{count} responses").wait_for()
    window.page.reload()
    window.page.get_by_text(f"{count} responses").wait_for()
