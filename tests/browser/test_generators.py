"""The dashboard of a run with generators in separate processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quartet.contract.status import MODEL_ROLES
from tests.browser.conftest import Open
from tests.browser.test_pages import violations
from tests.gateway.serving import Gateway, serve_orchestrator, serving
from tests.training.conftest import MakeConfig
from tests.training.generator_runs import generator_run


@pytest.fixture(scope="module")
def run(make: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, tuple[str, ...]]]:
    folder = tmp_path_factory.mktemp("browser")
    config = make(
        run={"name": "split", "steps": 500, "directory": str(folder)}, rollout={"generators": 2, "prompts_per_step": 8}
    )
    with generator_run(config, 2, 3) as (running, generators):
        addresses = {role: getattr(running.config.services, role).address for role in MODEL_ROLES}
        with serve_orchestrator(running, addresses), serving(folder) as gateway:
            yield gateway, generators.addresses


def test_the_services_page_has_a_row_for_each_generator(
    run: tuple[Gateway, tuple[str, ...]], open_dashboard: Open
) -> None:
    gateway, addresses = run
    with open_dashboard(gateway) as window:
        window.show("runs/split/services")
        rows = window.page.get_by_role("region", name="Generators", exact=True).get_by_role("row")
        rows.nth(2).wait_for()
        heads = rows.nth(0).get_by_role("columnheader").all_inner_texts()
        for address in addresses:
            row = rows.filter(has_text=address)
            cells = dict(
                zip(
                    heads,
                    [row.get_by_role("rowheader").inner_text(), *row.get_by_role("cell").all_inner_texts()],
                    strict=True,
                )
            )
            assert (cells["Generator"], cells["State"], cells["Engine"]) == (address, "serving", "torch, cpu")
            assert cells["Last update"] == "shared memory"
            assert float(cells["Tokens/s"].replace(",", "")) > 0
            assert int(cells["Version"]) >= 2
        window.page.get_by_text("Guarantees of torch").wait_for()
        window.page.locator('[data-role="actor"]').get_by_text("Published").wait_for()


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_the_services_page_of_generators_is_accessible(
    run: tuple[Gateway, tuple[str, ...]], open_dashboard: Open, theme: str
) -> None:
    with open_dashboard(run[0], theme=theme) as window:
        window.show("runs/split/services")
        window.page.get_by_text("Guarantees of torch").wait_for()
        assert violations(window, {}) == []


def test_the_timeline_has_a_lane_for_each_generator(run: tuple[Gateway, tuple[str, ...]], open_dashboard: Open) -> None:
    gateway, addresses = run
    with open_dashboard(gateway) as window:
        window.show("runs/split/steps?step=2")
        for address in addresses:
            span = window.page.locator(f'svg.gantt [aria-label^="generator {address}: update_weights"]')
            span.first.wait_for(state="attached")
        titles = window.page.locator("svg.gantt text title").all_text_contents()
        assert titles.index("actor") < titles.index(f"generator {addresses[0]}") < titles.index("reward")


def test_generators_fit_a_phone(run: tuple[Gateway, tuple[str, ...]], open_dashboard: Open) -> None:
    with open_dashboard(run[0], phone=True) as window:
        for page in ("runs/split/services", "runs/split/steps?step=2"):
            window.show(page)
            assert window.page.evaluate("() => document.documentElement.scrollWidth - innerWidth") <= 0


def test_a_trajectory_shows_its_generator_and_its_weights(
    run: tuple[Gateway, tuple[str, ...]], open_dashboard: Open
) -> None:
    gateway, addresses = run
    with open_dashboard(gateway) as window:
        window.show("runs/split/trajectories?step=2")
        window.page.locator("tbody tr").first.get_by_role("link").click()
        window.heading("Response")
        facts = window.page.locator("dl.facts-row").first
        shown = dict(zip(facts.locator("dt").all_inner_texts(), facts.locator("dd").all_inner_texts(), strict=True))
        assert shown["Generator"] in addresses
        assert len(shown["Weights"]) == 8
