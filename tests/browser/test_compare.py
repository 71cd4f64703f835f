"""The comparison of runs: seeds of one setting as one curve."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from quartet.config.loading import FIRST_CONFIG_LINE
from quartet.run_directory.run_files import RunFiles
from tests.browser.conftest import Open
from tests.browser.window import Window
from tests.gateway.serving import Gateway, serving
from tests.training.runs import Run, json_lines

pytestmark = pytest.mark.slow

RATES, SEEDS = (1e-5, 3e-5), (0, 1)


@pytest.fixture(scope="module")
def sweep_gateway(finished_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway over the runs of a sweep: two learning rates with two seeds each. Their rewards differ by the seed."""
    folder = tmp_path_factory.mktemp("sweep")
    for rate in RATES:
        for seed in SEEDS:
            copy_run(finished_run.files, folder / f"learning_rate-{rate}--seed-{seed}", rate, seed)
    (folder / "sweep.json").write_text("{}")
    with serving(folder) as gateway:
        yield gateway


def copy_run(source: RunFiles, target: Path, rate: float, seed: int) -> None:
    shutil.copytree(source.root, target)
    files = RunFiles(target)
    config = yaml.safe_load(files.config.read_text())
    config["run"] |= {"name": target.name, "seed": seed, "directory": str(target.parent)}
    config["actor"]["learning_rate"] = rate
    files.config.write_text(FIRST_CONFIG_LINE + yaml.safe_dump(config))
    lines = [{**line, "reward_mean": 1e5 * rate + 2 * seed} for line in json_lines(files.metrics)]
    files.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))


def traces(window: Window, title: str) -> list[dict[str, Any]]:
    """Return the drawn traces of a chart: name and values."""
    figure = window.page.locator("figure.curve", has=window.page.get_by_role("heading", name=title, exact=True))
    figure.scroll_into_view_if_needed()
    figure.locator("svg.main-svg").first.wait_for()
    result: list[dict[str, Any]] = figure.locator(".plot").evaluate(
        "(plot) => plot.data.map(({ name, x, y }) => ({ name, x, y }))"
    )
    return result


def test_the_runs_of_a_folder_are_compared_by_setting_with_a_band_over_seeds(
    sweep_gateway: Gateway, open_dashboard: Open
) -> None:
    with open_dashboard(sweep_gateway) as window:
        window.page.get_by_role("link", name="Compare settings").click()
        window.heading("Compare 4 runs")
        for title in (
            "Reward",
            "KL to the reference nats per response",
            "Response length tokens",
            "Entropy nats per token",
        ):
            assert len(traces(window, title)) == 6, title
        low, high, mean = traces(window, "Reward")[:3]
        assert (mean["name"], mean["x"]) == ("learning_rate 0.00001", [1, 2, 3])
        assert mean["y"] == pytest.approx([2.0] * 3)
        assert (low["y"], high["y"]) == (pytest.approx([1.0] * 3), pytest.approx([3.0] * 3))
        over_kl = traces(window, "Reward over KL nats per response, smoothed")
        assert [trace["name"] for trace in over_kl] == ["learning_rate 0.00001", "learning_rate 0.00003"]
        assert over_kl[1]["y"] == pytest.approx([4.0] * 3)


def test_selected_runs_are_compared_one_by_one_or_by_setting(sweep_gateway: Gateway, open_dashboard: Open) -> None:
    names = [f"learning_rate-{rate}--seed-0" for rate in RATES]
    with open_dashboard(sweep_gateway) as window:
        window.show(f"compare?runs={','.join(names)}")
        assert [trace["name"] for trace in traces(window, "Reward")] == names
        window.page.get_by_role("link", name="By setting").click()
        window.heading("Compare 2 runs")
        window.page.get_by_text("Each curve is the mean over the runs of a setting").wait_for()
        assert [trace["name"] for trace in traces(window, "Reward")] == [
            "learning_rate 0.00001",
            "learning_rate 0.00003",
        ]
