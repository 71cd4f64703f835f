"""Take screenshots of all dashboard pages in both themes: python -m tests.browser.screenshots. Writes docs/screenshots.

Trains two short runs on the toy task of the demo: a finished run for the comparison, and a paused run for all other pages.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from quartet.demo.toy_task import make_toy_task
from quartet.system.child_processes import tied_to_parent
from tests.browser.conftest import NAMES
from tests.waiting import LIMIT

STEPS, PAUSE_STEP, INTERVAL = 90, 80, 20
CHARTS_DRAWN = """() => [...document.querySelectorAll("figure.curve")]
    .filter((figure) => figure.getBoundingClientRect().top < innerHeight)
    .every((figure) => figure.querySelector("svg.main-svg"))"""
"""True if every visible chart is drawn."""
PAGES = ("overview", "steps", "trajectories", "evaluations", "checkpoints", "services", "guards", "logs", "config")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.browser.screenshots", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build/screenshots"), help="folder of the runs")
    parser.add_argument("--pictures", type=Path, default=Path("docs/screenshots"), help="folder of the screenshots")
    options = parser.parse_args(arguments)
    shutil.rmtree(options.folder, ignore_errors=True)
    folder = options.folder
    folder.mkdir(parents=True)
    options.pictures.mkdir(parents=True, exist_ok=True)
    with training(folder, "careful", kl_coefficient=0.2) as run:
        wait_until(run, lambda state: state["state"] == "finished")
    with training(folder, "demo", kl_coefficient=0.05) as run:
        wait_until(run, lambda state: state["step"] >= PAUSE_STEP)
        run.request("pause", {})
        wait_until(run, lambda state: state["state"] == "paused")
        run.request("settings", {"kl_coefficient": 0.08}, "PATCH")
        run.request("checkpoint", {})
        take_screenshots(run, options.pictures)
    return 0


class Run:
    """An active run, accessed through its gateway."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], gateway: dict[str, str]) -> None:
        self.name, self.process = name, process
        self.url, self.token = gateway["url"], gateway["token"]

    def request(self, path: str = "", body: object = None, method: str | None = None) -> Any:
        """Send a request to the gateway; return its response."""
        request = urllib.request.Request(  # noqa: S310 - the address that a run's own gateway has written
            f"{self.url}/api/v1/runs/{self.name}/{path}".rstrip("/"),
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:  # noqa: S310 - as above
            return json.load(response)


@contextmanager
def training(folder: Path, name: str, kl_coefficient: float) -> Iterator[Run]:
    """Run ``quartet train`` on the toy task of the demo; stop it at the end of the block."""
    toy_task = make_toy_task(folder / "toy-task")
    tree = {
        "run": {"name": name, "steps": STEPS, "directory": str(folder / "runs")},
        "data": {"prompts": str(toy_task.prompts), "validation": str(toy_task.prompts), "max_prompt_tokens": 24},
        "algorithm": {"kl_coefficient": kl_coefficient},
        "rollout": {"prompts_per_step": 48, "max_response_tokens": 44, "score_batch_size": 12},
        "actor": {"model": str(toy_task.policy), "learning_rate": 1e-4},
        "critic": {"learning_rate": 3e-4},
        "reward": {"model": str(toy_task.reward)},
        "evaluation": {"every_steps": INTERVAL, "max_prompts": 16},
        "guards": {"kl_runaway": {"above": 6.0, "action": "warn"}},
        "checkpoint": {"every_steps": INTERVAL},
    }
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump(tree, sort_keys=False))
    command = [str(Path(sys.executable).with_name("quartet")), "train", str(config)]
    gateway = folder / "runs" / name / "gateway.json"
    with (folder / f"{name}.log").open("wb") as output:
        process = subprocess.Popen(tied_to_parent(command), stdout=output, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 300
            while not gateway.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the run did not start, see {folder / f'{name}.log'}")
                time.sleep(0.2)
            yield Run(name, process, json.loads(gateway.read_text()))
        finally:
            process.terminate()
            process.wait(LIMIT)


def wait_until(run: Run, condition: Callable[[dict[str, Any]], bool]) -> None:
    """Wait until the state of the run meets ``condition``, or until the run ends. Raises RuntimeError if the run fails."""
    while run.process.poll() is None:
        try:
            if condition(run.request()):
                return
        except OSError:
            pass  # The gateway ends with its run.
        time.sleep(0.2)
    if run.process.returncode != 0:
        raise RuntimeError(f"{run.name}: ended with status {run.process.returncode}")


def take_screenshots(run: Run, pictures: Path) -> None:
    """Take screenshots of every page in both themes, and of the overview on a phone."""
    path = os.environ.get("QUARTET_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        raise SystemExit("error: no Chromium found; install it, or set QUARTET_CHROMIUM to its path")
    best = run.request("trajectories?sort=-score&limit=1")["items"][0]["id"].split("/", 1)[1]
    pages = {name: f"runs/{run.name}/{name}" for name in PAGES}
    pages |= {
        "runs": "runs",
        "inspector": f"runs/{run.name}/trajectories/{best}",
        "compare": "compare?runs=demo,careful",
    }
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        for theme in ("light", "dark"):
            page = open_page(browser, run, theme, 1280, 900)
            for name, address in pages.items():
                take_screenshot(page, run, address, pictures / f"{name}-{theme}.png")
            phone = open_page(browser, run, theme, 360, 780)
            take_screenshot(phone, run, pages["overview"], pictures / f"phone-{theme}.png")
        browser.close()


def open_page(browser: Browser, run: Run, theme: Any, width: int, height: int) -> Page:
    """Return a page that is signed in."""
    page = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme).new_page()
    page.goto(f"{run.url}/#token={run.token}")
    page.wait_for_selector("main .page-head")
    return page


def take_screenshot(page: Page, run: Run, address: str, path: Path) -> None:
    """Save a screenshot of a page after its data is loaded."""
    page.goto(f"{run.url}/#/{address}")
    page.wait_for_selector("main .page-head, main .state")
    page.wait_for_selector("main .waiting", state="detached")
    page.wait_for_function(CHARTS_DRAWN)
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    image.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    print(path)


if __name__ == "__main__":
    sys.exit(main())
