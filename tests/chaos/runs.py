"""Execution of a chaos case: one `quartet train` with a fault, compared with the undisturbed run."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from quartet.contract.weights import TransferWay
from quartet.demo.toy_task import ToyTask, make_toy_task
from quartet.system.failpoints import FOLDER_VARIABLE
from tests.chaos.cases import (
    AGENT,
    CHECKPOINT_EVERY,
    EPISODES_PER_STEP,
    EVERYTHING,
    HOLD,
    KEPT,
    KILL,
    MINI_BATCHES,
    PROMPTS_PER_STEP,
    SCORE_BATCH,
    STEPS,
    STOPPED_SECONDS,
    TURNS,
    Case,
    LongEpisodes,
    role_and_rank,
)
from tests.e2e.commands import QUARTET, Command, CommandResult
from tests.e2e.conftest import WIDE, without_measurements
from tests.waiting import LIMIT, wait_until

RUN = "chaos"
POLL = 0.01
MODULES = {"PYTHONPATH": str(Path(__file__).parents[2])}
"""Environment of commands that import classes of the tests."""


@dataclass(frozen=True)
class Result:
    """Result of a case.

    ``recoveries``: restarted processes, and returns of the run to its last commit. ``seconds``: from the signal to the commit of
    the second step after it, or None if there is none. ``problems``: one message per violated property.
    """

    case: str
    recoveries: int
    seconds: float | None
    total_seconds: float
    problems: tuple[str, ...]


class ChaosSetup:
    """Folder with the toy task, the config, and the undisturbed run of each seed, which all cases share."""

    def __init__(
        self,
        folder: Path,
        stale: bool = False,
        ranks: int = 1,
        turns: int = 0,
        dynamic_sampling: bool = False,
        greedy_baselines: bool = False,
        fresh: bool = False,
        generators: int = 0,
        way: TransferWay = "shared memory",
        episodes: LongEpisodes | None = None,
        evaluates: bool = False,
    ) -> None:
        """``stale``: train one step off-policy. ``ranks``: processes of actor and of critic. ``turns``: with an environment.

        ``dynamic_sampling``: groups of two responses, with a reward function that scores some of them alike.
        ``greedy_baselines``: estimator remax. ``fresh``: start commands as users do, without forks of the tests. ``generators``:
        processes that generate instead of the actor, and may be killed any number of times; ``way``: how they get weights.
        ``episodes``: long ones, with their own number of generators. ``evaluates``: after every step, on the last generator.
        """
        self.folder, self.fresh = folder.absolute(), fresh
        self.folder.mkdir(parents=True, exist_ok=True)
        toy_task = self._toy_task()
        generators = generators if episodes is None else episodes.generators
        tree: dict[str, Any] = {
            "run": {"name": RUN, "steps": STEPS},
            "data": {"prompts": str(toy_task.prompts), "max_prompt_tokens": 24},
            # An adaptive KL coefficient and running score statistics are state that a resumed run could lose.
            "algorithm": {
                "num_mini_batches": MINI_BATCHES,
                "kl_controller": {"kind": "adaptive"},
                "score": {"normalize": "running"},
            },
            "rollout": {
                "prompts_per_step": PROMPTS_PER_STEP,
                "max_response_tokens": 12,
                "score_batch_size": SCORE_BATCH,
                "max_off_policy_steps": int(stale),
            },
            "actor": {"model": str(toy_task.policy), "learning_rate": 1e-3},
            "critic": {"learning_rate": 1e-3},
            "reward": {"model": str(toy_task.reward)},
            "checkpoint": {"every_steps": CHECKPOINT_EVERY, "keep_last": len(KEPT)},
            "recovery": {"backoff_seconds": 0.05},
            # One thread each, because the number of threads changes the arithmetic.
            "services": {
                role: {"num_threads": 1, "processes": ranks if role in ("actor", "critic") else 1}
                for role in ("actor", "critic", "reward", "reference")
            },
        }
        if generators:
            group = "gloo" if way == "process group" else "none"
            tree["rollout"] |= {
                "generators": generators,
                "share_weights": way == "shared memory",
                "process_group": group,
            }
            tree["recovery"] |= {"max_restarts": 1000}
            tree["services"]["generator"] = {"num_threads": 1}
        if turns:
            tree["rollout"] |= {"max_turns": turns, "max_turn_tokens": 6, "max_response_tokens": 24}
            tree["environment"] = {
                "class_name": "quartet.environments.examples:WordPuzzle",
                "arguments": {"turns": turns},
                "num_workers": 2,
            }
        if episodes is not None:
            # As many tokens as the positions of the model allow.
            limits = {"max_turns": TURNS, "max_turn_tokens": 1, "max_response_tokens": 100}
            tree["rollout"] |= {"prompts_per_step": EPISODES_PER_STEP, **limits}
            tree["environment"] = self._agent() if episodes.agents else corridor(episodes.restores)
            if episodes.agents:
                tree["reward"], tree["critic"]["model"] = {"source": "none"}, str(toy_task.reward)
        if dynamic_sampling:
            groups = {"prompts_per_step": PROMPTS_PER_STEP // 2, "samples_per_prompt": 2}
            tree["rollout"] |= {**groups, "dynamic_sampling": True}
            tree["reward"] = {"source": "function", "function": "quartet.rewards.examples:length_target"}
            tree["critic"]["model"] = str(toy_task.reward)
        if evaluates:
            tree["data"]["validation"] = str(toy_task.prompts)
            evaluated = {"name": "more", "path": str(toy_task.prompts), "samples_per_prompt": 2, "pass_at": [2]}
            tree["evaluation"] = {"every_steps": 1, "max_prompts": 4, "generators": 1, "sets": [evaluated]}
        if greedy_baselines:
            tree["algorithm"]["estimator"] = "remax"
        self.config = self.folder / "chaos.yaml"
        self.config.write_text(yaml.safe_dump(tree, sort_keys=False))

    def _agent(self) -> dict[str, Any]:
        """Return the section of an agent that writes its own text between its turns."""
        template = self.folder / "template.jinja"
        template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
        command = [sys.executable, str(Path(__file__).with_name("agent.py")), str(TURNS)]
        # A special token in an answer, which its text does not have, begins a branch.
        agent = {"command": command, "pass_variables": [HOLD, FOLDER_VARIABLE], "max_branches": TURNS}
        return {"kind": "agent", "agent": agent, "chat_template": str(template)}

    def _toy_task(self) -> ToyTask:
        return make_toy_task(self.folder / "toy-task", recipe=WIDE)

    def undisturbed(self, seed: int) -> Path:
        """Return the directory of the undisturbed run of a seed. The first call runs it."""
        folder = self.folder / f"undisturbed-{seed}"
        directory, done = folder / "runs" / RUN, folder / "done"
        if not done.exists():
            folder.mkdir(exist_ok=True)
            options = [*train(self.config, seed), "--overwrite"]
            command = Command(QUARTET, *options, cwd=folder, environment=MODULES, fresh=self.fresh)
            try:
                result = command.wait(LIMIT)
            finally:
                command.clean_up()
            assert (result.code, result.leftovers) == (0, []), result
            done.touch()
        return directory


def corridor(restores: bool) -> dict[str, Any]:
    """Return the section of an environment whose episodes all have TURNS turns."""
    return {"class_name": "tests.chaos.corridor:Corridor", "arguments": {"turns": TURNS, "restores": restores}}


def train(config: Path, seed: int) -> list[str | Path]:
    """Return the arguments of ``quartet``."""
    return ["train", config, "--set", f"run.seed={seed}"]


def disturb(
    case: Case,
    setup: ChaosSetup,
    before_fault: Callable[[Command], None] = lambda command: None,
    check: Callable[[Path], Iterator[str]] = lambda run: iter(()),
) -> Result:
    """Run a case to its end, and compare its files with those of the undisturbed run.

    ``before_fault`` is called with the command of the run while it is held. ``check`` yields further problems of the run in a
    directory.
    """
    expected = setup.undisturbed(case.seed)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        disturbed = _DisturbedRun(case, setup, folder, before_fault)
        try:
            disturbed.run()
            problems = [
                *disturbed.problems,
                *differences(disturbed.directory, expected),
                *check(disturbed.directory),
            ]
        except AssertionError as error:
            problems = [*disturbed.problems, str(error)]
        finally:
            disturbed.clean_up()
        if problems and disturbed.directory.exists():
            copy = shutil.copytree(disturbed.directory, setup.folder / "failed" / case.name, dirs_exist_ok=True)
            problems.append(f"its files and logs are in {copy}")
        total = time.monotonic() - started
        return Result(case.name, disturbed.recoveries, disturbed.seconds, total, tuple(problems))


class _DisturbedRun:
    """One run with a fault."""

    def __init__(self, case: Case, setup: ChaosSetup, folder: Path, before_fault: Callable[[Command], None]) -> None:
        self._case, self._setup, self._folder, self._before_fault = case, setup, folder, before_fault
        self._failpoints = folder / "failpoints"
        self._failpoints.mkdir()
        self.directory = folder / "runs" / RUN
        self.problems: list[str] = []
        self.recoveries = 0
        self.seconds: float | None = None
        self._commands: list[Command] = []

    def run(self) -> None:
        """Hold the run at the failpoint, inject the fault, and wait for the end. Raises AssertionError if it does not end."""
        command = self._start()
        failpoint = self._case.moment.failpoint_of(self._case.process)
        command.wait_for((self._failpoints / f"{failpoint}.reached").exists)
        self._before_fault(command)
        command = self._inject(command, self._failpoints / f"{failpoint}.go")
        result = command.wait(LIMIT)
        self._check(result)

    def clean_up(self) -> None:
        """End all remaining processes."""
        for command in self._commands:
            command.clean_up()

    def _start(self, *options: str) -> Command:
        environment = {**self._case.variables, FOLDER_VARIABLE: str(self._failpoints), **MODULES}
        arguments = [*train(self._setup.config, self._case.seed), *options]
        self._commands.append(
            Command(QUARTET, *arguments, cwd=self._folder, environment=environment, fresh=self._setup.fresh)
        )
        return self._commands[-1]

    def _inject(self, command: Command, release: Path) -> Command:
        """Inject the fault. Return the command that continues the run."""
        before, started = last_step(self.directory), time.monotonic()
        if self._case.process == EVERYTHING:
            command.process.kill()
            command.process.wait()
            wait_until(lambda: not command.processes(), lambda: f"without the launcher: {command.processes()}")
            release.touch()
            command = self._start("--resume")
        elif self._case.fault == KILL:
            os.kill(self._victim(command), signal.SIGKILL)
            release.touch()
        else:
            victim = self._victim(command)
            os.kill(victim, signal.SIGSTOP)
            release.touch()
            time.sleep(STOPPED_SECONDS)
            os.kill(victim, signal.SIGCONT)
        # The current step may end without the victim. The next one needs every process from its first token.
        command.wait_for(lambda: last_step(self.directory) >= before + 2, LIMIT)
        self.seconds = time.monotonic() - started
        return command

    def _victim(self, command: Command) -> int:
        """Return the process id of the victim."""
        if self._case.process == AGENT:
            return int((self._failpoints / f"{AGENT}.reached").read_text())
        return command.child(*role_and_rank(self._case.process))

    def _check(self, result: CommandResult) -> None:
        if (result.code, result.err, result.leftovers) != (0, "", []):
            self.problems.append(
                f"status {result.code}, remaining processes {result.leftovers}, stderr {result.err.strip()!r}"
            )
        restarts = len(re.findall(r"restarted \(\d+ of", result.out))
        log = (self.directory / "logs" / "orchestrator.log").read_text(errors="replace")
        self.recoveries = restarts + log.count("event='recovery started'") + len(self._commands) - 1
        # The environment service runs an agent again.
        if restarts != (self._case.fault == KILL and self._case.process not in (EVERYTHING, AGENT)):
            self.problems.append(f"{restarts} processes were restarted: {result.out}")


def last_step(run: Path) -> int:
    """Return the last step in the run's metrics, or 0."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    try:
        return int(json.loads(lines[-1])["step"]) if lines else 0
    except ValueError:  # A line is being written.
        return 0


