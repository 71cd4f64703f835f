"""Fixtures of the browser tests: a headless Chromium, and a function that opens the dashboard."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import pytest

from tests.browser.window import Window
from tests.gateway.conftest import finished_run, run_gateway
from tests.gateway.serving import Gateway
from tests.training.conftest import _measured_once, _one_thread, make, toy_task, toy_task_tree

sync_api = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright")

__all__ = ["_measured_once", "_one_thread", "finished_run", "make", "run_gateway", "toy_task", "toy_task_tree"]

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class Open(Protocol):
    """A function that opens the dashboard of a gateway, signed in."""

    def __call__(
        self, gateway: Gateway, *, theme: str = "dark", phone: bool = False
    ) -> AbstractContextManager[Window]: ...


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Start the browser. It ends with its module: until then an event loop runs in this thread, where other tests start one."""
    path = os.environ.get("QUARTET_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Chromium found; install it, or set QUARTET_CHROMIUM to its path")
    with sync_api.sync_playwright() as playwright:
        # Chromium refuses its sandbox to root.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def open_dashboard(chromium: Any) -> Open:
    """Function that opens the dashboard in a window. At its end, the window must have no errors."""

    @contextmanager
    def open_window(gateway: Gateway, *, theme: str = "dark", phone: bool = False) -> Iterator[Window]:
        size = {"width": 360, "height": 780} if phone else {"width": 1280, "height": 900}
        context = chromium.new_context(viewport=size, color_scheme=theme, is_mobile=phone, has_touch=phone)
        window = Window(context.new_page(), f"http://{gateway.address}")
        try:
            window.sign_in()
            yield window
            assert window.errors == []
        finally:
            context.close()

    return open_window
