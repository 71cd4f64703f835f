"""Train and score one experiment, or continue it after an interruption. A finished experiment is a file of results."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.evidence.experiments import VALIDATION, Experiment
from benchmarks.evidence.scoring import Scores
from quartet.errors import ConfigError
from quartet.run_directory.step_lines import read_step_lines
from quartet.system.child_processes import tied_to_parent
from quartet.system.durable_files import append_durably, write_durably

CURVES = ("score_mean", "reward_mean", "kl_mean", "kl_coefficient", "eos_rate")


@dataclass(frozen=True, slots=True)
class Result:
    """Curves of a run by metric (a number per step), and the scores of its final policy."""

    curves: dict[str, list[float]]
    final: Scores


class ResultsFile:
    """File of the finished runs, a JSON object per line. A last line that a kill cut off is removed; its run is repeated."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        *lines, cut_off = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
        if cut_off:
            write_durably(path, "".join(f"{line}\n" for line in lines))
        self._results = {
            (line["name"], line["digest"]): Result(line["curves"], Scores(**line["final"]))
            for line in map(json.loads, lines)
        }

    def get(self, experiment: Experiment) -> Result | None:
        """Return the result of a finished experiment with the same settings, or None."""
        return self._results.get((experiment.name, experiment.digest))

    def add(self, experiment: Experiment, result: Result) -> None:
        """Write the result. The values of curves have five significant digits."""
        curves = {name: [float(f"{value:.5g}") for value in curve] for name, curve in result.curves.items()}
        line = {"name": experiment.name, "digest": experiment.digest, "curves": curves, "final": asdict(result.final)}
        with self._lock:
            append_durably(self._path, json.dumps(line) + "\n")


def prepare_models(positive: Path, negative: Path, folder: Path, seed: int) -> None:
    """Create policy, reward model and prompts of a model seed, and split off the validation prompts."""
    directory = folder / "models" / str(seed)
    if not (directory / "prompts.jsonl").exists():
        program = ["examples/reviews/prepare.py", str(positive), str(negative), str(directory), "--seed", str(seed)]
        run_program([sys.executable, *program], folder / "logs" / f"models-{seed}.log")
    lines = (directory / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    write_durably(directory / "validation.jsonl", "".join(lines[-VALIDATION:]))
    write_durably(directory / "training.jsonl", "".join(lines[:-VALIDATION]))


def take(experiment: Experiment, trl: Path, results: ResultsFile) -> Result:
    """Return the result of the experiment, after the part of its work that is not done. Raises ConfigError if a run fails."""
    if (done := results.get(experiment)) is not None:
        return done
    policy, curves = _train(experiment, trl)
    if any(len(curve) != experiment.steps for curve in curves.values()):
        raise ConfigError(f"{experiment.name}: ended before step {experiment.steps}; see {_log(experiment, 'train')}")
    scores = experiment.folder / "scores" / f"{experiment.name}.json"
    scores.parent.mkdir(parents=True, exist_ok=True)
    scoring = [sys.executable, "-m", "benchmarks.evidence.scoring", str(experiment.config), str(policy), str(scores)]
    run_program([*scoring, *experiment.overrides], _log(experiment, "scoring"))
    result = Result(curves, Scores(**json.loads(scores.read_text())))
    results.add(experiment, result)
    return result


def _train(experiment: Experiment, trl: Path) -> tuple[Path, dict[str, list[float]]]:
    """Return the directory of the final policy, and the curves of its training. Raises ConfigError if the run fails."""
    match experiment.side:
        case "initial":
            return experiment.models / "policy", {}
        case "quartet":
            return _quartet(experiment)
        case "trl" | "trl_eos":
            return _trl(experiment, trl)


def run_program(command: Sequence[str], log: Path) -> None:
    """Run a program with one thread per process. Raises ConfigError if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        result = subprocess.run(
            tied_to_parent(list(command)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    if result.returncode:
        raise ConfigError(f"{' '.join(command[:4])} ended with status {result.returncode}; see {log}")


def _log(experiment: Experiment, part: str) -> Path:
    return experiment.folder / "logs" / f"{experiment.name}-{part}.log"


def _quartet(experiment: Experiment) -> tuple[Path, dict[str, list[float]]]:
    marker = experiment.run_directory.with_suffix(".digest")
    same = marker.exists() and marker.read_text() == experiment.digest
    if not same:
        shutil.rmtree(experiment.run_directory, ignore_errors=True)
        marker.parent.mkdir(parents=True, exist_ok=True)
        write_durably(marker, experiment.digest)
    command = [str(Path(sys.executable).with_name("quartet")), "train", str(experiment.config)]
    command += [part for setting in experiment.overrides for part in ("--set", setting)]
    # A run that was cut off continues from its last commit.
    started = (experiment.run_directory / "metrics.jsonl").exists()
    run_program([*command, "--resume" if started else "--overwrite"], _log(experiment, "train"))
    steps = read_step_lines(experiment.run_directory / "metrics.jsonl")
    curves = {name: [step[name] for step in steps] for name in CURVES if name in steps[0]}
    return experiment.run_directory / "policy", curves


def _trl(experiment: Experiment, python: Path) -> tuple[Path, dict[str, list[float]]]:
    shutil.rmtree(experiment.run_directory, ignore_errors=True)
    experiment.run_directory.mkdir(parents=True)
    out, policy = experiment.run_directory / "trl.jsonl", experiment.run_directory / "policy"
    command = [str(python), "-m", "benchmarks.trl_training", str(experiment.config), str(experiment.steps), str(out)]
    options = ["--policy", str(policy), *(["--score-at-eos"] if experiment.side == "trl_eos" else [])]
    run_program([*command, *options, *experiment.overrides], _log(experiment, "train"))
    steps = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    return policy, {"score_mean": [step["reward_mean"] for step in steps]}
