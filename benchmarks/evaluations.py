"""Cost of an evaluation after every step: on a reserved generator during training, and with training stopped.

Three runs with simulated services (`benchmarks/simulated.py`) take the same steps with the same responses: one without
evaluations, one that stops training for each evaluation, and one with `evaluation.generators: 1`. The services sleep for a
stated time per token, as if each had its own device; gRPC, the embedded Redis, and the orchestrator with its files are real.
Each step is compared with the same step of the run without evaluations, from one commit to the next. The runs of a round take
turns in both orders. All have the same number of generators that train; the last run has one more. Writes the results below
build/ and the table into docs/evidence/performance.md. The exit status is 1 if evaluations beside training make a step more than
LIMIT times longer.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.options import add_shared, parser_of, positive, publish
from benchmarks.orchestration import MAX_RESPONSE, prompts_of, train
from benchmarks.simulated import Times
from quartet.errors import QuartetError
from quartet.telemetry.logs import configure_logs

LIMIT = 1.02
"""Maximum duration of a step with an evaluation beside it, over that of the same step without one."""
STATED = Times(generate=75e-6, score=2e-6, values=2e-6, update=25e-6)
"""Seconds per token: about 2.4 s of generation and 1.6 s of update per step."""
TRAJECTORIES, GENERATORS = 64, 2
"""Trajectories per step, and generators that train."""
PROMPTS, SAMPLES = 8, 2
"""Validation prompts, each with a greedy and a sampled response, and samples of each prompt of one evaluation set."""
STEPS = 12
MARGIN = 2
"""Steps that are left out at the start of a run. The last one is left out, too: the evaluation after it is beside none."""
WITHOUT, STOPPING, BESIDE = "none", "training stops", "beside training"


@dataclass(frozen=True)
class Pair:
    """Seconds of one step with evaluations, and of the same step without."""

    mode: str
    step: int
    seconds: float
    without: float

    @property
    def ratio(self) -> float:
        return self.seconds / self.without


@dataclass(frozen=True)
class Cost:
    """Geometric mean of the ratios, its 95 % interval, and the mean seconds that an evaluation adds to a step."""

    ratio: float
    low: float
    high: float
    added: float
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("evaluations", __doc__)
    parser.add_argument("--steps", type=positive, default=STEPS, help=f"steps per run, more than {MARGIN + 2}")
    add_shared(parser, "build/evaluations", rounds=2)
    options = parser.parse_args(arguments)
    if options.steps <= MARGIN + 2:
        parser.error(f"--steps {options.steps}: expected more than {MARGIN + 2}")
    torch.set_num_threads(1)  # As in the orchestrator.
    host = machine.describe()
    options.folder.mkdir(parents=True, exist_ok=True)
    configure_logs("orchestrator")
    pairs: list[Pair] = []
    try:
        for number in range(options.rounds):
            modes = (WITHOUT, STOPPING, BESIDE)[:: -1 if number % 2 else 1]
            seconds = {mode: measure(mode, options.steps, options.folder) for mode in modes}
            pairs += paired(seconds)
    except QuartetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = {"machine": host, "stated": asdict(STATED), "pairs": [asdict(pair) for pair in pairs]}
    publish(parser, options, report, table(pairs, host))
    return 0 if cost([pair for pair in pairs if pair.mode == BESIDE]).ratio <= LIMIT else 1


def settings(mode: str, path: Path) -> dict[str, Any]:
    """Return the section of evaluations. ``path``: the prompts file."""
    if mode == WITHOUT:
        return {}
    sets = [{"name": "more", "path": str(path), "samples_per_prompt": SAMPLES, "pass_at": [1]}]
    return {"every_steps": 1, "max_prompts": PROMPTS, "sets": sets, "generators": int(mode == BESIDE)}


def measure(mode: str, steps: int, folder: Path) -> list[float]:
    """Return the seconds of each step, from one commit to the next. Raises the error of the run if it fails."""
    rollout = {"prompts_per_step": TRAJECTORIES}
    generators, evaluation = GENERATORS + (mode == BESIDE), settings(mode, prompts_of(folder))
    times = train(rollout, steps, steps * TRAJECTORIES, 1, generators, STATED, folder, evaluation=evaluation)
    return [after[0] - before[0] for before, after in pairwise(times)]


def paired(seconds: Mapping[str, Sequence[float]]) -> list[Pair]:
    """Return the steps with evaluations, each beside the same step without, except the margins."""
    return [
        Pair(mode, index + 1, own, without)
        for mode in (STOPPING, BESIDE)
        for index, (own, without) in enumerate(zip(seconds[mode], seconds[WITHOUT], strict=True))
        if MARGIN <= index < len(seconds[mode]) - 1
    ]


def cost(pairs: Sequence[Pair]) -> Cost:
    """Return the cost of the evaluations. The interval is that of the mean of the logarithms, by Student's t."""
    logarithms = [math.log(pair.ratio) for pair in pairs]
    mean, error = statistics.fmean(logarithms), statistics.stdev(logarithms) / math.sqrt(len(pairs))
    reach = _quantile(len(pairs) - 1) * error
    return Cost(
        *map(math.exp, (mean, mean - reach, mean + reach)),
        statistics.fmean(pair.seconds - pair.without for pair in pairs),
        statistics.fmean(pair.seconds for pair in pairs),
    )


def _quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t, by the expansion of Abramowitz and Stegun 26.7.5: 0.2 % off from 5 on."""
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, 1))


def table(pairs: Sequence[Pair], host: str) -> str:
    """Return the table for the page."""
    generate, update, score = (f"{1e6 * value:g} µs" for value in (STATED.generate, STATED.update, STATED.score))
    responses = PROMPTS * (2 + SAMPLES)
    own = [pair for pair in pairs if pair.mode == BESIDE]
    lines = [
        f"{host}; the services run on it, too. Stated times: generation {generate} per response token and generator, updates "
        f"{update}, scores and values {score} per token of prompt and response. A step has {TRAJECTORIES} responses of "
        f"{MAX_RESPONSE // 4} to {MAX_RESPONSE:,} tokens by {GENERATORS} generators, an evaluation {responses} responses after "
        f"every step. Beside training, one more generator only evaluates. {len(own)} pairs of the same step with and without "
        "evaluations for each row; the ratio is the geometric mean with its 95 % interval.",
        "",
        "| evaluation | seconds per step | added, ms | with / without |",
        "|---|---|---|---|",
    ]
    without = statistics.fmean(pair.without for pair in own)
    lines.append(f"| {WITHOUT} | {without:.3f} | | |")
    for mode in (STOPPING, BESIDE):
        result = cost([pair for pair in pairs if pair.mode == mode])
        lines.append(
            f"| {mode} | {result.seconds:.3f} | {1e3 * result.added:.0f} | **{result.ratio:.3f}** ({result.low:.3f} to "
            f"{result.high:.3f}) |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
