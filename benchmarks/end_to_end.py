"""Episodes and tokens per second of Quartet's services and TRL's trainers, on the same checkpoints, prompts and settings.

The two sides run alternately, several times, so that variations of the machine affect both. TRL runs in a separate Python
environment. Writes the results below build/ and the table into docs/evidence/performance.md. If the configs put the models on a
GPU (configs/gpu), TRL uses it, too, and the table is only printed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from benchmarks import machine, page
from benchmarks.options import add_shared, page_of, parser_of, positive
from benchmarks.trl_settings import equal_settings
from quartet.config.loading import load_config
from quartet.config.root import Config
from quartet.errors import ConfigError
from quartet.run_directory.run_files import RunFiles
from quartet.system.child_processes import tied_to_parent

WARM_UP = 2
"""First steps to leave out on both sides: they fill caches and allocate memory."""
CONFIGS = ("configs/reviews/ppo.yaml", "configs/reviews/rloo.yaml")
RUN = "end-to-end"


@dataclass(frozen=True)
class Speed:
    """Speed and reward of one run, without its first steps."""

    episodes: float
    """Per second."""
    tokens: float
    """Response tokens per second, up to the first EOS."""
    seconds: float
    """Mean duration of a step."""
    reward: float
    """Mean over the last half of the steps. Responses without EOS count with their penalty, as in TRL."""


@dataclass(frozen=True)
class Pair:
    """One run of each side."""

    quartet: Speed
    trl: Speed

    @property
    def ratio(self) -> float:
        """Return Quartet's episodes per second over TRL's."""
        return self.quartet.episodes / self.trl.episodes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("end_to_end", __doc__)
    parser.add_argument("--config", action="append", type=Path, help="may be repeated")
    parser.add_argument("--steps", type=positive, default=16)
    parser.add_argument("--pairs", type=positive, default=3, help="pairs of runs, each with a separate seed")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override the config of both sides"
    )
    parser.add_argument(
        "--trl", type=Path, default=Path("build/parity-venv/bin/python"), help="Python interpreter with TRL"
    )
    add_shared(parser, "build/end-to-end", contents="runs and results")
    options = parser.parse_args(arguments)
    paths = options.config or [Path(path) for path in CONFIGS]
    results: dict[str, list[Pair]] = {}
    try:
        if options.steps <= WARM_UP:
            raise ConfigError(
                f"--steps {options.steps}: expected more than {WARM_UP}, because the first {WARM_UP} are left out"
            )
        configs = [load_config(path, options.set) for path in paths]
        devices = {machine.device_of(config, path) for config, path in zip(configs, paths, strict=True)}
        dtypes = {config.actor.dtype for config in configs}
        if len(devices) > 1 or len(dtypes) > 1:
            raise ConfigError(f"--config: {', '.join(map(str, paths))} differ in device or dtype; run them separately")
        for config, path in zip(configs, paths, strict=True):
            _check(config, path)
        (device,), (dtype,) = devices, dtypes
        if not options.trl.exists():
            raise ConfigError(f"--trl {options.trl}: not found; make parity creates an environment with TRL")
        host = machine.describe(device)
        shutil.rmtree(options.folder, ignore_errors=True)
        options.folder.mkdir(parents=True)
        for number in range(options.pairs):
            for path, config in zip(paths, configs, strict=True):
                # The options come last, so that they may override what makes the sides equal.
                settings = [*equal_settings(config), *options.set, f"run.seed={number}"]
                pair = measure(path, settings, options.steps, options.trl, options.folder / f"{path.stem}-{number}")
                results.setdefault(str(path), []).append(pair)
                print(f"{path}: {pair.ratio:.2f} times TRL's episodes per second", flush=True)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = {"machine": host, **{path: [asdict(pair) for pair in pairs] for path, pairs in results.items()}}
    (options.folder / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    text = table(results, options.steps, dtype, host)
    print(text)
    if device == "cpu":
        page.write(page_of(parser, options), "end_to_end", text)
    return 0


def _check(config: Config, path: Path) -> None:
    if config.algorithm.estimator not in ("gae", "rloo"):
        raise ConfigError(f"{path}: algorithm.estimator {config.algorithm.estimator}: the comparison needs gae or rloo")
    if not Path(config.actor.model).is_dir():
        raise ConfigError(
            f"{path}: actor.model {config.actor.model}: not found; see the comment at the start of {path}"
        )


def measure(path: Path, settings: Sequence[str], steps: int, trl: Path, folder: Path) -> Pair:
    """Run both sides below ``folder`` with the overrides ``settings``. Raises ConfigError if a run fails."""
    folder.mkdir()
    return Pair(_quartet(path, settings, steps, folder), _trl(path, settings, steps, trl, folder))


def _quartet(path: Path, settings: Sequence[str], steps: int, folder: Path) -> Speed:
    own = [f"run.name={RUN}", f"run.directory={folder}", f"run.steps={steps}", "gateway.enabled=false"]
    command = [str(Path(sys.executable).with_name("quartet")), "train", str(path)]
    _run([*command, *(part for setting in (*settings, *own) for part in ("--set", setting))], folder / "quartet.log")
    files = RunFiles(folder / RUN)
    return speed_of_quartet(
        (files.logs / "orchestrator.log").read_text(),
        [json.loads(line) for line in files.metrics.read_text().splitlines()],
        load_config(path, list(settings)),
    )


def _trl(path: Path, settings: Sequence[str], steps: int, python: Path, folder: Path) -> Speed:
    out = folder / "trl.jsonl"
    command = [str(python), "-m", "benchmarks.trl_training", str(path), str(steps), str(out), *settings]
    _run(command, folder / "trl.log")
    return speed_of_trl([json.loads(line) for line in out.read_text().splitlines()])


def _run(command: list[str], log: Path) -> None:
    # Each side chooses its own number of threads.
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    with log.open("wb") as output:
        result = subprocess.run(
            tied_to_parent(command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    if result.returncode:
        raise ConfigError(f"{' '.join(command[:3])} ended with status {result.returncode}; see {log}")


def speed_of_quartet(log: str, metrics: Sequence[dict[str, float]], config: Config) -> Speed:
    """Compute the speed from the times of the commits in the orchestrator's log, and the metrics of the steps."""
    ends = [
        datetime.fromisoformat(stamp).timestamp()
        for stamp in re.findall(r"timestamp='([^']+)'.*event='step committed'", log)
    ]
    responses = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    warm = metrics[WARM_UP:]
    seconds = ends[-1] - ends[WARM_UP - 1]
    return Speed(
        responses * len(warm) / seconds,
        sum(step["response_tokens"] for step in warm) / seconds,
        seconds / len(warm),
        statistics.fmean(step["score_mean"] for step in metrics[len(metrics) // 2 :]),
    )


def speed_of_trl(steps: Sequence[dict[str, float]]) -> Speed:
    """Compute the speed from the lines that ``benchmarks.trl_training`` wrote."""
    warm = steps[WARM_UP:]
    seconds = sum(step["seconds"] for step in warm)
    return Speed(
        sum(step["responses"] for step in warm) / seconds,
        sum(step["response_tokens"] for step in warm) / seconds,
        seconds / len(warm),
        statistics.fmean(step["reward_mean"] for step in steps[len(steps) // 2 :]),
    )


def table(results: dict[str, list[Pair]], steps: int, dtype: str, host: str) -> str:
    """Return the table for the page: medians over the pairs."""
    lines = [
        f"{host}. {steps} steps per run, {dtype}, without the first {WARM_UP} steps. Each pair has another seed. Medians; "
        "reward and speedup also have their range. The reward is the mean over the last half of the steps.",
        "",
        "| config | pairs | seconds per step, TRL | Quartet | episodes/s, TRL | Quartet | tokens/s, TRL | Quartet "
        "| reward, TRL | Quartet | speedup |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for path, pairs in results.items():
        sides = [pair.trl for pair in pairs], [pair.quartet for pair in pairs]
        cells = [
            f"{statistics.median(getattr(run, name) for run in runs):.{digits}f}"
            for name, digits in (("seconds", 2), ("episodes", 1), ("tokens", 0))
            for runs in sides
        ]
        for runs in sides:
            rewards = [run.reward for run in runs]
            cells.append(f"{statistics.median(rewards):.2f} ({min(rewards):.2f} to {max(rewards):.2f})")
        ratios = [pair.ratio for pair in pairs]
        range_ = f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"| `{path}` | {len(pairs)} | {' | '.join(cells)} | {range_} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
