"""Duration of updates with packed and padded sequences, and their share of the measured matmul peak (MFU).

Updates a model in one process on the experience of one step: random tokens, with geometrically distributed response lengths.
Packed and padded updates alternate. The FLOP count is 6 per weight and token, without padding and attention, as usual in the
literature. Writes the results below build/ and the table into docs/evidence/performance.md. If the config puts the actor on a GPU
(configs/gpu), measures that GPU and only prints the table.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks import machine, page
from benchmarks.options import add_shared, page_of, parser_of
from quartet.config.loading import load_config
from quartet.config.root import Config
from quartet.contract.trajectory import TokenBatch
from quartet.contract.update import Experience
from quartet.errors import QuartetError
from quartet.models.forward.model_capabilities import vocabulary_size
from quartet.models.forward.scoring import response_log_probs
from quartet.models.matmul_peak import matmul_peak
from quartet.models.torch_settings import deterministic_update
from quartet.models.training.compiled_layers import compiled_layers
from quartet.models.training.optimizer import MasterWeightAdamW, create_optimizer
from quartet.models.training.updates import update_policy, update_value
from quartet.models.weights.loading import load_causal_lm, load_critic
from quartet.models.workers import shares
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.algorithm.update_request import optimization_at, policy_loss_of, value_loss_of

STEP = 1


@dataclass(frozen=True)
class Result:
    """Seconds per update of one model, with an item per round."""

    name: str
    tokens: int
    response_tokens: int
    flops: float
    """FLOPs of one update, without padding."""
    packed: list[float]
    padded: list[float]

    def rate(self) -> float:
        """Return the FLOP/s of the median packed update."""
        return self.flops / statistics.median(self.packed)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("update", __doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/reviews/ppo.yaml"))
    parser.add_argument(
        "--full", action="store_true", help="use the maximum length of the config for every prompt and response"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting, for example actor.micro_batch_tokens=4096",
    )
    parser.add_argument(
        "--run",
        type=Path,
        metavar="DIRECTORY",
        help="a run with the same config: print its MFU beside that of the benchmark",
    )
    add_shared(parser, "build/update", rounds=5, threads=True)
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.config, options.set)
        device = machine.device_of(config, options.config)
        machine.set_up(device, options.threads)
        host = machine.describe(device)
        peak = matmul_peak(device, config.actor.dtype, options.threads)
        updates = {"policy": policy_update_of, "critic": critic_update_of}
        results = [
            update_of(config, device, options.full).timed(name, device, options.rounds)
            for name, update_of in updates.items()
        ]
    except QuartetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    report = {"machine": host, "peak": peak, "results": [asdict(result) for result in results]}
    (options.folder / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    text = table(results, peak, config.actor.dtype, options.threads, host)
    print(text)
    if options.run is not None:
        print("\n".join(beside(results, peak, metrics_of(options.run))))
    if device == "cpu":
        page.write(page_of(parser, options), "update", text)
    return 0


def make_experience(config: Config, model: Any, full: bool = False) -> Experience:
    """Return the experience of a step with random tokens: prompts of 5 to 12, responses that end at each with probability 1/20.

    The samples of a prompt share it. ``full``: prompts and responses have the maximum length of the config.
    """
    generator = np.random.default_rng(0)
    rollout = config.rollout
    count = rollout.prompts_per_step * rollout.samples_per_prompt
    prompts = np.repeat(generator.integers(5, 13, rollout.prompts_per_step), rollout.samples_per_prompt).astype(
        np.int32
    )
    responses = np.minimum(generator.geometric(1 / 20, count), rollout.max_response_tokens).astype(np.int32)
    if full:
        prompts, responses = (
            np.full(count, n, np.int32) for n in (config.data.max_prompt_tokens, rollout.max_response_tokens)
        )
    top, tokens = vocabulary_size(model), int(responses.sum())
    prompt_ids = [generator.integers(3, top, size) for size in prompts[:: rollout.samples_per_prompt]]
    response_ids = np.split(generator.integers(3, top, tokens), np.cumsum(responses)[:-1])
    pairs = [(prompt_ids[index // rollout.samples_per_prompt], ids) for index, ids in enumerate(response_ids)]
    ids = np.concatenate([part for pair in pairs for part in pair]).astype(np.int32)

    def random_values() -> np.ndarray[Any, np.dtype[np.float32]]:
        return generator.normal(size=tokens).astype(np.float32)

    batch = TokenBatch(ids, prompts, responses)
    log_probs = response_log_probs(model, batch, 1.0, 16384) if hasattr(model, "lm_head") else random_values()
    return Experience(
        run="benchmark",
        step=STEP,
        policy_version=0,
        ids=tuple(map(str, range(count))),
        batch=batch,
        scores=np.zeros(count, np.float32),
        log_probs=log_probs,
        reference_log_probs=log_probs,
        values=random_values(),
        advantages=random_values(),
        returns=random_values(),
        actor_mask=np.ones(tokens, np.float32),
    )


@dataclass(frozen=True)
class RepeatableUpdate:
    """An update that can be repeated, its optimizer and its experience."""

    optimizer: MasterWeightAdamW
    run: Callable[[], None]
    experience: Experience
    flops: float

    def timed(self, name: str, device: str, rounds: int) -> Result:
        """Measure packed and padded updates alternately, after a warm-up round."""
        tokens, responses = len(self.experience.batch.token_ids), len(self.experience.advantages)
        return Result(name, tokens, responses, self.flops, *_timed(self.run, device, rounds))


def policy_update_of(config: Config, device: str, full: bool) -> RepeatableUpdate:
    """Return the update of the policy of the config."""
    model = load_causal_lm(config.actor.model, config.actor.dtype, device)
    optimizer = create_optimizer(model, config.actor.learning_rate)
    experience = make_experience(config, model, full)
    settings = optimization_at(config, config.actor, STEP)
    loss = policy_loss_of(config.algorithm, config.rollout)
    head = model.get_output_embeddings().weight.numel()
    body = _weights(model.base_model)

    def update() -> None:
        deterministic = deterministic_update(device, "actor", config.actor.deterministic_updates)
        with compiled_layers(model, config.actor.compile), deterministic:
            update_policy(model, optimizer, experience, settings, loss, config.actor.max_forward_tokens)

    multiplications = body * distinct_tokens(experience.batch, config) + head * len(experience.advantages)
    return RepeatableUpdate(optimizer, update, experience, 6.0 * settings.num_epochs * multiplications)


def critic_update_of(config: Config, device: str, full: bool) -> RepeatableUpdate:
    """Return the update of the value model."""
    model = load_critic(config.critic.model or str(config.reward.model), config.critic.dtype, device)
    optimizer = create_optimizer(model, config.critic.learning_rate)
    experience = make_experience(config, model, full)
    settings, loss = optimization_at(config, config.critic, STEP), value_loss_of(config.algorithm)

    def update() -> None:
        deterministic = deterministic_update(device, "critic", config.critic.deterministic_updates)
        with compiled_layers(model, config.critic.compile), deterministic:
            update_value(model, optimizer, experience, settings, loss, config.critic.max_forward_tokens)

    multiplications = _weights(model.backbone) * distinct_tokens(experience.batch, config)
    return RepeatableUpdate(optimizer, update, experience, 6.0 * settings.num_epochs * multiplications)


def distinct_tokens(batch: TokenBatch, config: Config) -> int:
    """Return the tokens that a model must compute: shared prompts once, and no last tokens, which predict nothing."""
    prompts = int(batch.prompt_lengths[:: config.rollout.samples_per_prompt].sum())
    return prompts + int(batch.response_lengths.sum()) - len(batch)


def _weights(backbone: Any) -> int:
    """Return the weights in matmuls: all matrices except the embedding, which is a lookup."""
    embedding = backbone.get_input_embeddings().weight
    return sum(p.numel() for p in backbone.parameters() if p.ndim > 1 and p is not embedding)


def _timed(update: Callable[[], None], device: str, rounds: int) -> tuple[list[float], list[float]]:
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds + 1):
        for packed in (True, False):
            with _packing(packed):
                start = time.perf_counter()
                update()
                machine.synchronize(device)
                if number:
                    seconds[packed].append(time.perf_counter() - start)
    return seconds[True], seconds[False]


@contextmanager
def _packing(packed: bool) -> Iterator[None]:
    if packed:
        yield
        return
    with mock.patch.object(shares, "supports_packing", return_value=False):
        yield


def metrics_of(run: Path) -> list[dict[str, float]]:
    """Return the metrics of each step of a run."""
    return [json.loads(line) for line in RunFiles(run).metrics.read_text(encoding="utf-8").splitlines()]


def beside(results: Sequence[Result], peak: float, steps: Sequence[dict[str, float]]) -> list[str]:
    """Return a line per model that compares the median MFU of a run's updates with that of the benchmark."""
    lines = []
    for result, role in zip(results, ("actor", "critic"), strict=True):
        of_run = statistics.median(step[f"mfu_{role}"] for step in steps)
        own = result.rate() / peak
        lines.append(
            f"{result.name}: MFU {own:.3f}, of the run {of_run:.3f}, which is {of_run / own:.2f} times as much"
        )
    return lines


def table(results: Sequence[Result], peak: float, dtype: str, threads: int, host: str) -> str:
    """Return the table for the page: medians over the rounds."""
    lines = [
        f"{host}. CPU threads: {threads}, {dtype}, matmul peak: {peak / 1e9:.0f} GFLOP/s. Medians; the speedup also has its "
        "range.",
        "",
        "| model | tokens | response tokens | seconds, padded | seconds, packed | speedup | MFU, packed |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        ratios = [padded / packed for padded, packed in zip(result.padded, result.packed, strict=True)]
        lines.append(
            f"| {result.name} | {result.tokens} | {result.response_tokens} | {statistics.median(result.padded):.3f} | "
            f"{statistics.median(result.packed):.3f} | **{statistics.median(ratios):.2f}** ({min(ratios):.2f} to "
            f"{max(ratios):.2f}) | {100 * result.rate() / peak:.0f} % |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
