"""Runs with worker groups beside runs with one process: weights, repetition and rewards.

Trains the review configs with one, two and four processes for each trained role: PPO and RLOO, all weights and LoRA. Short runs
are compared by the weights of their policies: the distance between two policies after the same steps, as a share of the
distance that training has moved them. A probability that is rounded differently can sample another token, and from there it is
another run. So these runs have the first seed with which all sizes sample the same tokens. Each of them is repeated, and must
end with equal files. Longer runs are compared by mean rewards, beside runs of one process with other seeds. Writes the results
below build/ and tables into docs/evidence/learning.md.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import safe_open

from benchmarks import machine
from benchmarks.options import add_shared, parser_of, positive, publish
from quartet.config.loading import load_config
from quartet.errors import ConfigError
from quartet.run_directory.run_files import RunFiles
from quartet.system.child_processes import tied_to_parent

SIZES = (1, 2, 4)
"""Numbers of processes of each trained role."""
SEEDS = (0, 1, 2)
"""Seeds of the longer runs with one process. Those with more processes have the first."""
SHORT = 10
"""Steps of the runs whose weights are compared."""
SHORT_SETTINGS = ("rollout.max_response_tokens=12",)
"""Settings of these runs. Fewer tokens are sampled, so that fewer can differ."""
TRIED = 8
"""Seeds that are tried for runs with the same tokens."""
PART = 10
"""Steps whose rewards are averaged."""
LORA = ("actor.lora.rank=8", "actor.lora.alpha=16", "actor.learning_rate=3e-4")


@dataclass(frozen=True)
class Case:
    """One algorithm and kind of training, with the roles that it trains."""

    name: str
    config: Path
    settings: tuple[str, ...]
    roles: tuple[str, ...]


CASES = tuple(
    Case(f"{algorithm.upper()}, {kind}", Path(f"configs/reviews/{algorithm}.yaml"), settings, roles)
    for algorithm, roles in (("ppo", ("actor", "critic")), ("rloo", ("actor",)))
    for kind, settings in (("all weights", ()), ("LoRA", LORA))
)


@dataclass(frozen=True)
class Result:
    """Measurements of one case.

    ``differences``: distance of the policy to that of one process after ``SHORT`` steps, as a share of the distance that training
    moved it, by number of processes. ``seed`` of these runs. ``others``: the step with the first other token, by the seeds before
    that and number of processes. ``repeats``: whether a repetition had equal bits. ``rewards``: mean reward of each ``PART``
    steps, by number of processes and seed.
    """

    case: str
    differences: dict[int, float]
    seed: int
    others: dict[str, int]
    repeats: dict[int, bool]
    rewards: dict[str, list[float]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("groups", __doc__)
    parser.add_argument("--steps", type=positive, default=60, help=f"steps of the longer runs, a multiple of {PART}")
    parser.add_argument("--cases", type=positive, default=len(CASES), help="number of cases to run, in their order")
    add_shared(parser, "build/groups", Path("docs/evidence/learning.md"), contents="runs and results")
    options = parser.parse_args(arguments)
    if options.steps % PART:
        parser.error(f"--steps {options.steps}: expected a multiple of {PART}")
    host = machine.describe()
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    try:
        results = [measure(case, options.steps, options.folder) for case in CASES[: options.cases]]
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = {"machine": host, "results": [asdict(result) for result in results]}
    publish(parser, options, report, table(results, host))
    return 0 if all(all(result.repeats.values()) for result in results) else 1


def measure(case: Case, steps: int, folder: Path) -> Result:
    """Train ``case`` with all ``SIZES``. Raises ConfigError if a run fails."""
    initial = Path(load_config(case.config, []).actor.model)
    slug = case.name.lower().replace(", ", "-").replace(" ", "-")
    rewards, others = {}, dict[str, int]()
    for seed in range(TRIED):
        runs = {size: _train(case, size, SHORT, seed, folder, f"{slug}-{size}-short-{seed}") for size in SIZES}
        parted = {size: step for size in SIZES[1:] if (step := first_other_step(runs[1], runs[size]))}
        if not parted:
            break
        others |= {f"seed {seed}, {size} processes": step for size, step in parted.items()}
    else:
        raise ConfigError(f"{case.name}: with each of {TRIED} seeds a run has sampled another token: {others}")
    repeats = {}
    for size, run in runs.items():
        again = _train(case, size, SHORT, seed, folder, f"{slug}-{size}-again")
        repeats[size] = _bytes_of(run.policy) == _bytes_of(again.policy)
    for size in SIZES:
        for number in SEEDS if size == 1 else SEEDS[:1]:
            longer = _train(case, size, steps, number, folder, f"{slug}-{size}-seed-{number}")
            rewards[f"{size}, seed {number}"] = rewards_of(longer)
    movement = distance(runs[1].policy, initial)
    differences = {size: distance(runs[size].policy, runs[1].policy) / movement for size in SIZES[1:]}
    return Result(case.name, differences, seed, others, repeats, rewards)


def first_other_step(first: RunFiles, second: RunFiles) -> int:
    """Return the first step at which two runs have different responses, or 0."""
    for step in first.trajectory_steps():
        one, other = ([each["response"] for each in run.read_trajectories(step)] for run in (first, second))
        if one != other:
            return step
    return 0


def _train(case: Case, size: int, steps: int, seed: int, folder: Path, name: str) -> RunFiles:
    print(f"{case.name}: {size} processes, {steps} steps, seed {seed}", file=sys.stderr, flush=True)
    settings = [
        *(SHORT_SETTINGS if steps == SHORT else ()),
        f"run.name={name}",
        f"run.directory={folder}",
        f"run.steps={steps}",
        f"run.seed={seed}",
        "gateway.enabled=false",
        *case.settings,
        *(f"services.{role}.processes={size}" for role in case.roles),
    ]
    command = [str(Path(sys.executable).with_name("quartet")), "train", str(case.config)]
    command += [part for setting in settings for part in ("--set", setting)]
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        code = subprocess.run(
            tied_to_parent(command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code:
        raise ConfigError(f"the run {name} ended with status {code}; see {log}")
    return RunFiles(folder / name)


def rewards_of(run: RunFiles) -> list[float]:
    """Return the mean reward of each ``PART`` steps."""
    values = [json.loads(line)["reward_mean"] for line in run.metrics.read_text().splitlines()]
    return [statistics.fmean(values[first : first + PART]) for first in range(0, len(values), PART)]


def _bytes_of(policy: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(policy.glob("*.safetensors"))}


def distance(first: Path, second: Path) -> float:
    """Return the Euclidean distance of two models' weights."""
    total = 0.0
    with _weights(first) as a, _weights(second) as b:
        for name in sorted(set(a.keys()) & set(b.keys())):
            total += float((a.get_tensor(name).double() - b.get_tensor(name).double()).square().sum())
    return math.sqrt(total)


