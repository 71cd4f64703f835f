"""Duration of a policy update with each policy loss and each aggregation, beside the clipped loss of PPO.

Each variant updates the model on the experience of ``benchmarks.update``, with the defaults of the loss. Updates of the variant
and of PPO alternate in one process, and the ratio of each pair is taken, so that a change of the machine's speed affects both.
Writes the results below build/ and the table into docs/evidence/performance.md.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from benchmarks import machine, page
from benchmarks.options import add_shared, page_of, parser_of
from benchmarks.update import STEP, make_experience
from quartet.config.loading import load_config
from quartet.config.policy_losses import BUILT_IN_POLICY_LOSSES, Aggregation
from quartet.config.root import Config
from quartet.errors import QuartetError
from quartet.models.torch_settings import deterministic_update
from quartet.models.training.compiled_layers import compiled_layers
from quartet.models.training.optimizer import create_optimizer
from quartet.models.training.updates import update_policy
from quartet.models.weights.loading import load_causal_lm
from quartet.services.orchestrator.algorithm.update_request import optimization_at, policy_loss_of
from quartet.system.user_code import import_callable

LIMIT = 1.10
"""Largest ratio to PPO's update that the project accepts."""


@dataclass(frozen=True)
class Result:
    """Seconds of the updates with a variant and of the PPO updates beside them, with an item per round."""

    name: str
    ppo: list[float]
    variant: list[float]

    def ratios(self) -> list[float]:
        """Return the ratio of each pair."""
        return [variant / ppo for variant, ppo in zip(self.variant, self.ppo, strict=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("losses", __doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/reviews/ppo.yaml"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting")
    add_shared(parser, "build/losses", rounds=9, threads=True)
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.config, options.set)
        device = machine.device_of(config, options.config)
        machine.set_up(device, options.threads)
        results = measure(options.config, options.set, device, options.rounds)
    except QuartetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    host = machine.describe(device)
    options.folder.mkdir(parents=True, exist_ok=True)
    report = {"machine": host, "results": [asdict(result) for result in results]}
    (options.folder / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    text = table(results, config, options.threads, host)
    print(text)
    if device == "cpu":
        page.write(page_of(parser, options), "losses", text)
    return 0


def variants() -> dict[str, tuple[list[str], list[str]]]:
    """Return the settings of each variant by its name: those that PPO has beside it too, and those of the variant.

    Every loss, every aggregation of the clipped loss, and Clip-Cov with several micro-batches.
    """
    # REINFORCE has one advantage per response, which every loss accepts, and does not change the update.
    loss = {name: ["algorithm.estimator=reinforce", f"algorithm.policy_loss={name}"] for name in BUILT_IN_POLICY_LOSSES}
    losses: dict[str, tuple[list[str], list[str]]] = {f"`{name}`": ([], settings) for name, settings in loss.items()}
    aggregations: dict[str, tuple[list[str], list[str]]] = {
        f"`clipped`, `{name}`": ([], [f"algorithm.loss_aggregation={name}"]) for name in get_args(Aggregation)
    }
    small = ["actor.micro_batch_tokens=512"]
    return losses | aggregations | {"`clip_cov`, small micro-batches": (small, loss["clip_cov"])}


def measure(path: Path, settings: Sequence[str], device: str, rounds: int) -> list[Result]:
    """Measure each variant and PPO alternately, after a warm-up of both. Raises ConfigError, ModelError."""
    config = load_config(path, settings)
    model = load_causal_lm(config.actor.model, config.actor.dtype, device)
    optimizer = create_optimizer(model, config.actor.learning_rate)
    experience = make_experience(config, model)
    optimization = optimization_at(config, config.actor, STEP)

    def update_with(variant: Config) -> Callable[[], float]:
        spec, loss = variant.algorithm.policy_loss_spec, policy_loss_of(variant.algorithm, variant.rollout)
        function = import_callable(spec.function)
        select_tokens = import_callable(spec.select_tokens) if spec.select_tokens else None

        def update() -> float:
            deterministic = deterministic_update(device, "actor", config.actor.deterministic_updates)
            start = time.perf_counter()
            with compiled_layers(model, config.actor.compile), deterministic:
                update_policy(
                    model,
                    optimizer,
                    experience,
                    optimization,
                    loss,
                    variant.actor.max_forward_tokens,
                    function,
                    select_tokens=select_tokens,
                    needs_old_log_probs=spec.needs_old_log_probs,
                    uses_geometric_mean=spec.uses_geometric_mean,
                )
            machine.synchronize(device)
            return time.perf_counter() - start

        return update

    results = []
    for name, (shared, changes) in variants().items():
        ppo = update_with(load_config(path, [*settings, *shared]))
        variant = update_with(load_config(path, [*settings, *shared, *changes]))
        ppo(), variant()
        seconds = np.array([(ppo(), variant()) for _ in range(rounds)])
        results.append(Result(name, seconds[:, 0].tolist(), seconds[:, 1].tolist()))
    return results


def table(results: Sequence[Result], config: Config, threads: int, host: str) -> str:
    """Return the table for the page: medians over the rounds."""
    algorithm = config.algorithm
    lines = [
        f"{host}. CPU threads: {threads}, {algorithm.num_epochs} epochs, {algorithm.num_mini_batches} mini-batches. Medians of "
        f"{len(results[0].ppo)} pairs; the ratio also has its range. It is expected to be at most {LIMIT:.2f}.",
        "",
        "| loss | seconds, PPO | seconds | ratio |",
        "|---|---|---|---|",
    ]
    for result in results:
        ratios = result.ratios()
        lines.append(
            f"| {result.name} | {statistics.median(result.ppo):.3f} | {statistics.median(result.variant):.3f} | "
            f"**{statistics.median(ratios):.3f}** ({min(ratios):.2f} to {max(ratios):.2f}) |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
