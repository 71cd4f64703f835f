"""The files that a run leaves below its directory."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from quartet.durable_files import append_durably, storing, write_durably
from quartet.errors import ConfigError
from quartet.run_directory.timeline_file import append_timeline, keep_timeline
from quartet.run_directory.token_files import TrajectoryTokens, kept_tokens, read_tokens, write_tokens
from quartet.types import Alert, Role

MARK = "# The config of a run of Quartet, as resolved.\n"
"""First line of every run's config.yaml: by it a run's directory is known."""


class RunFiles:
    """``config.yaml``, ``metrics.jsonl``, ``trajectories/``, ``checkpoints/``, ``policy/``, ``logs/`` of one run.

    And of its evaluations ``evaluations.jsonl`` and ``evaluations/``; of trajectories that could not be scored ``failed_trajectories.jsonl``.
    What a run that is going on cannot write is a StorageFailed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        self.metrics = root / "metrics.jsonl"
        self.trajectories = root / "trajectories"
        self.tokens = root / "tokens"
        self.tokenizer = root / "tokenizer"
        self.timeline = root / "timeline.jsonl"
        self.tensorboard = root / "tensorboard"
        self.changes = root / "changes.jsonl"
        self.audit = root / "audit.jsonl"
        self.gateway = root / "gateway.json"
        self.report = root / "report.html"
        self.evaluation_summaries = root / "evaluations.jsonl"
        self.evaluations = root / "evaluations"
        self.checkpoints = root / "checkpoints"
        self.policy = root / "policy"
        self.adapter = root / "adapter"
        self.alerts = root / "alerts.jsonl"
        self.failed_trajectories = root / "failed_trajectories.jsonl"
        self.services = root / "services.json"
        self.identity = root / "run.json"
        self.asked = root / "asked"
        self.rolling_back = root / "rolling_back"
        self.logs = root / "logs"
        self.redis = root / "redis"
        self._aside = root / ".earlier"

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Makes the directory and keeps it for this run alone. Raises ConfigError when another run has it."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            lock = (self.root / ".lock").open("w")
        except OSError as error:
            raise ConfigError(
                f"run directory {self.root}: cannot be written ({error.strerror}); set run.directory to a folder of yours"
            ) from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"run directory {self.root}: a run is going on there; wait for its end, or choose another run.name"
                ) from None
            except OSError as error:
                raise ConfigError(
                    f"run directory {self.root}: cannot be kept for this run ({error.strerror}); set run.directory to a folder "
                    "on a file system that knows flock"
                ) from None
            yield

    def set_aside(self) -> None:
        """Moves an earlier run out of the way, to come back with ``restore`` or go with ``forget``.

        Raises ConfigError when what lies there under a run's names is not a run's.
        """
        found = [path for path in self._own() if path.exists()]
        if found and not self.is_a_run():
            raise ConfigError(
                f"--overwrite: {found[0]} is not of a run of Quartet's; choose another run.name, or move it away"
            )
        shutil.rmtree(self._aside, ignore_errors=True)
        self._aside.mkdir()
        for path in found:
            path.rename(self._aside / path.name)

    def restore(self) -> None:
        """Puts back what was set aside and not forgotten, in place of what has come since."""
        if not self._aside.exists():
            return
        for path in self._own():
            _remove(path)
        for path in self._aside.iterdir():
            path.rename(self.root / path.name)
        self._aside.rmdir()

    def forget(self) -> None:
        """Lets go of what was set aside."""
        shutil.rmtree(self._aside, ignore_errors=True)

    def clear(self) -> None:
        """Removes what a run has left here; nothing of anyone else's. For one that took no step: a new one must not meet it."""
        if self.is_a_run():
            for path in self._own():
                _remove(path)

    def _own(self) -> list[Path]:
        return [
            self.config,
            self.metrics,
            self.trajectories,
            self.tokens,
            self.tokenizer,
            self.timeline,
            self.tensorboard,
            self.changes,
            self.audit,
            self.gateway,
            self.report,
            self.evaluation_summaries,
            self.evaluations,
            self.checkpoints,
            self.policy,
            self.adapter,
            self.alerts,
            self.failed_trajectories,
            self.services,
            self.identity,
            self.asked,
            self.rolling_back,
            self.logs,
            self.redis,
            self.redis.with_name(f"{self.redis.name}.damaged"),
        ]

    def is_a_run(self) -> bool:
        """Whether a run of Quartet's lies here, by the first line of its config."""
        try:
            return self.config.read_text(encoding="utf-8").startswith(MARK)
        except (OSError, UnicodeDecodeError):
            return False

    def check_unused(self) -> None:
        """Raises ConfigError when a run has left its files here."""
        if self.metrics.exists() or self.policy.exists():
            raise ConfigError(
                f"run directory {self.root}: holds an earlier run; give --resume to go on with it, --overwrite to drop it, "
                "or choose another run.name"
            )

    def write_config(self, text: str) -> None:
        """Writes ``config.yaml``. Raises ConfigError when the directory cannot be written."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            write_durably(self.config, MARK + text)
        except OSError as error:
            raise ConfigError(
                f"run directory {self.root}: cannot be written ({error.strerror}); set run.directory to a folder of yours"
            ) from None

    def append_metrics(self, metrics: dict[str, float]) -> None:
        """Adds one step's line to ``metrics.jsonl``: with it on the disk, the step is committed."""
        with storing(self.metrics):
            append_durably(self.metrics, _lines([metrics]))

    def committed(self) -> list[dict[str, float]]:
        """The metrics of every committed step, from 1 on. Raises ConfigError when one is missing or damaged.

        A last line that a crash cut off is no commit, and is taken out. So is one that comes after a later step: of a former
        leader, which was stopped between its last look at its lease and the writing.
        """
        if not self.metrics.exists():
            return []
        lines = read_metrics(self.metrics)
        steps: list[dict[str, float]] = []
        for number, metrics in enumerate(lines, 1):
            step = metrics.get("step")
            if step == len(steps) + 1:
                steps.append(metrics)
            elif not isinstance(step, int) or not 1 <= step <= len(steps):
                raise ConfigError(
                    f"metrics {self.metrics}:{number}: is not step {len(steps) + 1}; mend the file, or start the run anew"
                )
        if len(steps) < len(lines) or not self.metrics.read_bytes().endswith(b"\n"):
            self._rewrite(self.metrics, steps)
        return steps

    def scores(self, step: int, count: int) -> list[float]:
        """The raw score of each of the ``count`` trajectories of a committed step, in their order.

        Raises ConfigError when they cannot be read, or are not so many.
        """
        path = self.trajectories / f"step-{step:06d}.jsonl"
        remedy = "put the file back, go back to a checkpoint with quartet rollback, or start the run anew"
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
            scores = [float(json.loads(line)["score"]) for line in lines if line]
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(f"trajectories {path}: cannot be read; {remedy}") from None
        if len(scores) != count:
            raise ConfigError(f"trajectories {path}: has {len(scores)} lines, expected the step's {count}; {remedy}")
        return scores

    def forget_after(self, step: int) -> None:
        """Drops what came after ``step``: it will come again."""
        for path in (self.metrics, self.evaluation_summaries, self.alerts, self.failed_trajectories):
            if path.exists():
                self._rewrite(path, (line for line in read_metrics(path) if line["step"] <= step))
        for folder in (self.trajectories, self.evaluations):
            for path in folder.glob("step-*.jsonl"):
                if int(path.stem.removeprefix("step-")) > step:
                    with storing(path):
                        path.unlink()
        for kept, path in kept_tokens(self.tokens):
            if kept > step:
                with storing(path):
                    path.unlink(missing_ok=True)
        if self.timeline.is_file():
            with storing(self.timeline):
                keep_timeline(self.timeline, step)

    def evaluated(self) -> int | None:
        """The step of the last evaluation."""
        lines = read_metrics(self.evaluation_summaries) if self.evaluation_summaries.exists() else []
        return int(lines[-1]["step"]) if lines else None

    def append_alert(self, alert: Alert) -> None:
        """Adds what a guard found to ``alerts.jsonl``."""
        with storing(self.alerts):
            append_durably(self.alerts, _lines([asdict(alert)]))

    def write_failed_trajectories(self, step: int, rows: Iterable[dict[str, Any]]) -> None:
        """Adds the trajectories of ``step`` that could not be scored to ``failed_trajectories.jsonl``, an object with a ``step`` for each.

        Lines of this and later steps, left by an attempt that broke off before its commit, make way.
        """
        earlier = read_metrics(self.failed_trajectories) if self.failed_trajectories.exists() else []
        lines = [*(item for item in earlier if item["step"] < step), *rows]
        if lines != earlier:
            self._rewrite(self.failed_trajectories, lines)

    def append_failed_trajectories(self, row: dict[str, Any]) -> None:
        """Adds an object with a ``step`` to ``failed_trajectories.jsonl``, beside that step's own, once."""
        if not self.failed_trajectories.exists() or row not in read_metrics(self.failed_trajectories):
            with storing(self.failed_trajectories):
                append_durably(self.failed_trajectories, _lines([row]))

    def append_changes(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Adds changes of settings to ``changes.jsonl``, an object with a ``step`` for each.

        All of them or, where the disk refuses, none; a crash before this returns may leave the first of them.
        """
        with storing(self.changes):
            append_durably(self.changes, _lines(rows))

    def read_changes(self) -> list[dict[str, Any]]:
        """The lines of ``changes.jsonl``. One that a crash cut off was never confirmed, and is taken out."""
        if not self.changes.exists():
            return []
        found: list[dict[str, Any]] = read_metrics(self.changes)
        if not self.changes.read_bytes().endswith(b"\n"):
            self._rewrite(self.changes, found)
        return found

    def forget_changes_after(self, step: int) -> None:
        """Drops the changes that are for steps after ``step``: for a run that goes another way from there."""
        if self.changes.exists():
            self._rewrite(self.changes, (line for line in read_metrics(self.changes) if line["step"] <= step))

    def alerts_of(self, step: int) -> list[dict[str, Any]]:
        """The lines of ``alerts.jsonl`` of one step. Raises ConfigError when they cannot be read."""
        lines: list[dict[str, Any]] = read_metrics(self.alerts) if self.alerts.exists() else []
        return [line for line in lines if line["step"] == step]

    def write_services(self, addresses: dict[Role, str]) -> None:
        """Writes ``services.json``: where each service of a run that is going on listens, by role."""
        with storing(self.services):
            write_durably(self.services, json.dumps(addresses, indent=2) + "\n")

    def orchestrator_address(self) -> str:
        """Where the orchestrator of a run that is going on listens. Raises ConfigError when none is."""
        try:
            return str(json.loads(self.services.read_text(encoding="utf-8"))[Role.ORCHESTRATOR])
        except (OSError, ValueError, KeyError):
            raise ConfigError(
                f"run {self.root}: no run is going on there; give the directory of one, such as runs/NAME"
            ) from None

    def write_trajectories(self, step: int, trajectories: Iterable[dict[str, Any]]) -> None:
        """Writes ``trajectories/step-000001.jsonl``, one object for each response; it is on the disk before its step counts."""
        path = self.trajectories / f"step-{step:06d}.jsonl"
        with storing(path):
            self.trajectories.mkdir(exist_ok=True)
            write_durably(path, _lines(trajectories, ensure_ascii=False))

    def write_tokens(self, step: int, arrays: Mapping[str, NDArray[Any]], keep: int = 0) -> None:
        """Writes ``tokens/step-000001.safetensors``, and with ``keep`` drops all but the newest so many. Raises OSError."""
        write_tokens(self.tokens / f"step-{step:06d}.safetensors", arrays)
        if keep:
            for _, path in kept_tokens(self.tokens)[:-keep]:
                path.unlink(missing_ok=True)

    def read_tokens(self, step: int, index: int) -> TrajectoryTokens | None:
        """The tokens of the trajectory at ``index`` of a step; None where they were not kept. Raises ConfigError when damaged."""
        return read_tokens(self.tokens / f"step-{step:06d}.safetensors", index)

    def append_timeline(self, line: Mapping[str, Any]) -> None:
        """Adds a step's line to ``timeline.jsonl``; its first key is ``step``. Raises OSError."""
        append_timeline(self.timeline, line)

    def write_evaluation(self, step: int, summary: Mapping[str, float], rows: Iterable[dict[str, Any]]) -> None:
        """Writes ``evaluations/step-000000.jsonl``, one object for each prompt, and the step's line of ``evaluations.jsonl``.

        Lines of this and later steps, left by a run that came further before it broke off, make way.
        """
        path = self._evaluation(step)
        with storing(path):
            self.evaluations.mkdir(exist_ok=True)
            write_durably(path, _lines(rows, ensure_ascii=False))
        earlier = read_metrics(self.evaluation_summaries) if self.evaluation_summaries.exists() else []
        self._rewrite(
            self.evaluation_summaries, [*(item for item in earlier if item["step"] < step), {"step": step, **summary}]
        )

    def read_evaluation(self, step: int) -> list[dict[str, Any]]:
        """The rows that ``write_evaluation`` wrote. Raises ConfigError when they are not there, or damaged."""
        path = self._evaluation(step)
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not JSON Lines"
            raise ConfigError(
                f"evaluation {path}: cannot be read ({reason}); it holds what the initial policy answered, so start the run anew"
            ) from None
        return rows

    @staticmethod
    def _rewrite(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
        text = _lines(lines)
        with storing(path):
            write_durably(path, text)

    def _evaluation(self, step: int) -> Path:
        return self.evaluations / f"step-{step:06d}.jsonl"


def find_run(path: Path) -> RunFiles | None:
    """The run in whose directory ``path`` lies, if there is one: of several, one in the other, the innermost."""
    for folder in path.absolute().parents:
        files = RunFiles(folder)
        if files.is_a_run():
            return files
    return None


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _lines(items: Iterable[Mapping[str, Any]], ensure_ascii: bool = True) -> str:
    return "".join(json.dumps(item, ensure_ascii=ensure_ascii) + "\n" for item in items)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Every line of a ``metrics.jsonl``, or of another file with a line or several for a step.

    A last line that a crash cut off is none. Raises ConfigError naming the line that is not a step's JSON.
    """
    *whole, _cut_off = path.read_bytes().split(b"\n")
    steps = []
    for number, line in enumerate(whole, 1):
        try:
            steps.append(json.loads(line))
            problem = "" if isinstance(steps[-1], dict) and "step" in steps[-1] else "of no step"
        except ValueError:
            problem = "not JSON"
        if problem:
            raise ConfigError(f"{path.stem} {path}:{number}: {problem}; mend the file, or start the run anew")
    return steps
