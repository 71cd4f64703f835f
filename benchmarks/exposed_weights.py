"""Seconds for which a PPO step waits for weights, with two generators on the actor's machine.

Runs of `configs/reviews/ppo.yaml` with shared memory and over gRPC take turns. `weights_exposed_seconds` of metrics.jsonl are the
seconds in which the actor publishes or a generator loads a version, and no service trains, scores or saves.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.options import add_shared, parser_of, positive, publish
from quartet.config.loading import load_config
from quartet.errors import ConfigError
from quartet.run_directory.run_files import RunFiles
from quartet.system.child_processes import tied_to_parent

WARM_UP = 3
"""First steps to leave out: they fill caches and allocate memory."""
WAYS = {"shared memory": "true", "gRPC": "false"}
"""Ways, and the value of rollout.share_weights for each."""


@dataclass(frozen=True)
class Exposed:
    """Medians over the steps of one run, in seconds. ``share``: of all seconds of its steps."""

    way: str
    step: float
    publish: float
    load: float
    exposed: float
    share: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("exposed_weights", __doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/reviews/ppo.yaml"))
    parser.add_argument("--steps", type=positive, default=20, help=f"steps per run, more than {WARM_UP}")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override the config")
    add_shared(parser, "build/exposed-weights", contents="runs and results", rounds=3)
    options = parser.parse_args(arguments)
    if options.steps <= WARM_UP:
        parser.error(f"--steps {options.steps}: expected more than {WARM_UP}")
    host = machine.describe()
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    try:
        model = load_config(options.config, options.set).actor.model
        if not Path(model).is_dir():
            raise ConfigError(f"actor.model {model}: not found; see the comment at the start of {options.config}")
        results = [
            measure(way, options.config, options.set, options.steps, options.folder / f"{number}-{way.split()[0]}")
            for number in range(options.rounds)
            for way in WAYS
        ]
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = {"machine": host, "results": [asdict(each) for each in results]}
    publish(parser, options, report, table(results, options.steps, host))
    return 0


def measure(way: str, config: Path, overrides: Sequence[str], steps: int, folder: Path) -> Exposed:
    """Run ``steps`` steps. Raises ConfigError if the run fails."""
    settings = [
        *overrides,
        "rollout.generators=2",
        f"rollout.share_weights={WAYS[way]}",
        f"run.steps={steps}",
        f"run.name={folder.name}",
        f"run.directory={folder.parent}",
        "gateway.enabled=false",
    ]
    command = [str(Path(sys.executable).with_name("quartet")), "train", str(config)]
    log = folder.with_suffix(".log")
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    with log.open("wb") as output:
        result = subprocess.run(
            tied_to_parent([*command, *(part for setting in settings for part in ("--set", setting))]),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    if result.returncode:
        raise ConfigError(f"quartet train ended with status {result.returncode}; see {log}")
    files = RunFiles(folder)
    lines, spans = (
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in (files.metrics, files.root / "timeline.jsonl")
    )
    return exposed_of(way, lines, spans)


def exposed_of(way: str, metrics: Sequence[Mapping[str, float]], timeline: Sequence[Mapping[str, Any]]) -> Exposed:
    """Return the medians of the steps after the warm-up from the lines of metrics.jsonl and timeline.jsonl."""
    steps = metrics[WARM_UP:]
    first = steps[0]["step"]
    publications = [
        span["end"] - span["start"]
        for line in timeline
        if line["step"] >= first
        for span in line["spans"]
        if span["phase"] == "publish"
    ]
    names = ("seconds", "weight_update_seconds", "weights_exposed_seconds")
    seconds, load, exposed = ([step[name] for step in steps] for name in names)
    medians = map(statistics.median, (seconds, publications, load, exposed))
    return Exposed(way, *medians, sum(exposed) / sum(seconds))


def table(results: Sequence[Exposed], steps: int, host: str) -> str:
    """Return the table for the page: medians over the runs."""
    lines = [
        f"{host}; generators and services share it. {steps} steps per run, without the first {WARM_UP}. Medians, and the range "
        "of the share. Publish: copy and digest in the actor. Load: transfer, copy and digest in the slower generator.",
        "",
        "| way | runs | step, s | publish, ms | load, ms | exposed, ms | of the step |",
        "|---|---|---|---|---|---|---|",
    ]
    for way in dict.fromkeys(each.way for each in results):
        runs = [each for each in results if each.way == way]
        step, publish, load, exposed, share = (
            statistics.median(getattr(run, name) for run in runs)
            for name in ("step", "publish", "load", "exposed", "share")
        )
        shares = [run.share for run in runs]
        lines.append(
            f"| {way} | {len(runs)} | {step:.2f} | {1e3 * publish:.1f} | {1e3 * load:.1f} | {1e3 * exposed:.1f} "
            f"| **{share:.1%}** ({min(shares):.1%} to {max(shares):.1%}) |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
