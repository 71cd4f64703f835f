"""Failpoints: their actions and hits. Without a setting in the environment they do nothing."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from quartet.errors import ConfigError
from quartet.system.failpoints import FAILPOINTS, FOLDER_VARIABLE, VARIABLE, InjectedFault, arm, failpoint
from tests.waiting import LIMIT, wait_until

ROOT = Path(__file__).parents[3]


@cache
def code() -> list[ast.AST]:
    """Return the nodes of all modules that contain the name of a failpoint or a call, except that of the failpoints."""
    names = re.compile("|".join(map(re.escape, ("failpoint(", *FAILPOINTS))))
    return [
        node
        for folder in ("src/quartet", "services")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "failpoints.py" and names.search(text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant | ast.Call)
    ]


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    arm({})


def armed(setting: str, folder: Path) -> list[str]:
    return arm({VARIABLE: setting, FOLDER_VARIABLE: str(folder)})


def fires(name: str) -> bool:
    try:
        failpoint(name)
    except InjectedFault:
        return True
    return False


def test_failpoints_are_off_by_default(tmp_path: Path) -> None:
    assert arm({FOLDER_VARIABLE: str(tmp_path)}) == []
    assert arm({VARIABLE: " ,", FOLDER_VARIABLE: "/nowhere"}) == []
    assert not any(fires(name) for name in FAILPOINTS)
    assert list(tmp_path.iterdir()) == []


def test_a_failpoint_fires_only_at_the_given_hit(tmp_path: Path) -> None:
    assert armed("actor.stepping=fail@3, actor.stepped=fail", tmp_path) == ["actor.stepping", "actor.stepped"]
    assert [fires("actor.stepping") for _ in range(5)] == [False, False, True, False, False]
    assert [fires("actor.stepped") for _ in range(3)] == [True, False, False]
    assert not fires("critic.stepping")


def test_a_restarted_process_passes_a_fired_failpoint(tmp_path: Path) -> None:
    armed("actor.stepped=fail", tmp_path)
    assert fires("actor.stepped")
    armed("actor.stepped=fail", tmp_path)
    assert not fires("actor.stepped")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    armed("actor.stepped=fail", elsewhere)
    assert fires("actor.stepped")


def test_concurrent_threads_are_counted_and_one_of_them_fires(tmp_path: Path) -> None:
    armed("reward.scoring=fail@40", tmp_path)
    fired: list[bool] = []
    threads = [
        threading.Thread(target=lambda: fired.extend(fires("reward.scoring") for _ in range(10))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(fired) == [False] * 39 + [True]


def test_hold_writes_the_process_id_and_continues_when_released(tmp_path: Path) -> None:
    armed("orchestrator.sealed=hold", tmp_path)
    passed = threading.Event()
    thread = threading.Thread(target=lambda: (failpoint("orchestrator.sealed"), passed.set()), daemon=True)
    thread.start()
    reached = tmp_path / "orchestrator.sealed.reached"
    wait_until(reached.exists)
    assert int(reached.read_text()) == os.getpid()
    assert not passed.wait(0.1)
    (tmp_path / "orchestrator.sealed.go").touch()
    assert passed.wait(LIMIT)


def test_a_failpoint_of_a_rank_fires_in_that_rank_only(tmp_path: Path) -> None:
    environment = {VARIABLE: "actor.stepped:1=fail", FOLDER_VARIABLE: str(tmp_path)}
    assert arm(environment) == arm(environment, 2) == []
    assert not fires("actor.stepped")
    assert arm(environment, 1) == ["actor.stepped"]
    assert fires("actor.stepped")


def test_delay_sleeps(tmp_path: Path) -> None:
    armed("critic.scoring=delay:0.2@2", tmp_path)
    failpoint("critic.scoring")
    start = time.monotonic()
    failpoint("critic.scoring")
    assert 0.2 <= time.monotonic() - start < 5


def test_kill_ends_the_process_only_once(tmp_path: Path) -> None:
    code = (
        "import os; from quartet.system.failpoints import arm, failpoint\n"
        "arm(os.environ); failpoint('actor.saving'); print('by')"
    )
    environment = {VARIABLE: "actor.saving=kill", FOLDER_VARIABLE: str(tmp_path), "PYTHONPATH": str(ROOT / "src")}

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )

    first, second = run(), run()
    assert (first.returncode, "by" in first.stdout) == (-signal.SIGKILL, False)
    assert (second.returncode, "by" in second.stdout) == (0, True)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("actor.sleeping=kill", "actor.sleeping: unknown failpoint; expected one of actor.loading, "),
        ("actor.stepped", "'actor.stepped': expected NAME=ACTION"),
        ("actor.stepped=explode", "'actor.stepped=explode': expected NAME=ACTION"),
        ("actor.stepped=fail@0", "'actor.stepped=fail@0': expected"),
        ("actor.stepped=fail@x", "'actor.stepped=fail@x': expected"),
        ("actor.stepped=delay", "'actor.stepped=delay': expected"),
        ("actor.stepped=delay:-1", "'actor.stepped=delay:-1': expected"),
        ("actor.stepped=hold:1", "'actor.stepped=hold:1': expected"),
        ("actor.stepped=fail,actor.stepped=kill", "actor.stepped: given twice"),
    ],
)
def test_an_invalid_setting_is_refused_at_the_start(setting: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        armed(setting, tmp_path)
    assert str(refused.value).startswith(f"{VARIABLE}: {message}")


@pytest.mark.parametrize("folder", [None, "", "nowhere"])
def test_failpoints_without_a_folder_are_refused(folder: str | None) -> None:
    with pytest.raises(ConfigError, match=f"{FOLDER_VARIABLE}: .*expected an existing folder"):
        arm({VARIABLE: "actor.stepped=fail", **({} if folder is None else {FOLDER_VARIABLE: folder})})


def run_service(setting: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Start a service process with this setting and a missing config."""
    environment = {VARIABLE: setting, FOLDER_VARIABLE: str(folder), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-m", "quartet.services", "reward", "--config", str(folder / "none.yaml")]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_service_logs_that_failpoints_are_set(tmp_path: Path) -> None:
    result = run_service("reward.scoring=kill", tmp_path)
    assert "level='warning'" in result.stderr
    assert "names=['reward.scoring']" in result.stderr
    assert "failpoints" not in run_service("", tmp_path).stderr


def test_a_service_with_a_wrong_setting_does_not_start(tmp_path: Path) -> None:
    result = run_service("reward.scores=kill", tmp_path)
    assert result.returncode == 2
    assert f"error: {VARIABLE}: reward.scores: unknown failpoint" in result.stderr


def test_every_failpoint_is_used_exactly_once() -> None:
    results = [node.value for node in code() if isinstance(node, ast.Constant) and node.value in FAILPOINTS]
    assert sorted(results) == sorted(FAILPOINTS)


def test_every_call_names_an_existing_failpoint() -> None:
    calls = [
        call
        for call in code()
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "failpoint"
    ]
    named = {call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)}
    assert named <= FAILPOINTS.keys()
    assert len(named) >= len(FAILPOINTS) - 6  # Failpoints of optimizer steps and saves are looked up by role.


def test_no_shipped_file_sets_a_failpoint() -> None:
    shipped = [path for folder in ("configs", "examples", "docker", "helm") for path in (ROOT / folder).rglob("*.*")]
    shipped += [ROOT / "Makefile", *ROOT.glob("docker-compose*.yml")]
    assert [path for path in shipped if path.is_file() and VARIABLE in path.read_text(errors="ignore")] == []
