"""A switch of the reward source over REST and by the command line, with its audit entry."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from quartet.cli.remote.control import change_settings
from quartet.config.root import Config
from quartet.contract.control import RunState
from quartet.errors import ConfigError
from quartet.gateway.client import Target
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.algorithm.state import AlgorithmState
from quartet.services.orchestrator.control.live_settings import LiveSettings
from quartet.services.orchestrator.control.progress import ProgressBoard
from quartet.services.orchestrator.control.run_control import RunControl
from tests.gateway.serving import TOKEN, Gateway, commit, config_of, serve_orchestrator, serving
from tests.training.runs import ActiveRun

PATH = "/runs/switched"
REWARD = {
    "source": "ensemble",
    "parts": [
        {"name": "old", "model": "reward"},
        {"name": "new", "weight": 0.0, "source": "function", "function": "rewards:new"},
    ],
}
OLD, NEW = "reward.parts.old.weight", "reward.parts.new.weight"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[Config, Gateway]]:
    """Serve a run that trains in step 2 of 4, without its training."""
    config = config_of(tmp_path, "switched", reward=REWARD)
    files = RunFiles(config.run_directory)
    files.write_config(config.to_yaml())
    commit(files, 1)
    control = RunControl(files, persist=False)
    live = LiveSettings(config, files, control)
    live.resume(1, AlgorithmState(config))
    board = ProgressBoard("switched", 4)
    board.update(state=RunState.TRAINING)
    active = ActiveRun(config, board, control, threading.current_thread(), [], live)
    with ExitStack() as stack:
        stack.enter_context(serve_orchestrator(active))
        yield config, stack.enter_context(serving(tmp_path))


def test_a_switch_is_one_request_with_an_audit_entry(run: tuple[Config, Gateway]) -> None:
    client = run[1].client
    values = {item["name"]: item["value"] for item in client.get(f"{PATH}/settings").json()["settings"]}
    assert (values[OLD], values[NEW]) == (1.0, 0.0)
    response = client.patch(f"{PATH}/settings", json={OLD: 0, NEW: 1})
    assert response.status_code == 200, response.text
    changes = [{name: row[name] for name in row if name != "at"} for row in response.json()["changes"]]
    common = {"step": 3, "user": "operator 127.0.0.1"}
    assert changes == [
        {"setting": OLD, "before": 1.0, "after": 0.0, **common},
        {"setting": NEW, "before": 0.0, "after": 1.0, **common},
    ]
    entry = client.get(f"{PATH}/audit").json()["items"][0]
    assert (entry["command"], entry["details"], entry["outcome"]) == ("set", {OLD: 0.0, NEW: 1.0}, "accepted")
    assert client.get(PATH).json()["reward_parts"] == ["old", "new"]


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({OLD: 0}, f"body.{OLD}", "all weights would be 0 from step 3 on"),
        ({NEW: 11}, f"body.{NEW}", "expected -10 to 10"),
        ({"reward.parts.other.weight": 1}, "body.reward.parts.other.weight", "not a live setting"),
        ({NEW: "1"}, f"body.{NEW}", "valid number"),
        ({"reward.parts.new.name": 1}, "body.reward.parts.new.name", "should match"),
    ],
)
def test_a_wrong_weight_is_refused_and_changes_nothing(
    body: dict[str, Any], field: str, message: str, run: tuple[Config, Gateway]
) -> None:
    response = run[1].client.patch(f"{PATH}/settings", json=body)
    assert response.status_code == 422, response.text
    (problem,) = response.json()["fields"]
    assert problem["field"] == field
    assert message in problem["problem"]
    assert not RunFiles(run[0].run_directory).changes.exists()


def test_the_command_line_switches_the_source(run: tuple[Config, Gateway], capsys: pytest.CaptureFixture[str]) -> None:
    target = Target("runs/switched", f"http://{run[1].address}", TOKEN, "switched")
    change_settings(target, [f"{OLD}=0", f"{NEW}=1"])
    change_settings(target, [])
    out = capsys.readouterr().out
    assert f"runs/switched: {OLD} 1 -> 0 from step 3 on\nruns/switched: {NEW} 0 -> 1 from step 3 on" in out
    assert f"{NEW} = 1 (from -10 to 10)" in out
    with pytest.raises(ConfigError, match=f"{NEW} 0: all weights would be 0"):
        change_settings(target, [f"{NEW}=0"])
