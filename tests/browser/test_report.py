"""The file of ``quartet report`` in a browser."""

from __future__ import annotations

from typing import Any

from quartet.cli.report.command import report
from quartet.run_directory.run_files import RunFiles
from tests.unit.cli.test_report import HOSTILE, files

__all__ = ["files"]


def test_a_report_works_offline_draws_its_curves_and_escapes_text(files: RunFiles, chromium: Any) -> None:
    report(files.root, None)
    messages: list[str] = []
    page = chromium.new_page()
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: messages.append(request.url))
    page.on("dialog", lambda dialog: messages.append(dialog.message))
    page.goto(files.report.as_uri())
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    drawn = page.locator(".plot:has(.main-svg)").count()
    title, text = page.title(), page.locator("main").inner_text()
    charts = page.evaluate("plots.map(plot => plot.data.map(trace => trace.name))")
    shapes = page.evaluate("plots.flatMap(plot => plot.layout.shapes.map(shape => shape.y0))")
    page.close()
    assert messages == [files.report.as_uri()]
    assert title == "Run tiny"
    assert drawn == len(charts) == 8
    assert ["reward_mean"] in [[name for name in names if name] for names in charts]
    assert ["odd_one"] in charts
    assert shapes == [4.25], "the target line of the KL is missing"
    for run_gateway in (
        "best: score 4",
        "median: score 2",
        "worst: score 0",
        "response 4 of 1",
        "response 4 of 4",
        HOSTILE,
    ):
        assert run_gateway in text
    for run_gateway in (
        "truncated at the token limit",
        "length 0.25",
        "kl_runaway",
        "2.75",
        "kl_coefficient: ",
        "25.0 %",
    ):
        assert run_gateway in text