def _weights(policy: Path) -> safe_open:
    return safe_open(policy / "model.safetensors", "pt")


def table(results: Iterable[Result], host: str) -> str:
    """Return the tables for the page."""
    lines = [
        f"{host}. Difference: distance between the policies after {SHORT} steps, as a share of the distance that training moved "
        "the weights, with responses of up to 12 tokens. Probabilities that are rounded differently can sample another token, "
        "and from there it is another run. So these runs have the first seed with which all of them sample the same tokens.",
        "",
        "| case | seed | difference, 2 processes | 4 processes | a repetition has equal bits | step of another token |",
        "|---|---|---|---|---|---|",
    ]
    rewards = [
        f"Mean reward of each {PART} steps:",
        "",
        "| case | processes | rewards |",
        "|---|---|---|",
    ]
    for result in results:
        cells = " | ".join(f"{result.differences[size]:.1e}" for size in SIZES[1:])
        equal = ", ".join(f"{size}: {'yes' if result.repeats[size] else 'no'}" for size in SIZES)
        others = "; ".join(f"{name}: {step}" for name, step in result.others.items())
        lines.append(f"| {result.case} | {result.seed} | {cells} | {equal} | {others} |")
        for name, values in result.rewards.items():
            rewards.append(f"| {result.case} | {name} | {' '.join(f'{value:.2f}' for value in values)} |")
    return "\n".join([*lines, "", *rewards])


if __name__ == "__main__":
    sys.exit(main())
