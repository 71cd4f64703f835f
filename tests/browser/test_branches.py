"""The inspector of an episode with several branches: the tree, and the branch that is shown."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quartet.run_directory.run_files import RunFiles
from tests.browser.conftest import Open
from tests.browser.test_pages import CONTRAST, violations
from tests.browser.window import Window
from tests.gateway.routes.test_trajectories import rows_of
from tests.gateway.serving import Gateway, serving
from tests.training.runs import Run

ADDRESS = "runs/some/trajectories/1/0/1"


def turn(text: str, reward: float) -> dict[str, object]:
    return {"role": "policy", "text": text, "tokens": 1, "reward": reward}


@pytest.fixture(scope="module")
def gateway(finished_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with a run whose first step has an episode of four branches: 1 and 3 are forked from 0, and 2 from 1."""
    folder: Path = tmp_path_factory.mktemp("branches")
    shutil.copytree(finished_run.files.root, folder / "some")
    files = RunFiles(folder / "some")
    further = [
        {
            "parent": parent,
            "shared_tokens": 1,
            "prompt_tokens": 2,
            "prompt": f"context {number}",
            "segments": [turn(f"answer {number}", 0.5 * number)],
        }
        for number, parent in ((1, 0), (2, 1), (3, 0))
    ]
    rows = rows_of(1)[:2]
    rows[1] |= {"segments": [turn("answer 0", 0.0)], "further_branches": further}
    (files.trajectories / "step-000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    numbers = np.arange(5, dtype=np.float32)
    files.write_tokens(
        1,
        {
            "branches": np.array([1, 4], np.int32),
            "prompt_lengths": np.array([1, 1, 2, 2, 2], np.int32),
            "response_lengths": np.ones(5, np.int32),
            "prompt_ids": np.array([3, 3, 3, 4, 3, 4, 3, 4], np.int32),
            "response_ids": np.arange(20, 25, dtype=np.int32),
            **dict.fromkeys(("log_probs", "reference_log_probs", "kl", "advantages", "returns"), numbers),
        },
    )
    with serving(folder) as served:
        yield served


def tree(window: Window) -> list[str]:
    return [item.inner_text() for item in window.page.locator(".branches li").all()]


def test_the_tree_shows_each_branch_after_its_parent(gateway: Gateway, open_dashboard: Open) -> None:
    with open_dashboard(gateway) as window:
        window.show(ADDRESS)
        entries = tree(window)
        assert [entry.split("\n")[0].strip() for entry in entries] == ["Branch 0", "Branch 1", "Branch 2", "Branch 3"]
        assert "from branch 1 after 1 token, 1 turn, 1 token of the policy" in entries[2]
        assert "4, rewards 0, 0.500, 1.000, 1.500" in window.page.locator(".facts-row").inner_text()


def test_a_press_shows_the_prompt_and_the_tokens_of_another_branch(gateway: Gateway, open_dashboard: Open) -> None:
    with open_dashboard(gateway) as window:
        window.show(ADDRESS)
        assert "21" in window.page.locator("table").inner_text()
        window.press("Branch 2")
        window.page.get_by_text("It begins with 1 token of branch 1.").wait_for()
        assert window.page.locator(".prompt").inner_text() == "context 2"
        assert "23" in window.page.locator("table").inner_text()
        assert window.page.locator(".branches [aria-pressed=true]").inner_text() == "Branch 2"
        assert window.page.url.endswith("branch=2")
        window.page.reload()
        window.page.get_by_text("It begins with 1 token of branch 1.").wait_for()


def test_an_episode_of_one_branch_has_no_tree(gateway: Gateway, open_dashboard: Open) -> None:
    with open_dashboard(gateway) as window:
        window.show("runs/some/trajectories/1/0/0")
        assert tree(window) == []


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_the_tree_is_accessible_and_fits_a_phone(gateway: Gateway, open_dashboard: Open, theme: str) -> None:
    with open_dashboard(gateway, theme=theme, phone=True) as window:
        window.show(ADDRESS)
        assert violations(window, CONTRAST if theme == "light" else {}) == []
        assert window.page.evaluate("() => document.documentElement.scrollWidth - innerWidth") <= 0
