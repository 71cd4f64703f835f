"""Evidence that runs learn: algorithms over model seeds and run seeds, PPO and RLOO beside TRL.

Runs of each algorithm on several model seeds and run seeds, runs of the default config, and PPO and RLOO beside TRL with equal
settings. Every final policy answers the same 2,000 prompts. It takes hours. If it is interrupted, the same command continues.
`--parts families` trains policies with linear attention, Mamba, convolutions and an index of tokens, in half an hour.
Writes docs/evidence/learning.md and its plots.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import machine, page
from benchmarks.evidence import families
from benchmarks.evidence.experiments import (
    ALGORITHMS,
    BESIDE_TRL,
    TRL_SIDES,
    Experiment,
    algorithm_runs,
    default_runs,
    initial_policies,
    trl_runs,
    variation_runs,
)
from benchmarks.evidence.runs import Result, ResultsFile, prepare_models, take
from benchmarks.evidence.tables import (
    algorithm_table,
    beside_settings,
    beside_table,
    default_table,
    plot_algorithms,
    plot_beside,
    plot_default,
    variation_table,
)
from benchmarks.options import NOT_MEASURED, add_shared, page_of, parser_of, positive
from quartet.errors import ConfigError

PAGE = Path("docs/evidence/learning.md")
RESULTS = Path(__file__).with_name("results.jsonl")
PARTS = ("default", "algorithm", "beside", "variation")
FAMILIES = "families"
"""A part with its own place on the page, which is made alone."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("evidence", __doc__)
    parser.add_argument("--positive", type=Path, help="favourable sentences, one per line; needed to make the models")
    parser.add_argument("--negative", type=Path, help="unfavourable sentences, one per line")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument(
        "--model-seeds",
        nargs="+",
        type=int,
        default=[11, 12, 13, 14],
        help="models of the runs beside TRL; the other runs use the first three",
    )
    parser.add_argument("--run-seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--pair-seeds", nargs="+", type=int, default=[0, 1], help="run seeds of the pairs beside TRL")
    parser.add_argument("--steps", type=positive, default=60, help="steps of all runs but the default ones")
    parser.add_argument("--parts", nargs="+", choices=(*PARTS, FAMILIES), default=list(PARTS))
    parser.add_argument(
        "--jobs", type=positive, default=2, help="runs at the same time, each with one thread per process"
    )
    parser.add_argument(
        "--trl", type=Path, default=Path("build/parity-venv/bin/python"), help="Python interpreter with TRL"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of finished runs, which are not repeated")
    add_shared(parser, "build/evidence", PAGE, contents="models and runs")
    options = parser.parse_args(arguments)
    folder: Path = options.folder.absolute()
    host = machine.describe()
    if FAMILIES in options.parts:
        if options.parts != [FAMILIES]:
            parser.error(f"--parts {' '.join(options.parts)}: {FAMILIES} is made alone; give --parts {FAMILIES}")
        return _make_families(options.positive, options.negative, folder, host, options.page or options.usual_page)
    first = options.model_seeds[:3]
    every_part = {
        "default": default_runs(folder, first),
        "algorithm": algorithm_runs(folder, options.algorithms, first, options.run_seeds, options.steps),
        "beside": trl_runs(folder, list(BESIDE_TRL), options.model_seeds, options.pair_seeds, options.steps),
        "variation": variation_runs(folder, first, options.steps),
    }
    parts = {"initial": initial_policies(folder, first)} | {part: every_part[part] for part in options.parts}
    # The run as shipped is a variation, and one of its algorithm's runs.
    experiments = list(dict.fromkeys(experiment for part in parts.values() for experiment in part))
    finished = ResultsFile(options.results)
    waiting = [experiment for experiment in experiments if finished.get(experiment) is None]
    try:
        _prepare(
            options.positive, options.negative, folder, sorted({each.model_seed for each in waiting}), options.jobs
        )
        results = _take_all(experiments, finished, options.jobs, options.trl.absolute())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    by_part = {part: {each: results[each] for each in runs} for part, runs in parts.items()}
    page_path = page_of(parser, options, NOT_MEASURED | {"positive", "negative", "jobs", "results", "trl"})
    text = report(by_part, host, (page_path or folder / PAGE.name).parent)
    print(text)
    page.write(page_path, "evidence", text)
    return 0


def _make_families(positive_file: Path | None, negative_file: Path | None, folder: Path, host: str, path: Path) -> int:
    try:
        if positive_file is None or negative_file is None:
            raise ConfigError(f"--parts {FAMILIES}: give two files of sentences: --positive FILE --negative FILE")
        families.prepare(positive_file, negative_file, folder / FAMILIES)
        families.train_all(folder / FAMILIES)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = f"{host}, one thread per process, float32. {families.table(folder / FAMILIES)}"
    print(text)
    page.write(path, f"evidence --parts {FAMILIES}", text)
    return 0


def _prepare(
    positive_file: Path | None, negative_file: Path | None, folder: Path, seeds: Sequence[int], jobs: int
) -> None:
    missing = [seed for seed in seeds if not (folder / "models" / str(seed) / "training.jsonl").exists()]
    if not missing:
        return
    if positive_file is None or negative_file is None:
        raise ConfigError(
            f"{folder}: no models of seed {missing[0]}; give two files of sentences: "
            "python -m benchmarks evidence --positive positive.txt --negative negative.txt"
        )
    files = positive_file, negative_file
    print(f"models of seeds {', '.join(map(str, missing))}", flush=True)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda seed: prepare_models(*files, folder, seed), missing))


