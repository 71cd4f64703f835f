"""bfloat16 beside float32 on a CPU: tokens a second of the torch engine, seconds of a policy's update, one thread.

`make precision`, or python -m benchmarks.precision. For the review policy, and for one of the shape of Qwen2 0.5B with 4 of
its 24 layers and random weights; the two types take turns. And how near the float32 masters of bfloat16 weights move to where
float32 weights do, in an update of the review policy. Writes the results below build/, the table into docs/performance.md.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks import machine, page
from benchmarks.generation import read_prompts
from benchmarks.options import add_shared, page_of, parser_of
from benchmarks.update import Work, matmul_peak, of_policy
from quartet.config import Config, load_config
from quartet.errors import QuartetError
from quartet.models.generation.torch_engine import TorchEngine
from quartet.models.weights.loading import load_causal_lm, load_tokenizer, stop_token_ids
from quartet.types import GenerationRequest, SamplingParameters, TrajectoryId

DTYPES = ("float32", "bfloat16")
REVIEWS = Path("configs/reviews/ppo.yaml")
HALF = (
    "data.prompts=build/half/prompts.jsonl",
    "data.max_prompt_tokens=128",
    "rollout.prompts_per_step=8",
    "rollout.max_response_tokens=64",
    "algorithm.num_epochs=1",
    "actor.model=build/half/policy",
    "reward.model=build/half/reward",
)
"""What of the review config another model changes."""


RATES = (3.4e-5, 1e-6)
"""Learning rates at which the moves of an update are compared."""


@dataclass(frozen=True)
class Moves:
    """Part of the weights that one update moves: of float32 weights, of bfloat16 weights' masters, of bfloat16 weights.

    And the cosine of the first two moves.
    """

    learning_rate: float
    float32: float
    masters: float
    bfloat16: float
    cosine: float


@dataclass
class Result:
    """Of one model: by type, tokens generated a second and seconds of an update, a figure a round."""

    name: str
    prompts: int
    tokens: int
    rates: dict[str, list[float]] = field(default_factory=lambda: {dtype: [] for dtype in DTYPES})
    updates: dict[str, list[float]] = field(default_factory=lambda: {dtype: [] for dtype in DTYPES})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("precision", __doc__)
    add_shared(parser, "build/precision", rounds=5, threads=True)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    where = machine.describe()
    try:
        results = [
            measure("reviews", (), 64, 48, False, options.rounds),
            measure("Qwen2 0.5B, 4 layers", HALF, 16, 32, True, options.rounds),
        ]
        actual = [moves(rate) for rate in RATES]
    except QuartetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    peaks = {dtype: matmul_peak("cpu", dtype) for dtype in DTYPES}
    options.folder.mkdir(parents=True, exist_ok=True)
    report = {
        "machine": where,
        "peaks": peaks,
        "results": [asdict(result) for result in results],
        "moves": [asdict(one) for one in actual],
    }
    (options.folder / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    text = table(results, actual, peaks, options.threads, where)
    print(text)
    page.write(page_of(parser, options), "precision", text)
    return 0


def measure(name: str, overrides: Sequence[str], prompts: int, tokens: int, full: bool, rounds: int) -> Result:
    """Both types in turn, after a round that is not counted. ``full``: experience as long as the config allows."""
    sides = {
        dtype: _Side(load_config(REVIEWS, [*overrides, f"actor.dtype={dtype}"]), prompts, full) for dtype in DTYPES
    }
    result = Result(name, prompts, tokens)
    for number in range(rounds + 1):
        for dtype, side in sides.items():
            rate, seconds = side.rate(tokens, number), side.seconds()
            if number:
                result.rates[dtype].append(rate)
                result.updates[dtype].append(seconds)
    return result


class _Side:
    """The policy in one type: one to generate with, and an update of another."""

    def __init__(self, config: Config, prompts: int, full: bool) -> None:
        model, tokenizer = load_causal_lm(config.actor.model, config.actor.dtype), load_tokenizer(config.actor.model)
        stops = stop_token_ids(model, tokenizer)
        result = read_prompts(Path(config.data.prompts), tokenizer, model, stops, prompts)
        self._requests = [GenerationRequest(TrajectoryId("r", 1, index, 0), ids) for index, ids in enumerate(result)]
        self._engine = TorchEngine(model, stops, prompts)
        self._work: Work = of_policy(config, "cpu", full)

    def rate(self, tokens: int, seed: int) -> float:
        start = time.perf_counter()
        made = self._engine.generate(self._requests, SamplingParameters(tokens, ignore_eos=True), seed, 0)
        return sum(len(trajectory.response_ids) for trajectory in made) / (time.perf_counter() - start)

    def seconds(self) -> float:
        start = time.perf_counter()
        self._work.take()
        return time.perf_counter() - start


def moves(rate: float) -> Moves:
    """One update of the review policy in each type, from the same weights as far as it can hold them."""
    (wide, _), (masters, parameter_of_master) = (_moves(dtype, rate) for dtype in DTYPES)
    parts = (float((move != 0).double().mean()) for move in (wide, masters, parameter_of_master))
    return Moves(rate, *parts, float(torch.cosine_similarity(wide, masters, dim=0)))


def _moves(dtype: str, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Of what the steps are taken in, and of the same weights as the model has them."""
    work = of_policy(load_config(REVIEWS, [f"actor.dtype={dtype}", f"actor.learning_rate={rate}"]), "cpu", False)
    weights = work.optimizer.stepped_parameters()
    seen = [work.optimizer.parameter_of_master.get(weight, weight) for weight in weights]
    before = _flat(weights), _flat(seen)
    work.take()
    return _flat(weights) - before[0], _flat(seen) - before[1]


def _flat(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([weight.detach().double().flatten() for weight in weights])


def table(results: Sequence[Result], actual: Sequence[Moves], peaks: dict[str, float], threads: int, where: str) -> str:
    """Return what the page says: medians over the rounds, and how many times as fast bfloat16 is."""
    wide, narrow = DTYPES
    lines = [
        f"{where}. {threads} CPU threads; matmul peak {peaks[wide] / 1e9:.0f} GFLOP/s in {wide}, {peaks[narrow] / 1e9:.0f} in "
        f"{narrow}. Medians, and of the ratios the least and the most; above 1 bfloat16 is the faster.",
        "",
        f"| model | what | {wide} | {narrow} | times |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        rates = result.rates
        ratios = [half / whole for whole, half in zip(rates[wide], rates[narrow], strict=True)]
        what = f"generation, {result.prompts} x {result.tokens} tokens, tokens/s"
        lines.append(_row(result.name, what, rates, ratios, 0))
        updates = result.updates
        ratios = [whole / half for whole, half in zip(updates[wide], updates[narrow], strict=True)]
        lines.append(_row(result.name, "update, seconds", updates, ratios, 2))
    lines += [
        "",
        f"| learning rate, one update of the review policy | weights that move, {wide} | {narrow}, masters | their rounding | "
        "cosine of the first two moves |",
        "|---|---|---|---|---|",
    ]
    for one in actual:
        parts = " | ".join(f"{100 * part:.1f} %" for part in (one.float32, one.masters, one.bfloat16))
        lines.append(f"| {one.learning_rate:g} | {parts} | {one.cosine:.2f} |")
    return "\n".join(lines)


def _row(name: str, what: str, results: dict[str, list[float]], ratios: list[float], digits: int) -> str:
    cells = " | ".join(f"{statistics.median(results[dtype]):.{digits}f}" for dtype in DTYPES)
    return (
        f"| {name} | {what} | {cells} | **{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f}) |"
    )


if __name__ == "__main__":
    sys.exit(main())
