"""`quartet serve`: users are answered, and each session with a reward is trained once, whatever process is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import uuid
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import yaml

from quartet.config.loading import FIRST_CONFIG_LINE
from quartet.run_directory.run_files import RunFiles
from quartet.system.failpoints import FOLDER_VARIABLE, VARIABLE
from tests.e2e.commands import Command, committed_steps, settings
from tests.e2e.conftest import Call, Run, Start
from tests.ports import free_port
from tests.waiting import LIMIT

STEPS, SESSIONS = 6, 4
"""Steps of the run, and sessions of a step."""
KILLED = "orchestrator.sealed=kill,actor.stepped=kill@3,orchestrator.committed=kill@3"


class Users:
    """Users who hold conversations of two turns and reward them, on threads, until they are stopped.

    ``rewards``: those that the endpoint has acknowledged, by session.
    """

    def __init__(self, port: int, folder: Path, model: str) -> None:
        self._url, self._model = f"http://127.0.0.1:{port}/v1", model
        self._keys = {name: (folder / f"{name}.keys").read_text().strip() for name in ("viewers", "operators")}
        self._stop = threading.Event()
        self.rewards: dict[str, float] = {}
        self._threads = [threading.Thread(target=self._run, args=[number]) for number in range(3)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(LIMIT)

    def _run(self, number: int) -> None:
        for index in count():
            session, text = f"user-{number}-{index}-{uuid.uuid4().hex}", "ab"
            for _ in range(2):
                body = {"model": self._model, "prompt": text, "max_tokens": 4}
                answer = self._post("/completions", "viewers", body, session)
                if answer is None:
                    return
                text += answer["choices"][0]["text"] + "cd"
            reward = float((number + index) % 3)
            if self._post(f"/sessions/{session}/reward", "operators", {"reward": reward}) is None:
                return
            self.rewards[session] = reward

    def _post(self, path: str, key: str, body: Any, session: str = "") -> Any:
        """Send a request until it is answered, as clients do. Return None once the users are stopped."""
        headers = {"authorization": f"Bearer {self._keys[key]}"} | ({"x-session-id": session} if session else {})
        while not self._stop.is_set():
            try:
                response = httpx.post(f"{self._url}{path}", headers=headers, json=body, timeout=LIMIT)
            except httpx.HTTPError:
                response = None
            if response is not None and response.status_code == 200:
                return response.json()
            assert response is None or response.status_code in (409, 429, 503), response.text
            self._stop.wait(0.1)
        return None


@pytest.fixture
def trained(first_run: Run, tmp_path: Path) -> Path:
    """A copy of a finished run."""
    run: Path = shutil.copytree(first_run.directory, tmp_path / "runs" / "tiny")
    return run


def kill(command: Command, name: str) -> None:
    os.kill(command.child(name), signal.SIGKILL)


def test_every_session_with_a_reward_is_trained_once_although_processes_are_killed(
    trained: Path, start: Start, tmp_path: Path
) -> None:
    port, folder, run = free_port(), tmp_path / "failpoints", trained.parent / "tiny-serve"
    folder.mkdir()
    options = settings(
        f"run.steps={STEPS}",
        f"rollout.prompts_per_step={SESSIONS}",
        "checkpoint.every_steps=2",
        "gateway.enabled=false",
        "services.generator.num_threads=1",
        "environment.traffic.requests_per_minute=100000",
    )
    command = start(
        *("serve", trained, "--listen", f"127.0.0.1:{port}", *options),
        environment={VARIABLE: KILLED, FOLDER_VARIABLE: str(folder)},
    )
    command.wait_for(lambda: "dashboard" in command.out or (run / "services.json").exists())
    users = Users(port, trained / "serve", "tiny-serve")
    try:
        command.wait_for(lambda: committed_steps(run) >= 2)
        kill(command, "generator")
        command.wait_for(lambda: committed_steps(run) >= 4)
        kill(command, "redis")
        result = command.wait()
    finally:
        users.stop()
    assert (result.code, result.leftovers) == (0, []), result
    for name in ("generator-0", "redis", "actor", "orchestrator"):
        assert f"{name}: killed by SIGKILL; restarted" in result.out
    rows = [
        json.loads(line)
        for step in range(1, STEPS + 1)
        for line in (run / f"trajectories/step-{step:06d}.jsonl").read_text().splitlines()
    ]
    sessions = [row["logged"]["session"] for row in rows]
    assert len(set(sessions)) == len(sessions) == STEPS * SESSIONS
    for row in rows:
        # The end of the run may come between a reward and its response.
        assert row["score"] == users.rewards.get(row["logged"]["session"], row["score"])
        segments = [each for branch in (row, *row.get("further_branches", [])) for each in branch["segments"]]
        assert sum(each["role"] == "policy" for each in segments) == 2
    # Three users at most wait for the response to a reward when the run ends.
    assert len(set(sessions) - set(users.rewards)) <= 3
    assert RunFiles(run).policy_step() == STEPS


def test_a_run_is_served_again_with_its_settings_from_any_folder(
    config: Path, first_run: Run, start: Start, tmp_path: Path
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run: Path = shutil.copytree(first_run.directory, home / "runs" / "tiny")
    config_path, served = run / "config.yaml", home / "runs" / "tiny-serve"
    # As if it had been started in its home with relative paths.
    tree = yaml.safe_load(config_path.read_text())
    shutil.copytree(tree["actor"]["model"], home / "models" / "reference")
    tree["run"]["directory"], tree["reference"]["model"] = "runs", "models/reference"
    config_path.write_text(FIRST_CONFIG_LINE + yaml.safe_dump(tree))
    port, other = free_port(), free_port()
    options = settings("rollout.prompts_per_step=1", "gateway.enabled=false", "services.generator.num_threads=1")

    def serve(*arguments: str, port: int, users: Callable[[Command], None]) -> str:
        command = start("serve", run, *arguments, *options, cwd=elsewhere)
        command.wait_for(lambda: (served / "services.json").exists())
        assert f"endpoint, once the services are ready: http://127.0.0.1:{port}/v1" in command.out
        client = Users(port, run / "serve", "tiny-serve")
        try:
            users(command)
        finally:
            client.stop()
        os.kill(command.process.pid, signal.SIGINT)
        result = command.wait()
        assert (result.code, result.leftovers) == (130, []), result
        assert f"to continue: quartet serve {run}\n" in result.out
        assert "--resume" not in result.out
        for unwanted in ("in_flight", "left", "/1000"):
            assert unwanted not in result.out.replace(str(tmp_path), "")
        return result.out

    first = serve("--listen", f"127.0.0.1:{port}", port=port, users=lambda command: steps_of(command, served, 1))
    assert "continues" not in first
    assert "step 1  reward" in first
    written = (run / "serve" / "config.yaml").read_text()
    assert str(home / "models" / "reference") in written
    step = committed_steps(served)
    again = serve(port=port, users=lambda command: steps_of(command, served, step + 1))
    assert f"continues {served} after step {step}\n" in again
    # For this time only.
    serve("--listen", f"127.0.0.1:{other}", port=other, users=lambda command: None)
    assert (run / "serve" / "config.yaml").read_text() == written


def steps_of(command: Command, run: Path, steps: int) -> None:
    """Wait until a run has committed so many steps, and the command has shown them."""
    command.wait_for(lambda: committed_steps(run) >= steps and f"step {steps}" in command.out)


def test_a_malformed_address_is_refused_by_its_option(trained: Path, call: Call) -> None:
    result = call("serve", trained, "--listen", "nonsense")
    assert result.code == 2
    assert "--listen nonsense: expected HOST:PORT" in result.err
    assert not (trained / "serve").exists()


def test_a_run_without_a_policy_is_not_served(trained: Path, call: Call) -> None:
    (trained / "policy.json").unlink()
    result = call("serve", trained)
    assert result.code == 2
    assert "has no policy yet" in result.err
    assert not (trained / "serve").exists()


def test_the_keys_are_readable_by_their_owner_only(trained: Path, call: Call) -> None:
    result = call("serve", trained, "--set", "rollout.samples_per_prompt=2")
    assert result.code == 2
    assert "samples_per_prompt" in result.err
    for name in ("viewers", "operators"):
        path = trained / "serve" / f"{name}.keys"
        assert path.stat().st_mode & 0o777 == 0o600
        assert len(path.read_text().strip()) > 40
