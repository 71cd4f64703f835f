"""The files of a run directory: their paths, and the records that a run writes into them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from numpy.typing import NDArray

from quartet import errors
from quartet.config.loading import FIRST_CONFIG_LINE, STAGE_NAMES, read_tree
from quartet.contract.control import Alert, RunState
from quartet.contract.status import Role
from quartet.errors import ConfigError, ServiceFailed
from quartet.run_directory.reference_versions import remove_versions, versions
from quartet.run_directory.step_lines import (
    append_step_lines,
    append_timeline,
    read_step_lines,
    rewrite_step_lines,
    to_json_lines,
    truncate_step_lines,
    truncate_timeline,
    without_incomplete_command,
)
from quartet.run_directory.token_files import TrajectoryTokens, read_tokens, token_files, write_tokens
from quartet.system.durable_files import storage_errors, write_durably

NO_SETS: Mapping[str, Iterable[dict[str, Any]]] = MappingProxyType({})

PROFILE_SUMMARY = "summary.json"
"""Name of the file that completes a profile, in its folder below ``profiles/``."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended after ``step``: FINISHED, STOPPED or FAILED.

    Of a failure: the class of the error, its ``message``, and the ``service`` to blame, as ``QuartetError.service``.
    """

    state: RunState
    step: int
    error: str = ""
    message: str = ""
    service: str = ""

    @classmethod
    def of(cls, error: BaseException, step: int) -> RunOutcome:
        """Return the failure of a run by ``error``."""
        # A service's error may have become the context of another one.
        cause: BaseException | None = error
        service = ""
        while not service and cause is not None:
            service = getattr(cause, "service", "")
            cause = cause.__cause__ or cause.__context__
        return cls(RunState.FAILED, step, type(error).__name__, str(error) or type(error).__name__, service)

    @property
    def exit_status(self) -> int:
        """Exit status of the command: 2 for an error that the user can fix, 1 for any other, else 0."""
        if self.state is not RunState.FAILED:
            return 0
        return 2 if issubclass(getattr(errors, self.error, Exception), ConfigError) else 1

    def raise_failure(self) -> None:
        """Raise the error of a failure, as ConfigError or ServiceFailed."""
        if self.state is RunState.FAILED:
            failure = (ConfigError if self.exit_status == 2 else ServiceFailed)(self.message)
            failure.service = self.service
            raise failure


class RunFiles:
    """The files of one run, below ``root``.

    A write that the disk refuses raises StorageFailed, unless the method says otherwise.
    See locking_and_removal.py for the directory as a
    whole, checkpoints.py for ``checkpoints/``.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        self.metrics = root / "metrics.jsonl"
        self.trajectories = root / "trajectories"
        self.tokens = root / "tokens"
        self.tokenizer = root / "tokenizer"
        self.timeline = root / "timeline.jsonl"
        self.profiles = root / "profiles"
        self.tensorboard = root / "tensorboard"
        self.changes = root / "changes.jsonl"
        self.audit = root / "audit.jsonl"
        self.gateway = root / "gateway.json"
        self.report = root / "report.html"
        self.evaluation_summaries = root / "evaluations.jsonl"
        self.evaluations = root / "evaluations"
        self.checkpoints = root / "checkpoints"
        self.policy = root / "policy"
        self.policy_record = root / "policy.json"
        """States the step of the saved policy. Missing while a policy is being saved."""
        self.adapter = root / "adapter"
        self.reward = root / "reward"
        """The model of `quartet reward-model`."""
        self.stage = root / "stage"
        """Checkpoints of `quartet sft` and `quartet reward-model`."""
        self.policy_ema = root / "policy-ema"
        self.references = root / "reference"
        self.alerts = root / "alerts.jsonl"
        self.failed_trajectories = root / "failed_trajectories.jsonl"
        self.left_out = root / "left_out.jsonl"
        self.services = root / "services.json"
        self.identity = root / "run.json"
        self.outcome = root / "outcome.json"
        self.pending_commands = root / "pending_commands"
        self.rolling_back = root / "rolling_back"
        self.logs = root / "logs"
        self.redis = root / "redis"
        self.earlier = root / ".earlier"
        """An earlier run of this name while ``--overwrite`` replaces it."""

    def all_paths(self) -> list[Path]:
        """Return every path below the root that a run may have written."""
        paths = [path for path in vars(self).values() if path not in (self.root, self.earlier)]
        return [*paths, self.redis.with_name(f"{self.redis.name}.damaged")]

    def is_run(self) -> bool:
        """Return whether a run of Quartet is here, by the first line of its config."""
        try:
            return self.config.read_text(encoding="utf-8").startswith(FIRST_CONFIG_LINE)
        except (OSError, UnicodeDecodeError):
            return False

    def stage_name(self) -> str | None:
        """Return the command of the stage that is here, such as sft; None for anything else."""
        try:
            name = read_tree(self.config).get("stage") if self.is_run() else None
        except ConfigError:
            return None
        return name if name in STAGE_NAMES else None

    def write_config(self, text: str) -> None:
        """Write ``config.yaml``. Raises ConfigError if the directory cannot be written."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            write_durably(self.config, FIRST_CONFIG_LINE + text)
        except OSError as error:
            raise ConfigError(
                f"run directory {self.root}: cannot be written ({error.strerror}); set run.directory to a folder of yours"
            ) from None

    def write_outcome(self, outcome: RunOutcome) -> None:
        """Write ``outcome.json``: the run has ended, and no process continues it."""
        with storage_errors(self.outcome):
            write_durably(self.outcome, json.dumps(asdict(outcome), indent=2) + "\n")

    def read_outcome(self) -> RunOutcome | None:
        """Return how the run ended; None if it is active or was interrupted."""
        try:
            given = json.loads(self.outcome.read_text(encoding="utf-8"))
            return RunOutcome(**{**given, "state": RunState(given["state"])})
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write_policy_step(self, step: int) -> None:
        """Record in ``policy.json`` that the saved policy is the one after ``step``."""
        with storage_errors(self.policy_record):
            write_durably(self.policy_record, json.dumps({"step": step}) + "\n")

    def remove_policy_step(self) -> None:
        """Remove ``policy.json``, before the saved policy changes."""
        with storage_errors(self.policy_record):
            self.policy_record.unlink(missing_ok=True)

    def policy_step(self) -> int | None:
        """Return the step of the saved policy; None if no policy has been saved completely."""
        try:
            return (
                int(json.loads(self.policy_record.read_text(encoding="utf-8"))["step"])
                if self.policy.is_dir()
                else None
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def is_finished(self, step: int) -> bool:
        """Return whether what the run leaves after ``step``, its last one, is complete: its policy, or the model of a stage."""
        if self.policy.is_dir():
            return self.policy_step() == step
        outcome = self.read_outcome()
        return self.reward.is_dir() and outcome is not None and outcome.state is RunState.FINISHED

    def last_step(self) -> int:
        """Return the last committed step, 0 for none. Raises ConfigError if the metrics are damaged."""
        steps = read_step_lines(self.metrics)
        return max((int(line["step"]) for line in steps), default=0)

    def append_metrics(self, metrics: dict[str, float]) -> None:
        """Append one step's line to ``metrics.jsonl``. The step is committed once the line is on the disk."""
        append_step_lines(self.metrics, [metrics])

    def read_committed(self) -> list[dict[str, float]]:
        """Return the metrics of every committed step, from step 1. Raises ConfigError if one is missing or damaged.

        Removes a last line that a crash cut off. Also removes a line that follows a later step: a former leader was suspended
        between the check of its lease and the write.
        """
        if not self.metrics.exists():
            return []
        lines = read_step_lines(self.metrics)
        steps: list[dict[str, float]] = []
        for number, metrics in enumerate(lines, 1):
            step = metrics.get("step")
            if step == len(steps) + 1:
                steps.append(metrics)
            elif not isinstance(step, int) or not 1 <= step <= len(steps):
                raise ConfigError(
                    f"metrics {self.metrics}:{number}: is not step {len(steps) + 1}; repair the file, or start a new run"
                )
        if len(steps) < len(lines) or not self.metrics.read_bytes().endswith(b"\n"):
            rewrite_step_lines(self.metrics, steps)
        return steps

    def read_scores(self, step: int, count: int) -> list[float | None]:
        """Return the raw score of each of the ``count`` trajectories of a committed step, in order; None in a run without scores.

        Raises ConfigError if they cannot be read, or if there is another number of them.
        """
        path = self._trajectories_of(step)
        remedy = "put the file back, roll back to a checkpoint with quartet rollback, or start a new run"
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
            given = [json.loads(line)["score"] for line in lines if line]
            scores = [None if score is None else float(score) for score in given]
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(f"trajectories {path}: cannot be read; {remedy}") from None
        if len(scores) != count:
            raise ConfigError(f"trajectories {path}: has {len(scores)} lines, expected the step's {count}; {remedy}")
        return scores

    def read_trajectories(self, step: int) -> list[dict[str, Any]]:
        """Return one object for each response of a step. Raises ConfigError if they are missing or damaged."""
        path = self._trajectories_of(step)
        try:
            return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        except FileNotFoundError:
            steps = self.trajectory_steps()
            stored = f"{steps[0]} to {steps[-1]}" if steps else "none yet"
            raise ConfigError(f"run {self.root}: no trajectories of step {step}; stored steps: {stored}") from None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not JSON Lines"
            raise ConfigError(f"trajectories {path}: cannot be read ({reason}); put the file back") from None

    def trajectory_steps(self) -> list[int]:
        """Return the steps whose trajectories are stored, in order."""
        return sorted(int(path.stem.removeprefix("step-")) for path in self.trajectories.glob("step-*.jsonl"))

    def write_trajectories(self, step: int, trajectories: Iterable[dict[str, Any]]) -> None:
        """Write ``trajectories/step-000001.jsonl``, one object for each response, and flush it to the disk."""
        self._write_lines(self._trajectories_of(step), trajectories)

    def truncate_after(self, step: int) -> None:
        """Remove the records of steps after ``step``, before these steps are recomputed."""
        for path in (self.metrics, self.evaluation_summaries, self.alerts, self.failed_trajectories, self.left_out):
            truncate_step_lines(path, step)
        for folder in (self.trajectories, self.evaluations, *(self.evaluations / "sets").glob("*")):
            for path in folder.glob("step-*.jsonl"):
                if int(path.stem.removeprefix("step-")) > step:
                    with storage_errors(path):
                        path.unlink()
        for token_step, path in token_files(self.tokens):
            if token_step > step:
                with storage_errors(path):
                    path.unlink(missing_ok=True)
        with storage_errors(self.references):
            remove_versions(self.references, [each for each in versions(self.references) if each > step])
        if self.timeline.is_file():
            with storage_errors(self.timeline):
                truncate_timeline(self.timeline, step)

    def append_alert(self, alert: Alert) -> None:
        """Append an alert of a guard to ``alerts.jsonl``."""
        append_step_lines(self.alerts, [asdict(alert)])

    def read_alerts(self, step: int) -> list[dict[str, Any]]:
        """Return the alerts of one step. Raises ConfigError if they cannot be read."""
        return [line for line in read_step_lines(self.alerts) if line["step"] == step]

    def write_failed_trajectories(self, step: int, rows: Iterable[dict[str, Any]]) -> None:
        """Write the trajectories of ``step`` that could not be scored to ``failed_trajectories.jsonl``.

        Each row is an object with a ``step``. Replaces lines of this step and later ones, which an attempt left that was
        interrupted before its commit.
        """
        _replace_from(self.failed_trajectories, step, rows)

    def write_left_out(self, step: int, rows: Iterable[dict[str, Any]]) -> None:
        """Write the trajectories that ``step`` did not need to ``left_out.jsonl``. See ``write_failed_trajectories``."""
        _replace_from(self.left_out, step, rows)

    def append_failed_trajectories(self, row: dict[str, Any]) -> None:
        """Append an object with a ``step`` to ``failed_trajectories.jsonl``, unless it is there already."""
        if row not in read_step_lines(self.failed_trajectories):
            append_step_lines(self.failed_trajectories, [row])

    def append_changes(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append the changes of settings of one command to ``changes.jsonl``, each an object with a ``step`` and its time ``at``.

        Appends all of them or, if the disk refuses, none. What a crash leaves of several, ``read_changes`` removes.
        """
        lines = list(rows)
        several = {"together": len(lines)} if len(lines) > 1 else {}
        append_step_lines(self.changes, [{**line, **several} for line in lines])

    def read_changes(self) -> list[dict[str, Any]]:
        """Return the changes in ``changes.jsonl``. Removes a last command that a crash cut off: it was never confirmed."""
        lines = read_step_lines(self.changes)
        changes = without_incomplete_command(lines)
        if len(changes) < len(lines) or (self.changes.exists() and not self.changes.read_bytes().endswith(b"\n")):
            rewrite_step_lines(self.changes, changes)
        return [{name: value for name, value in line.items() if name != "together"} for line in changes]

    def truncate_changes_after(self, step: int) -> None:
        """Remove the changes for steps after ``step``. For a rollback, after which these steps may use other settings."""
        truncate_step_lines(self.changes, step)

    def write_services(self, addresses: Mapping[Role, tuple[str, ...]]) -> None:
        """Write ``services.json``: the address of each service of an active run by role, or a list of those of its replicas."""
        content = {role: each[0] if len(each) == 1 else each for role, each in addresses.items()}
        with storage_errors(self.services):
            write_durably(self.services, json.dumps(content, indent=2) + "\n")

    def orchestrator_address(self) -> str:
        """Return the address of the orchestrator of an active run. Raises ConfigError if the run is not active."""
        try:
            return str(json.loads(self.services.read_text(encoding="utf-8"))[Role.ORCHESTRATOR])
        except (OSError, ValueError, KeyError):
            raise ConfigError(f"run {self.root}: no active run; give the directory of one, such as runs/NAME") from None

    def write_tokens(self, step: int, arrays: Mapping[str, NDArray[Any]], keep: int = 0) -> None:
        """Write ``tokens/step-000001.safetensors``. If ``keep`` is not 0, delete all but the newest ``keep`` files.

        Raises OSError.
        """
        write_tokens(self._tokens_of(step), arrays)
        if keep:
            for _, path in token_files(self.tokens)[:-keep]:
                path.unlink(missing_ok=True)

    def read_tokens(self, step: int, index: int) -> TrajectoryTokens | None:
        """Return the tokens of the trajectory at ``index`` of a step, or None if they were not kept.

        Raises ConfigError if the file is damaged.
        """
        return read_tokens(self._tokens_of(step), index)

    def append_timeline(self, line: Mapping[str, Any]) -> None:
        """Append a step's line to ``timeline.jsonl``. Its first key is ``step``. Raises OSError."""
        append_timeline(self.timeline, line)

    def write_evaluation(
        self,
        step: int,
        summary: Mapping[str, float],
        rows: Iterable[dict[str, Any]],
        sets: Mapping[str, Iterable[dict[str, Any]]] = NO_SETS,
    ) -> None:
        """Write ``evaluations/step-000000.jsonl``, one object for each prompt, and the step's line of ``evaluations.jsonl``.

        ``sets``: the rows of each set, for ``evaluations/sets/NAME/step-000000.jsonl``. Replaces lines of this step and later
        ones, which an interrupted attempt may have left.
        """
        for name, rows_of_set in sets.items():
            self._write_lines(self.evaluation_of(step, name), rows_of_set)
        self._write_lines(self.evaluation_of(step), rows)
        earlier = [line for line in read_step_lines(self.evaluation_summaries) if line["step"] < step]
        rewrite_step_lines(self.evaluation_summaries, [*earlier, {"step": step, **summary}])

    def read_evaluation(self, step: int) -> list[dict[str, Any]]:
        """Return the rows that ``write_evaluation`` wrote. Raises ConfigError if they are missing or damaged."""
        path = self.evaluation_of(step)
        try:
            return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not JSON Lines"
            raise ConfigError(
                f"evaluation {path}: cannot be read ({reason}); later evaluations are compared with it, so start a new run"
            ) from None

    def last_evaluated_step(self) -> int | None:
        """Return the step of the last evaluation, or None without evaluations."""
        lines = read_step_lines(self.evaluation_summaries)
        return int(lines[-1]["step"]) if lines else None

    def _trajectories_of(self, step: int) -> Path:
        return self.trajectories / f"step-{step:06d}.jsonl"

    def _tokens_of(self, step: int) -> Path:
        return self.tokens / f"step-{step:06d}.safetensors"

    def evaluation_sets(self, step: int) -> list[str]:
        """Return the names of the evaluation sets of which the evaluation after ``step`` has responses, in order."""
        return sorted(path.parent.name for path in (self.evaluations / "sets").glob(f"*/step-{step:06d}.jsonl"))

    def evaluation_of(self, step: int, set_name: str | None = None) -> Path:
        """Return the file of an evaluation: of the validation prompts, or of the set with this name."""
        folder = self.evaluations if set_name is None else self.evaluations / "sets" / set_name
        return folder / f"step-{step:06d}.jsonl"

    @staticmethod
    def _write_lines(path: Path, items: Iterable[Mapping[str, Any]]) -> None:
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, to_json_lines(items, ensure_ascii=False))


def _replace_from(path: Path, step: int, rows: Iterable[dict[str, Any]]) -> None:
    """Replace the lines of a file from ``step`` on."""
    earlier = read_step_lines(path)
    lines = [*(line for line in earlier if line["step"] < step), *rows]
    if lines != earlier:
        rewrite_step_lines(path, lines)
