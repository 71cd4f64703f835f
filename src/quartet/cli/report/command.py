"""`quartet report RUN`: write a self-contained HTML report of a finished or active run."""

from __future__ import annotations

import datetime
import json
import math
import platform
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from quartet import __version__
from quartet.cli.console import make_console
from quartet.cli.report.curves import evaluation_charts, further_charts, main_charts
from quartet.cli.report.page import (
    MARK,
    chart_placeholders,
    facts,
    number,
    page,
    paragraph,
    preformatted,
    table,
    texts,
)
from quartet.errors import ConfigError
from quartet.run_directory.checkpoints import (
    DamagedCheckpoint,
    checkpoint_folders,
    checkpoint_step,
    read_checkpoint,
    tagged_checkpoints,
)
from quartet.run_directory.run_files import RunFiles
from quartet.run_directory.selection import run_files
from quartet.run_directory.step_lines import read_step_lines
from quartet.system.durable_files import write_durably
from quartet.telemetry.step_metrics import METRICS

console = make_console()
WINDOW_STEPS = 10
"""Number of first and last steps that the summary compares."""
MAX_SHOWN_ALERTS = 200
LIBRARIES = ("torch", "transformers", "tokenizers", "peft", "safetensors", "numpy", "grpcio", "redis")


def report(run: Path, output: Path | None) -> None:
    """Write the report, by default to ``report.html`` in the directory of the run. Raises ConfigError."""
    files = run_files(run)
    target = output if output is not None else files.report
    _check_replaceable(target)
    write_durably(target, _page_of(files))
    console.print(f"report: {target}", soft_wrap=True)


def _check_replaceable(target: Path) -> None:
    """Check that the target does not exist or is an earlier report. Raises ConfigError."""
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"--output {target}: no directory {target.parent}; create it, or choose another file")
    try:
        with target.open(encoding="utf-8") as file:
            begins = file.read(len(MARK))
    except FileNotFoundError:
        return
    except (IsADirectoryError, UnicodeDecodeError):
        begins = ""
    if begins != MARK:
        raise ConfigError(f"{target}: exists and is not a report; choose another file with --output, or move it")


def _page_of(files: RunFiles) -> str:
    settings = files.config.read_text(encoding="utf-8")
    config = yaml.safe_load(settings)
    steps = _lines_of(files.metrics)
    evaluations = _lines_of(files.evaluation_summaries)
    target = _setting(config, "algorithm.kl_controller.target")
    steered = _setting(config, "algorithm.kl_controller.kind") in ("adaptive", "simple")
    groups = [main_charts(steps, target if steered else None), evaluation_charts(evaluations), further_charts(steps)]
    places = [
        chart_placeholders(group, sum(map(len, groups[:index]))) if group else "" for index, group in enumerate(groups)
    ]
    nothing = paragraph("No step has been committed yet.")
    sections = [
        ("Summary", facts(_summary(files, config, steps))),
        ("Curves", places[0] or nothing),
        ("Evaluations", _evaluations(evaluations) + places[1]),
        ("Guard alerts", _alerts(files)),
        ("Setting changes", _changes(files)),
        ("Time per phase", _time(files, steps)),
        ("Trajectories", _trajectories(files)),
        ("Checkpoints", _checkpoints(files)),
        ("Further metrics", places[2] or nothing),
        ("Settings", preformatted(settings)),
        ("Environment", paragraph("The machine that wrote this report.") + facts(_environment())),
    ]
    written = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    subtitle = f"{_state(files, config, steps)}. Written by Quartet {__version__} on {written}."
    return page(f"Run {_setting(config, 'run.name')}", subtitle, sections, [item for group in groups for item in group])


def _lines_of(path: Path) -> list[dict[str, Any]]:
    return read_step_lines(path) if path.exists() else []


