"""The pages of a stage before RLHF: its own charts, and only the sections that it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.conftest import Open
from tests.gateway.routes.test_stages import written_stage
from tests.gateway.serving import serving

pytestmark = pytest.mark.slow


def test_a_stage_shows_its_charts_with_the_held_out_rows_and_no_services(open_dashboard: Open, tmp_path: Path) -> None:
    written_stage(tmp_path)
    with serving(tmp_path) as gateway, open_dashboard(gateway) as window:
        window.show("runs")
        assert "sft" in window.page.locator("main").inner_text()
        window.show("runs/my-sft/overview")
        titles = window.page.locator("figure.curve h3").all_inner_texts()
        assert titles == ["Loss"]
        figure = window.page.locator("figure.curve")
        figure.locator("svg.main-svg").first.wait_for()
        drawn = figure.locator(".plot").evaluate("(plot) => plot.data.map(({ x, y }) => ({ x, y }))")
        assert {"x": [1, 2, 3], "y": [3.0, 2.0, 1.5]} in drawn
        assert {"x": [2], "y": [2.5]} in drawn
        sections = window.page.locator("nav a[data-section]").all_inner_texts()
        assert sections == ["Overview", "Config"]
        window.show("runs/my-sft/config")
        assert "pairs.jsonl" in window.page.locator("main").inner_text()
        assert window.errors == []
