"""A browser window with the dashboard. It records every error."""

from __future__ import annotations

import re
from typing import Any

from tests.gateway.serving import TOKEN

TIMEOUT = 15_000
"""Milliseconds to wait for an element."""


class Window:
    """``page`` is the Playwright page. ``errors`` are console errors, exceptions and requests to other servers."""

    def __init__(self, page: Any, url: str) -> None:
        self.page, self.url = page, url
        self.errors: list[str] = []
        page.set_default_timeout(TIMEOUT)
        page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._check_request)

    def _check_request(self, request: Any) -> None:
        if not request.url.startswith((f"{self.url}/", "data:", "blob:")):
            self.errors.append(f"request to {request.url}")

    def sign_in(self, token: str = TOKEN) -> None:
        """Open the link that the gateway prints."""
        self.page.goto(f"{self.url}/#token={token}")
        self.heading("Runs")

    def show(self, address: str) -> None:
        """Open a page of the dashboard and wait until its data is loaded."""
        self.page.goto(f"{self.url}/#/{address}")
        self.page.wait_for_selector("main .page-head, main .state")
        self.page.wait_for_selector("main .waiting", state="detached")

    def heading(self, text: str) -> Any:
        """Wait for a heading and return it."""
        result = self.page.get_by_role("heading", name=text, exact=True)
        result.first.wait_for()
        return result

    def press(self, name: str) -> None:
        """Click a button by its text."""
        self.page.get_by_role("button", name=name, exact=True).first.click()

    def confirm(self, name: str) -> str:
        """Confirm the dialog; return its text."""
        dialog = self.page.get_by_role("dialog")
        text: str = dialog.inner_text()
        dialog.get_by_role("button", name=name, exact=True).click()
        dialog.wait_for(state="detached")
        return text

    def wait_for_state(self, state: str) -> None:
        """Wait until the header of the run shows a state."""
        self.page.locator(".run-title .pill", has_text=state).wait_for()

    def step(self) -> int:
        """Return the step in the header of the run."""
        text = self.page.locator(".run-progress").inner_text()
        match = re.search(r"step ([\d,]+) of", text)
        assert match, text
        return int(match[1].replace(",", ""))

    def wait_for_step(self, after: int) -> int:
        """Wait until the header of the run shows a step after ``after``; return it."""
        self.page.wait_for_function(
            "(after) => Number(/step ([\\d,]+) of/.exec(document.querySelector('.run-progress').textContent)[1]"
            ".replaceAll(',', '')) > after",
            arg=after,
        )
        return self.step()

    def points(self, title: str) -> list[int]:
        """Return the steps that a chart shows."""
        plot = self.page.locator("figure.curve", has=self.page.get_by_role("heading", name=title)).locator(".plot")
        result: list[int] = plot.evaluate("(plot) => (plot.calcdata?.at(-1) ?? []).map((point) => point.x)")
        return result