def _setting(config: Mapping[str, Any], key: str) -> Any:
    """Return a setting by its key, or None if it is not set."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _state(files: RunFiles, config: Mapping[str, Any], steps: Sequence[Mapping[str, float]]) -> str:
    total, last = _setting(config, "run.steps"), int(steps[-1]["step"]) if steps else 0
    if files.services.exists():
        return f"Active: step {last} of {total}"
    return (
        f"Finished after {last} steps"
        if last == total and files.policy_step() == last
        else f"At step {last} of {total}"
    )


def _summary(
    files: RunFiles, config: Mapping[str, Any], steps: Sequence[Mapping[str, float]]
) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = [
        (title, _setting(config, key))
        for title, key in (
            ("estimator", "algorithm.estimator"),
            ("policy", "actor.model"),
            ("seed", "run.seed"),
        )
    ]
    rows.insert(2, ("reward", _reward(config)))
    rows.insert(3, ("prompts", _prompts(config)))
    rows.append(("responses per step", _product(config, "rollout.prompts_per_step", "rollout.samples_per_prompt")))
    rows.append(("steps", len(steps)))
    if steps:
        seconds = math.fsum(step.get("seconds", 0.0) for step in steps)
        tokens = sum(step.get("response_tokens", 0) for step in steps)
        rows.append(("time in steps", str(datetime.timedelta(seconds=round(seconds)))))
        rows.append(("response tokens", int(tokens)))
        rows.append(("response tokens per second", tokens / seconds if seconds else None))
        rows += _ends(steps, [str(part["name"]) for part in _setting(config, "reward.parts") or ()])
    rows.append(("failed trajectories", len(_lines_of(files.failed_trajectories))))
    rows.append(("faults cured by retries", sum(int(step.get("cured_faults", 0)) for step in steps)))
    rows.append(("skipped prompts", sum(int(step.get("skipped_prompts", 0)) for step in steps)))
    return rows


def _prompts(config: Mapping[str, Any]) -> str | None:
    """Return the file of prompts, or the weighted sets."""
    sets = _setting(config, "data.sets") or ()
    return _setting(config, "data.prompts") or " + ".join(
        f"{each.get('weight', 1):g} × {each['name']} ({each.get('path') or each.get('dataset')})" for each in sets
    )


def _reward(config: Mapping[str, Any]) -> str | None:
    """Return the model or function that scores, or the weighted parts of an ensemble."""
    reward = _setting(config, "reward") or {}
    if parts := reward.get("parts"):
        return " + ".join(
            f"{part['weight']:g} × {part['name']} ({part['model'] or part['function'] or part['source']})"
            for part in parts
        )
    return reward.get("model") or reward.get("function")


def _ends(steps: Sequence[Mapping[str, float]], parts: Sequence[str]) -> list[tuple[str, object]]:
    """Return the key metrics of the first and last steps. ``parts`` are those of an ensemble of rewards."""
    window = min(WINDOW_STEPS, max(1, len(steps) // 2))
    rows: list[tuple[str, object]] = []
    names = [
        (METRICS["reward_mean"].title, "reward_mean"),
        *((f"reward part {part}, unweighted", f"reward_{part}_mean") for part in parts),
        *((METRICS[name].title, name) for name in ("kl_mean", "entropy")),
    ]
    for title, name in names:
        first, last = _mean(steps[:window], name), _mean(steps[-window:], name)
        if first is not None and last is not None:
            rows.append((f"{title}: first and last {window} steps", f"{number(first)} → {number(last)}"))
    return rows


def _product(config: Mapping[str, Any], *keys: str) -> int | None:
    factors = [_setting(config, key) for key in keys]
    return None if None in factors else math.prod(factors)


def _mean(steps: Sequence[Mapping[str, float]], name: str) -> float | None:
    values = [step[name] for step in steps if name in step]
    return statistics.fmean(values) if values else None


def _evaluations(summaries: Sequence[Mapping[str, float]]) -> str:
    if not summaries:
        return paragraph("No evaluations.")
    names = list(dict.fromkeys(name for summary in summaries for name in summary if name != "step"))
    rows = [[int(summary["step"]), *(summary.get(name) for name in names)] for summary in summaries]
    return table(["step", *(name.removeprefix("eval_").replace("_", " ") for name in names)], rows)


def _alerts(files: RunFiles) -> str:
    alerts = _lines_of(files.alerts)
    if not alerts:
        return paragraph("No alerts.")
    columns = ("step", "guard", "action", "evidence", "remedy")
    before = paragraph(f"The last {MAX_SHOWN_ALERTS} of {len(alerts)}.") if len(alerts) > MAX_SHOWN_ALERTS else ""
    return before + table(columns, ([alert.get(name) for name in columns] for alert in alerts[-MAX_SHOWN_ALERTS:]))


def _changes(files: RunFiles) -> str:
    changes = _lines_of(files.changes)
    if not changes:
        return paragraph("None.")
    columns = ("step", "setting", "before", "after", "user")
    return table(["from step", *columns[1:]], ([change.get(name) for name in columns] for change in changes))


def _time(files: RunFiles, steps: Sequence[Mapping[str, float]]) -> str:
    """Return the share of step time per phase, and per service if the run has a timeline."""
    phase_seconds: dict[tuple[str, str], float] = defaultdict(float)
    total_seconds = 0.0
    if files.timeline.exists():
        for line in _lines_of(files.timeline):
            total_seconds += line["seconds"]
            for span in line["spans"]:
                phase_seconds[span["service"], span["phase"]] += span["end"] - span["start"]
    else:
        total_seconds = math.fsum(step.get("seconds", 0.0) for step in steps)
        for phase in ("generate", "score", "update"):
            if (seconds := math.fsum(step.get(f"{phase}_seconds", 0.0) for step in steps)) > 0:
                phase_seconds["the step", phase] = seconds
    if not phase_seconds or not total_seconds:
        return paragraph("Not recorded.")
    longest = sorted(phase_seconds.items(), key=lambda item: -item[1])
    rows = [[*key, seconds, f"{100 * seconds / total_seconds:.1f} %"] for key, seconds in longest]
    about = "Phases overlap, and so do calls within a service, so the shares may add up to more than 100%."
    return paragraph(about) + table(["service", "phase", "seconds", "share of step time"], rows)


def _trajectories(files: RunFiles) -> str:
    """Return the best, median and worst response of the last and the first recorded step, or the first one without scores."""
    paths = sorted(files.trajectories.glob("step-*.jsonl"), key=lambda path: int(path.stem.removeprefix("step-")))
    samples = "".join(_samples(path) for path in dict.fromkeys([*paths[-1:], *paths[:1]]))
    return samples or paragraph("None were recorded.")


def _samples(path: Path) -> str:
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        if not lines:
            return ""
        if lines[0]["score"] is None:
            chosen = {"first": lines[0]}
        else:
            ranked = sorted(lines, key=lambda line: line["score"])
            chosen = {
                f"{rank}: score {number(line['score'])}": line
                for rank, line in (("best", ranked[-1]), ("median", ranked[len(ranked) // 2]), ("worst", ranked[0]))
            }
        shown = "".join(texts(title, _about(line), line["prompt"], line["response"]) for title, line in chosen.items())
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"trajectories {path}: cannot be read ({type(error).__name__}); repair or remove the file"
        ) from None
    return f"<h3>Step {int(path.stem.removeprefix('step-'))}</h3>{shown}"


def _about(line: Mapping[str, Any]) -> str:
    parts = "".join(f", {name} {number(score)}" for name, score in line.get("parts", {}).items())
    end = "" if line["finished"] else ", truncated at the token limit"
    return f"{line['id']}{parts}, KL {number(line['kl'])} nats, {line['response_tokens']} tokens{end}"


def _checkpoints(files: RunFiles) -> str:
    folders, tagged = checkpoint_folders(files), tagged_checkpoints(files)
    rows = []
    for path in folders:
        tags = ", ".join(tag for tag, folder in tagged.items() if folder == path.name)
        try:
            rows.append([checkpoint_step(path), tags, f"{read_checkpoint(path).bytes / 2**20:.1f} MiB", ""])
        except DamagedCheckpoint as damage:
            rows.append([checkpoint_step(path), tags, "", str(damage)])
    return table(["step", "tag", "size", "problem"], rows) if rows else paragraph("No checkpoints.")


def _environment() -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = [
        ("system", platform.platform()),
        ("Python", platform.python_version()),
        ("quartet", __version__),
    ]
    for name in LIBRARIES:
        try:
            rows.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return rows
