"""The file of ``quartet report`` in a browser."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quartet.cli.report import report
from quartet.run_directory.run_files import RunFiles
from tests.unit.cli.test_report import HOSTILE, files

__all__ = ["files"]


def test_a_report_works_offline_on_all_its_pages_and_escapes_text(files: RunFiles, chromium: Any) -> None:
    # Playwright runs an event loop in this thread.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(report, files.root, None).result()
    messages: list[str] = []
    page = chromium.new_page()
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith("data:") else messages.append(request.url))
    page.on("dialog", lambda dialog: messages.append(dialog.message))
    page.goto(files.report.as_uri())
    page.locator(".plot .main-svg").first.wait_for()
    texts = {"overview": page.locator("body").inner_text()}
    sections = page.locator("#sections a").all_inner_texts()
    page.get_by_role("heading", name="odd one").scroll_into_view_if_needed()
    page.locator("figure.curve", has_text="odd one").locator(".main-svg").first.wait_for()
    for name, word in (
        ("steps?step=1", "Critical path"),
        ("trajectories", "response 4 of 1"),
        ("trajectories?sort=score&text=OF+4", "response 0 of 4"),
        ("trajectories/4/0/4", "length"),
        ("evaluations", "2.75"),
        ("checkpoints", "No checkpoints"),
        ("guards", "lower it"),
        ("config", "target"),
        ("services", "Overview"),
    ):
        page.goto(f"{files.report.as_uri()}#/runs/tiny/{name}")
        page.locator("main", has_text=word).wait_for()
        texts[name] = page.locator("main").inner_text()
    title = page.title()
    page.close()
    assert set(messages) == {files.report.as_uri()}, "no requests, no errors, no refused scripts"
    assert "taken" not in title
    assert "step 4 of 4" in texts["overview"]
    assert "Report of Quartet" in texts["overview"]
    assert "target 4.25" in texts["overview"]
    assert len(sections) == 7
    assert not {"Services", "Logs"} & set(sections)
    rows = texts["trajectories?sort=score&text=OF+4"]
    assert "of 1 " not in rows
    assert rows.index("response 0 of 4") < rows.index("response 4 of 4")
    assert "token limit" in rows
    assert HOSTILE in texts["trajectories/4/0/4"]
    assert HOSTILE in texts["guards"]