def differences(run: Path, expected: Path) -> Iterator[str]:
    """Yield a message for each difference between the disturbed ``run`` and the undisturbed one."""
    if not (run / "policy" / "model.safetensors").exists():
        yield "there is no policy"
        return
    result, expected_digests = digests(run), digests(expected)
    for name in sorted(result.keys() | expected_digests.keys()):
        if result.get(name) != expected_digests.get(name):
            yield f"{name}: SHA-256 {result.get(name)}, undisturbed {expected_digests.get(name)}"
    steps = step_metrics(run)
    if [step["step"] for step in steps] != list(range(1, STEPS + 1)):
        yield f"metrics.jsonl has the steps {[step['step'] for step in steps]}"
    for step, other in zip(steps, step_metrics(expected), strict=False):
        if step != other:
            names = sorted(name for name in step.keys() | other.keys() if step.get(name) != other.get(name))
            yield f"step {step['step']}: metrics differ from the undisturbed run: {', '.join(names)}"
    yield from _trajectory_differences(run, expected)
    yield from _manifest_differences(run)
    if evaluations(run) != evaluations(expected):
        yield "the files of evaluations differ from the undisturbed run"


def _trajectory_differences(run: Path, expected: Path) -> Iterator[str]:
    result, undisturbed = trajectories(run), trajectories(expected)
    ids = [line["id"] for lines in result.values() for line in lines]
    if len(set(ids)) != len(ids) or sorted(ids) != sorted(
        line["id"] for lines in undisturbed.values() for line in lines
    ):
        yield f"not every trajectory was trained on once: {len(ids)} lines, {len(set(ids))} ids"
    for step, lines in result.items():
        versions = {line["policy_version"] for line in lines}
        if max(versions) >= step or versions != {line["policy_version"] for line in undisturbed.get(step, [])}:
            yield f"step {step} trained on policy versions {sorted(versions)}"
        if lines != undisturbed.get(step):
            yield f"step {step}: trajectories differ from the undisturbed run"


