"""`quartet sweep`: real runs over a grid, their table, and what an interruption or a failure leaves."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from quartet.buffer.connection import connect
from quartet.buffer.embedded_redis import EmbeddedRedis
from quartet.run_directory.locking_and_removal import lock_run_directory
from quartet.run_directory.run_files import RunFiles
from tests.e2e.commands import committed_steps, settings
from tests.e2e.conftest import Call, Run, Start, weights
from tests.waiting import LIMIT, wait_until

SWEEP = Path("runs", "tiny-sweep")
PASSWORD = "s3cret-of-the-tests"  # pragma: allowlist secret - an example


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[str]:
    """The URL, with its password, of a Redis that requires one."""
    with EmbeddedRedis(tmp_path / "redis", tmp_path / "redis.log") as server:
        connect(server.url).config_set("requirepass", PASSWORD)
        yield f"{server.url}?password={PASSWORD}"


@pytest.mark.slow
def test_failed_runs_do_not_end_the_sweep_and_a_second_call_retries_only_them(
    start: Start, call: Call, config: Path, few_processes: list[str], tmp_path: Path
) -> None:
    arguments = [*few_processes, *settings("run.steps=1"), "--seeds", "3"]
    folder = tmp_path / SWEEP
    command = start("sweep", config, *arguments)
    command.wait_for(lambda: (folder / "sweep.json").exists())
    # While the first run starts: a run does not start in a directory that another process has locked.
    with lock_run_directory(RunFiles(folder / "seed-1")), lock_run_directory(RunFiles(folder / "seed-2")):
        result = command.wait(LIMIT)
    assert result.code == 1, result
    assert "2 of 3 runs failed" in result.err
    assert "seed-1: failed: run directory" in result.out
    assert result.leftovers == []
    # The output of a run has the token of its gateway.
    assert (folder / "logs" / "seed-0.log").stat().st_mode & 0o777 == 0o600
    first = (folder / "seed-0" / "metrics.jsonl").read_bytes()
    result = start("sweep", SWEEP, "--jobs", "2").wait(LIMIT)
    assert result.code == 0, result
    assert "seed-0" not in result.out
    assert result.out.index("seed-2: started") < result.out.index("finished in")
    assert result.leftovers == []
    assert (folder / "seed-0" / "metrics.jsonl").read_bytes() == first
    (row,) = csv.DictReader((folder / "table.csv").open())
    assert (row["runs"], row["finished"], row["failed"], row["best"]) == ("3", "3", "0", "1")
    values = [json.loads((folder / f"seed-{seed}" / "metrics.jsonl").read_text())["reward_mean"] for seed in range(3)]
    assert float(row["reward_mean"]) == pytest.approx(sum(values) / 3)
    assert f"{sum(values) / 3:.4g} ± " in call("sweep", SWEEP, "--table").out
    # The same arguments are the same sweep, which has nothing left to do.
    repeated = call("sweep", config, *arguments)
    assert (repeated.code, "all 3 runs are finished" in repeated.out) == (0, True)
    other = call("sweep", config, *few_processes, "--seeds", "2")
    assert other.code == 2
    assert "has another grid, --seeds 3, not --seeds 2; continue it with quartet sweep" in other.err
    changed = call("sweep", config, *arguments, *settings("actor.learning_rate=2e-3"))
    assert changed.code == 2
    assert "actor.learning_rate is 0.002, the sweep has 0.001" in changed.err


@pytest.mark.slow
def test_a_killed_sweep_leaves_no_process_and_continues_with_the_same_bits(
    start: Start, config: Path, few_processes: list[str], secured: str, first_run: Run, tmp_path: Path
) -> None:
    options = ["--seeds", "2", "--jobs", "2", *settings(f"buffer.url={secured}")]
    command = start("sweep", config, *few_processes, *options)
    run, other = (tmp_path / SWEEP / f"seed-{seed}" for seed in range(2))
    command.wait_for(lambda: committed_steps(run) >= 2 and committed_steps(other) >= 1)
    command.process.kill()
    wait_until(lambda: not command.processes(), command.processes)
    assert committed_steps(run) < 8
    assert files_with(PASSWORD, tmp_path / SWEEP) == []
    result = start("sweep", SWEEP, environment={"QUARTET_BUFFER_URL": secured}).wait(LIMIT)
    assert result.code == 0, result
    assert "seed-0: resumed at step" in result.out
    assert result.leftovers == []
    assert weights(run) == weights(first_run.directory)


def test_runs_use_a_redis_whose_password_is_in_no_file_and_sigterm_ends_two_at_once(
    start: Start, call: Call, config: Path, few_processes: list[str], secured: str, tmp_path: Path
) -> None:
    options = [
        *settings("run.steps=1000000", "algorithm.estimator=reinforce"),
        "--seeds",
        "2",
        "--jobs",
        "2",
        "--name",
        "long",
    ]
    protected = tmp_path / "protected.yaml"
    protected.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), "buffer": {"url": secured}}))
    command = start("sweep", protected, *few_processes, *options)
    folder = tmp_path / "runs" / "long"
    command.wait_for(lambda: all(committed_steps(folder / f"seed-{seed}") >= 1 for seed in range(2)))
    assert not [line for line in command.processes().values() if PASSWORD in line]
    command.process.terminate()
    result = command.wait(LIMIT)
    assert (result.code, result.err, result.leftovers) == (130, "stopped\n", [])
    assert "to continue: quartet sweep runs/long, with QUARTET_BUFFER_URL set to unix://" in result.out
    assert PASSWORD not in result.out
    assert files_with(PASSWORD, folder) == []
    repeated = call("sweep", Path("runs", "long"))
    assert (repeated.code, "give the complete URL in the environment variable QUARTET_BUFFER_URL" in repeated.err) == (
        2,
        True,
    ), repeated
    assert call("sweep", Path("runs", "long"), "--table").code == 0


def files_with(text: str, folder: Path) -> list[Path]:
    """Return the files below the folder that contain a text."""
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


@pytest.mark.slow
def test_ctrl_c_ends_two_runs_at_once_in_order(
    start: Start, config: Path, few_processes: list[str], tmp_path: Path
) -> None:
    options = [*settings("run.steps=1000000"), "--seeds", "2", "--jobs", "2", "--name", "long"]
    command = start("sweep", config, *few_processes, *options, terminal=True)
    folder = tmp_path / "runs" / "long"
    command.wait_for(lambda: all(committed_steps(folder / f"seed-{seed}") >= 1 for seed in range(2)))
    command.type("\x03")
    result = command.wait(LIMIT)
    assert (result.code, result.leftovers) == (130, []), result
    assert "to continue: quartet sweep runs/long\r\n" in result.out
    assert all("to continue:" in (folder / "logs" / f"seed-{seed}.log").read_text() for seed in range(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "actor.learning_rat=1,2"], "--set actor.learning_rat: unknown key; did you mean 'learning_rate'?"),
        (["--set", "actor.learning_rate=1e-5,fast"], "--set actor.learning_rate: expected a number, not 'fast'"),
        (["--set", "actor.model=./nowhere,./elsewhere"], "in the setting actor.model=./nowhere of the sweep"),
        (["--set", "actor.learning_rate=1e-5,1e-5"], "the value 1e-5 is given twice; remove one"),
        (["--set", "actor.learning_rate=1e-5,0.00001"], "the same as actor.learning_rate=1e-5; remove one of the two"),
        (["--set", "reference.model="], "--set reference.model=: an empty value; write null or a value"),
        (["--set", "actor.model='a,b',c"], "in the setting actor.model='a,b' of the sweep"),
        (["--set", "actor.model='a,b"], "is missing; close every bracket and quote"),
        (["--seeds", "0"], "--seeds 0: expected 1 to 1000 seeds; for the one seed 0: --set run.seed=0"),
        (["--seeds", "1,1"], "--seeds 1,1: a seed is given twice; remove one"),
        (["--jobs", "0"], "Invalid value for '--jobs'"),
        (["--seeds", "many"], "--seeds many: expected a number of seeds, such as 3, or seeds, such as 0,7"),
        (["--name", "a/b"], "--name a/b: expected 1 to 64 letters"),
        (["--metric", "reward"], "--metric reward: unknown metric; did you mean reward_"),
        (["--metric", "eval_kl"], "--metric eval_kl: the runs are not evaluated"),
        (["--table"], "has no sweep yet; start it without --table"),
    ],
)
def test_wrong_arguments_are_refused_before_the_first_run(
    options: list[str], message: str, call: Call, config: Path, tmp_path: Path
) -> None:
    result = call("sweep", config, *options)
    assert (result.code, message in result.err) == (2, True), result.err
    assert not list(tmp_path.glob("runs/*/*/config.yaml"))
    assert not list(tmp_path.glob("runs/*/sweep.json"))


def test_a_file_in_place_of_a_folder_and_a_missing_config_are_refused(call: Call, config: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / SWEEP).touch()
    is_file = call("sweep", config)
    assert (is_file.code, is_file.err.startswith(f"error: sweep {SWEEP}: {SWEEP} exists and is not a folder")) == (
        2,
        True,
    )
    below = call("sweep", config, *settings(f"run.directory={SWEEP}"))
    assert (below.code, f"{SWEEP} exists and is not a folder; set run.directory" in below.err) == (2, True), below.err
    absent = call("sweep", "absent.yaml")
    assert (absent.code, absent.err.count("\n")) == (2, 1)
    assert absent.err.startswith("error: config absent.yaml: cannot be read (No such file or directory)")


def test_a_folder_that_is_no_sweep_is_refused(call: Call, config: Path, tmp_path: Path) -> None:
    folder = tmp_path / SWEEP
    folder.mkdir(parents=True)
    assert "has no sweep.json; expected a config file, or the folder of a sweep" in call("sweep", SWEEP).err
    (folder / "notes.txt").touch()
    result = call("sweep", config)
    assert (result.code, "other files, such as notes.txt" in result.err) == (2, True), result.err
    (folder / "notes.txt").unlink()
    (folder / "sweep.json").write_text("{}")
    result = call("sweep", SWEEP)
    assert (result.code, "sweep.json: cannot be read; put the file back" in result.err) == (2, True), result.err