def _take_all(
    experiments: Sequence[Experiment], finished: ResultsFile, jobs: int, trl: Path
) -> dict[Experiment, Result]:
    if not trl.exists() and any(each.side in TRL_SIDES and finished.get(each) is None for each in experiments):
        raise ConfigError(f"--trl {trl}: not found; make parity creates an environment with TRL")

    def report_taken(experiment: Experiment) -> Result:
        result = take(experiment, trl, finished)
        final = result.final
        print(
            f"{experiment.name}: reward {final.reward:.2f}, KL {final.kl:.2f}, EOS rate {final.eos_rate:.2f}",
            flush=True,
        )
        return result

    pool = ThreadPoolExecutor(jobs)
    try:
        return dict(zip(experiments, pool.map(report_taken, experiments), strict=True))
    finally:
        pool.shutdown(cancel_futures=True)


def report(parts: dict[str, dict[Experiment, Result]], host: str, folder: Path) -> str:
    """Return the part of the page that the command writes, and write its plots to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    machine_name = host.rpartition(", load")[0]
    lines = [f"{machine_name}, one thread per process, float32. ± is the half width of a 95 % confidence interval."]
    if runs := parts.get("default"):
        picture = folder / "learning-default.svg"
        plot_default(runs, picture)
        lines += [
            "",
            "## The default run",
            "",
            f"`configs/reviews/ppo.yaml` as it is, {_steps(runs)} steps.",
            "",
            default_table(runs),
            "",
            f"![reward, KL, its coefficient and the EOS rate over steps]({picture.name})",
        ]
    if runs := parts.get("algorithm"):
        picture = folder / "learning-algorithms.svg"
        plot_algorithms(runs, picture)
        lines += [
            "",
            "## Each algorithm",
            "",
            f"The configs of `configs/reviews` with {_steps(runs)} steps, in which the learning rate falls to 0.",
            "",
            algorithm_table(runs, parts["initial"]),
            "",
            f"![reward over steps and over KL]({picture.name})",
        ]
    if runs := parts.get("beside"):
        picture = folder / "learning-trl.svg"
        plot_beside(runs, picture)
        lines += [
            "",
            "## Beside TRL",
            "",
            *beside_settings(runs),
            "",
            beside_table(runs),
            "",
            f"![score over steps of both sides]({picture.name})",
        ]
    if runs := parts.get("variation"):
        lines += [
            "",
            "## Variations of a setting",
            "",
            f"`ppo.yaml` with {_steps(runs)} steps and one change.",
            "",
            variation_table(runs, parts["initial"]),
        ]
    return "\n".join(lines)


def _steps(runs: dict[Experiment, Result]) -> int:
    """Return the number of steps, which is the same for all runs of a part."""
    (steps,) = {each.steps for each in runs}
    return steps


if __name__ == "__main__":
    sys.exit(main())