def _manifest_differences(run: Path) -> Iterator[str]:
    manifests = [json.loads(path.read_text()) for path in sorted((run / "checkpoints").glob("step-*/manifest.json"))]
    if [manifest["step"] for manifest in manifests] != list(KEPT):
        yield f"checkpoints are of the steps {[manifest['step'] for manifest in manifests]}"
    epochs = [manifest["leader_epoch"] for manifest in manifests]
    if epochs != sorted(epochs):
        yield f"leader epochs decrease between checkpoints: {epochs}"
    if leftovers := [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]:
        yield f"incomplete checkpoints: {leftovers}"


def digests(run: Path) -> dict[str, str]:
    """Return the SHA-256 of the final weights, and of all weights and optimizers in checkpoints, by path."""
    files = [run / "policy" / "model.safetensors", *(run / "checkpoints").glob("step-*/**/*.safetensors")]
    return {file.relative_to(run).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def evaluations(run: Path) -> dict[str, str]:
    """Return the content of the files of evaluations by path. There are none if the run does not evaluate."""
    files = [*run.glob("evaluations.jsonl"), *(run / "evaluations").rglob("*.jsonl")]
    return {file.relative_to(run).as_posix(): file.read_text() for file in files}


def step_metrics(run: Path) -> list[dict[str, float]]:
    """Return the metrics of every step, except durations."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return without_measurements(steps)


def trajectories(run: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the lines of every trajectory file, by step, without the address of the generator, which is another in every run."""
    return {
        int(path.stem.removeprefix("step-")): [
            {name: value for name, value in json.loads(line).items() if name != "generator"}
            for line in path.read_text().splitlines()
        ]
        for path in sorted((run / "trajectories").glob("step-*.jsonl"))
    }
