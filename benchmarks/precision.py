"""bfloat16 compared with float32 on a CPU: tokens per second of the torch engine, and seconds per policy update.

Uses one thread, and alternates between the dtypes. The models are the review policy, and one with the shape of Qwen2 0.5B, 4 of
its 24 layers and random weights. A second table compares one update of float32 weights, of the float32 master weights of
bfloat16 weights, and of the bfloat16 weights. Writes the results below build/ and the tables into docs/evidence/performance.md.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks import machine, random_models
from benchmarks.generation import read_prompts
from benchmarks.options import add_shared, parser_of, publish
from benchmarks.update import RepeatableUpdate, policy_update_of
from quartet.config.loading import load_config
from quartet.config.root import Config
from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.trajectory import TrajectoryId
from quartet.errors import QuartetError
from quartet.models.generation.torch_engine import TorchEngine
from quartet.models.matmul_peak import matmul_peak
from quartet.models.weights.loading import load_causal_lm, stop_token_ids
from quartet.models.weights.tokenizer import load_tokenizer

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
"""Changes to the review config for the other model."""

RATES = (3.4e-5, 1e-6)
"""Learning rates at which the changes by an update are compared."""


@dataclass(frozen=True)
class WeightChanges:
    """Fractions of the weights that one update changes, and the cosine of two changes.

    ``master``: the float32 master weights of ``bfloat16``. ``cosine``: of the changes of ``float32`` and ``master``.
    """

    learning_rate: float
    float32: float
    master: float
    bfloat16: float
    cosine: float


@dataclass
class Result:
    """Generated tokens per second and seconds per update of one model: a list by dtype, with an item per round."""

    name: str
    prompts: int
    tokens: int
    rates: dict[str, list[float]] = field(default_factory=lambda: {dtype: [] for dtype in DTYPES})
    updates: dict[str, list[float]] = field(default_factory=lambda: {dtype: [] for dtype in DTYPES})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("precision", __doc__)
    add_shared(parser, "build/precision", rounds=5, threads=True)
    options = parser.parse_args(arguments)
    random_models.main(["build/half", "--layers", "4", "--dtype", "float32"])
    torch.set_num_threads(options.threads)
    host = machine.describe()
    try:
        results = [
            measure("reviews", (), 64, 48, False, options.rounds),
            measure("Qwen2 0.5B, 4 layers", HALF, 16, 32, True, options.rounds),
        ]
        changes = [weight_changes(rate) for rate in RATES]
    except QuartetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    peaks = {dtype: matmul_peak("cpu", dtype, options.threads) for dtype in DTYPES}
    report = {
        "machine": host,
        "peaks": peaks,
        "results": [asdict(result) for result in results],
        "weight_changes": [asdict(change) for change in changes],
    }
    publish(parser, options, report, table(results, changes, peaks, options.threads, host))
    return 0


def measure(name: str, overrides: Sequence[str], prompts: int, tokens: int, full: bool, rounds: int) -> Result:
    """Measure both dtypes in turn, after a warm-up round. ``full``: sequences have the maximum length of the config."""
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
    """The policy in one dtype: a model to generate with, and the update of another copy."""

    def __init__(self, config: Config, prompts: int, full: bool) -> None:
        model, tokenizer = load_causal_lm(config.actor.model, config.actor.dtype), load_tokenizer(config.actor.model)
        stops = stop_token_ids(model, tokenizer)
        prompt_ids = read_prompts(Path(config.data.prompts), tokenizer, model, stops, prompts)
        self._requests = [
            GenerationRequest(TrajectoryId("r", 1, index, 0), ids) for index, ids in enumerate(prompt_ids)
        ]
        self._engine = TorchEngine(model, stops, prompts)
        self._update: RepeatableUpdate = policy_update_of(config, "cpu", full)

    def rate(self, tokens: int, seed: int) -> float:
        start = time.perf_counter()
        trajectories = self._engine.trajectories(self._requests, SamplingParameters(tokens, ignore_eos=True), seed)
        return sum(len(trajectory.response_ids) for trajectory in trajectories) / (time.perf_counter() - start)

    def seconds(self) -> float:
        start = time.perf_counter()
        self._update.run()
        return time.perf_counter() - start


def weight_changes(rate: float) -> WeightChanges:
    """Take one update of the review policy in each dtype, from the same weights up to rounding."""
    (float32, _), (master, bfloat16) = (_changes(dtype, rate) for dtype in DTYPES)
    fractions = (float((change != 0).double().mean()) for change in (float32, master, bfloat16))
    return WeightChanges(rate, *fractions, float(torch.cosine_similarity(float32, master, dim=0)))


def _changes(dtype: str, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the changes of the weights that the optimizer updates, and of the model's parameters."""
    update = policy_update_of(
        load_config(REVIEWS, [f"actor.dtype={dtype}", f"actor.learning_rate={rate}"]), "cpu", False
    )
    weights = update.optimizer.stepped_parameters()
    parameters = [update.optimizer.parameter_of_master_weight.get(weight, weight) for weight in weights]
    before = _flat(weights), _flat(parameters)
    update.run()
    return _flat(weights) - before[0], _flat(parameters) - before[1]


def _flat(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([weight.detach().double().flatten() for weight in weights])


def table(
    results: Sequence[Result], changes: Sequence[WeightChanges], peaks: dict[str, float], threads: int, host: str
) -> str:
    """Return the tables for the page: medians over the rounds, and the speedup by bfloat16."""
    float32, bfloat16 = DTYPES
    lines = [
        f"{host}. CPU threads: {threads}. Matmul peak: {peaks[float32] / 1e9:.0f} GFLOP/s in {float32}, "
        f"{peaks[bfloat16] / 1e9:.0f} in {bfloat16}. Medians; the speedup by {bfloat16} also has its range.",
        "",
        f"| model | measurement | {float32} | {bfloat16} | speedup |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        rates = result.rates
        ratios = [half / full for full, half in zip(rates[float32], rates[bfloat16], strict=True)]
        what = f"generation, {result.prompts} x {result.tokens} tokens, tokens/s"
        lines.append(_row(result.name, what, rates, ratios, 0))
        updates = result.updates
        ratios = [full / half for full, half in zip(updates[float32], updates[bfloat16], strict=True)]
        lines.append(_row(result.name, "update, seconds", updates, ratios, 2))
    lines += [
        "",
        f"| learning rate, one update of the review policy | changed weights, {float32} | master weights | {bfloat16} | "
        f"cosine of the changes, {float32} and master weights |",
        "|---|---|---|---|---|",
    ]
    for change in changes:
        cells = " | ".join(f"{100 * part:.1f} %" for part in (change.float32, change.master, change.bfloat16))
        lines.append(f"| {change.learning_rate:g} | {cells} | {change.cosine:.2f} |")
    return "\n".join(lines)


def _row(name: str, what: str, results: dict[str, list[float]], ratios: list[float], digits: int) -> str:
    cells = " | ".join(f"{statistics.median(results[dtype]):.{digits}f}" for dtype in DTYPES)
    return (
        f"| {name} | {what} | {cells} | **{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f}) |"
    )


if __name__ == "__main__":
    sys.exit(main())
