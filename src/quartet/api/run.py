"""``quartet.Run``: a run on the disk, active or not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from quartet.config.loading import load_config
from quartet.config.root import Config
from quartet.contract.control import Progress, Setting, SettingChange
from quartet.contract.trajectory import VersionSpan
from quartet.errors import ConfigError, QuartetError
from quartet.gateway.client import Api, connect, find_run
from quartet.launcher.background_run import BackgroundRun, ProgressLines, saved_state
from quartet.rpc.clients import OrchestratorClient
from quartet.rpc.security.allow_list import OPERATOR
from quartet.rpc.security.credentials import Credentials
from quartet.run_directory.checkpoints import checkpoint_folders, checkpoint_step
from quartet.run_directory.run_files import RunFiles
from quartet.run_directory.selection import checkpoint_at, roll_back_to, run_files
from quartet.run_directory.step_lines import read_step_lines
from quartet.run_directory.token_files import TrajectoryTokens

IDLE = "idle"
"""State of a run that is not active and has no outcome."""
TIMEOUT_SECONDS = 2.0
"""Time that an orchestrator has to respond. It responds at once, also during a step."""
RESTART_SECONDS = 15.0
"""Time without a response after which a run counts as ended. The orchestrator may be restarted in between."""
POLL_SECONDS = 0.2
"""Interval between two looks at a run."""


@dataclass(frozen=True, slots=True)
class RunTrajectory:
    """A prompt, the response to it, and the scores of a training step.

    ``score`` is the reward before shaping, ``parts`` its parts for an ensemble. ``kl`` is log π - log π_ref summed over the
    response, in nats. ``finished`` is false if the response reached its token limit. ``generator`` is the address of the
    generator, and ``weights_digest`` the digest of its weights; both are empty if the actor generated with its own weights.
    ``version_spans`` are the parts of the response by policy version, empty if ``policy_version`` generated all of it.
    ``segments`` are the turns of the policy and the environment's observations, with role, text, tokens and, for a turn, reward;
    empty without an environment. ``further_branches`` are the other token sequences of an episode, in the format of
    ``trajectories/``; ``segments`` are then those of the first.
    """

    id: str
    step: int
    prompt: str
    response: str
    score: float | None
    parts: dict[str, float]
    kl: float
    response_tokens: int
    finished: bool
    policy_version: int
    generator: str
    weights_digest: bytes
    version_spans: tuple[VersionSpan, ...]
    segments: list[dict[str, Any]]
    further_branches: list[dict[str, Any]]
    _files: RunFiles = field(repr=False, compare=False)
    _index: int = field(repr=False, compare=False)

    @property
    def tokens(self) -> TrajectoryTokens | None:
        """The token ids, log-probs, KL, advantages, returns and values, each an array [response tokens].

        None if the run has not kept them. Raises ConfigError if the file is damaged.
        """
        return self._files.read_tokens(self.step, self._index)


class Run:
    """A run, by its directory. It may be active in this or in another process, or have ended.

    All methods raise subclasses of ``quartet.errors.QuartetError``: ConfigError for invalid input or a run that is not active,
    ServiceUnavailable if an active run does not respond.
    """

    def __init__(self, directory: str | os.PathLike[str], _active: BackgroundRun | None = None) -> None:
        """Open the run in ``directory``, such as runs/NAME. Raises ConfigError if there is none."""
        self.directory = Path(directory)
        self._files = run_files(self.directory)
        self._active = _active

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r}, state={self.state!r}, step={self.step})"

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.directory.resolve().name

    @property
    def config(self) -> Config:
        """The complete config of the run."""
        return load_config(self._files.config)

    @property
    def state(self) -> str:
        """The state of the run.

        An active run is "starting", "training", "paused" or "recovering", any other "finished", "stopped", "failed" or "idle".
        "idle": interrupted before its last step. A run whose services another process is starting is "idle", too.
        """
        active = self._active
        if active is not None and not active.interrupted:
            return active.state.value
        progress = self._progress()
        return progress.state.value if progress is not None else self._saved_state()

    @property
    def step(self) -> int:
        """The last committed step, 0 before the first."""
        return len(self._committed())

    @property
    def total_steps(self) -> int:
        """The number of steps that the run is to take."""
        return self.config.run.steps

    @property
    def metrics(self) -> dict[str, NDArray[np.float64]]:
        """The metrics of all committed steps by name, each an array [steps] in order. NaN: the step has no such metric.

        ``metrics["step"]`` has the steps. ``pandas.DataFrame(run.metrics)`` makes a table. ``docs/reference/metrics.md`` explains
        every name.
        """
        return _columns(self._committed())

    @property
    def evaluations(self) -> dict[str, NDArray[np.float64]]:
        """The metrics of all evaluations by name, each an array [evaluations]. ``evaluations["step"]`` has the steps."""
        return _columns(read_step_lines(self._files.evaluation_summaries))

    def trajectories(self, step: int | None = None) -> list[RunTrajectory]:
        """Return the trajectories of a step, by default of the last committed one. Raises ConfigError if they are missing."""
        chosen = self.step if step is None else step
        rows = self._files.read_trajectories(chosen)
        try:
            return [
                RunTrajectory(
                    id=row["id"],
                    step=chosen,
                    prompt=row["prompt"],
                    response=row["response"],
                    score=row["score"],
                    parts=row.get("parts", {}),
                    kl=row["kl"],
                    response_tokens=row["response_tokens"],
                    finished=row["finished"],
                    policy_version=row["policy_version"],
                    generator=row.get("generator", ""),
                    weights_digest=bytes.fromhex(row.get("weights_digest", "")),
                    version_spans=tuple(
                        VersionSpan(span["policy_version"], bytes.fromhex(span["weights_digest"]), span["tokens"])
                        for span in row.get("version_spans", [])
                    ),
                    segments=row.get("segments", []),
                    further_branches=row.get("further_branches", []),
                    _files=self._files,
                    _index=index,
                )
                for index, row in enumerate(rows)
            ]
        except (KeyError, TypeError, ValueError):
            raise ConfigError(
                f"run {self.directory}: the trajectories of step {chosen} are damaged; put the file back"
            ) from None

    @property
    def policy(self) -> Path:
        """The saved policy in Hugging Face format. Raises ConfigError if the run has not saved it yet."""
        if not self._files.policy.is_dir():
            raise ConfigError(
                f"run {self.directory}: has no saved policy yet; the run saves it when it finishes or is stopped. "
                "checkpoints has the policies of earlier steps"
            )
        return self._files.policy

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The directories of the checkpoints, by step. ``quartet.generate`` accepts them."""
        return {checkpoint_step(path): path for path in checkpoint_folders(self._files)}

    @property
    def dashboard(self) -> str | None:
        """The link that opens the dashboard of an active run, with its token. None without a gateway."""
        if self._active is not None and self._active.dashboard is not None:
            return self._active.dashboard
        try:
            target = find_run(str(self.directory))
        except ConfigError:
            return None
        return f"{target.url}/#token={quote(target.token)}"

    def pause(self) -> None:
        """Pause the run after the current step."""
        with self._gateway() as api:
            api.post("/pause")

    def resume(self) -> None:
        """Continue a paused run. To continue a run that has ended, call ``quartet.train`` with ``resume=True``."""
        with self._gateway() as api:
            api.post("/resume")

    def stop(self) -> None:
        """Stop the run after the current step, and save its policy. ``wait`` waits for the end. No error if it has ended."""
        try:
            with self._gateway() as api:
                api.post("/stop")
        except ConfigError:
            if self.state not in ("finished", "stopped"):
                raise

    def checkpoint(self) -> None:
        """Write a checkpoint after the current step."""
        with self._gateway() as api:
            api.post("/checkpoint")

    @property
    def settings(self) -> dict[str, Setting]:
        """The settings that can change during the run, by name: value, minimum and maximum. Empty if it is not active."""
        with self._gateway() as api:
            rows = api.get("/settings")["settings"]
        return {row["name"]: Setting(row["name"], row["value"], row["low"], row["high"]) for row in rows}

    def set(self, values: Mapping[str, float] | None = None, /, **named_values: float) -> list[SettingChange]:
        """Change settings from the next step on: all of them, or none if one is refused. Return the changes.

        Call it as ``set(kl_coefficient=0.1)`` or, if the name has a dot, ``set({"actor.learning_rate": 1e-5})``.
        """
        with self._gateway() as api:
            rows = api.change_settings({**(values or {}), **named_values})
        return [SettingChange(**{name: row[name] for name in SettingChange.__dataclass_fields__}) for row in rows]

    def rollback(self, checkpoint: int | str) -> None:
        """Remove everything after a checkpoint, given by its step or tag.

        An active run then continues from it. For any other, ``quartet.train`` with ``resume=True`` does.
        """
        if self._is_active():
            step = checkpoint_at(self._files, str(checkpoint)).step
            with self._gateway() as api:
                api.post("/rollback", {"step": step})
        else:
            roll_back_to(self._files, str(checkpoint))
            self._active = None

    def wait(self, timeout: float | None = None, progress: bool = True) -> str:
        """Wait until the run ends, at most ``timeout`` seconds, and return its state. With ``progress``, print lines about it.

        Raises the error that ended the run. An interrupt ends the waiting, and the run continues.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._active is not None:
            return self._wait_here(self._active, deadline, progress)
        return self._wait_elsewhere(deadline, progress)

    def _wait_here(self, active: BackgroundRun, deadline: float | None, progress: bool) -> str:
        while not active.ended and (deadline is None or time.monotonic() < deadline):
            _print_line(active.display, POLL_SECONDS, progress)
        while _print_line(active.display, 0, progress):
            pass
        if active.ended and active.error is not None:
            raise active.error
        return self.state

    def _wait_elsewhere(self, deadline: float | None, progress: bool) -> str:
        display, responded = ProgressLines(str(self.directory)), time.monotonic()
        while deadline is None or time.monotonic() < deadline:
            now = self._progress()
            if now is not None:
                responded = time.monotonic()
                display.show(now)
            while _print_line(display, 0, progress):
                pass
            if outcome := self._files.read_outcome():
                outcome.raise_failure()
                return outcome.state.value
            if not self._files.services.exists() or time.monotonic() - responded > RESTART_SECONDS:
                return self._saved_state()
            time.sleep(POLL_SECONDS)
        return self.state

    def _progress(self) -> Progress | None:
        """Return the progress that the orchestrator of an active run reports, or None."""
        try:
            address = self._files.orchestrator_address()
            client = OrchestratorClient(address, TIMEOUT_SECONDS, Credentials(OPERATOR, self.config.security))
        except ConfigError:
            return None
        try:
            return client.progress()
        except QuartetError:
            return None
        finally:
            client.close()

    def _is_active(self) -> bool:
        if self._active is not None:
            return not self._active.ended
        progress = self._progress()
        return progress is not None and not progress.state.ended

    @contextmanager
    def _gateway(self) -> Iterator[Api]:
        with connect(find_run(str(self.directory))) as api:
            yield api

    def _saved_state(self) -> str:
        return saved_state(self._files, self.total_steps, self.step)

    def _committed(self) -> list[dict[str, Any]]:
        """Return the lines of the committed steps. Another process may be writing the file, so it is not repaired."""
        steps: list[dict[str, Any]] = []
        for line in read_step_lines(self._files.metrics):
            if line["step"] == len(steps) + 1:
                steps.append(line)
        return steps


def _columns(rows: list[dict[str, Any]]) -> dict[str, NDArray[np.float64]]:
    names = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, int | float))
    return {name: np.array([row.get(name, np.nan) for row in rows], dtype=np.float64) for name in names}


def _print_line(display: ProgressLines, timeout: float, progress: bool) -> bool:
    """Print the next line, and return whether there was one."""
    line = display.take(timeout)
    if line is not None and progress:
        print(line, flush=True)
    return line is not None
