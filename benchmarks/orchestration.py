"""Overhead of the orchestrator per step: wall time over the critical path, with simulated model services.

The services sleep for a stated time per token (`benchmarks/simulated.py`). gRPC, the embedded Redis, and the orchestrator with
its files are real. All replicas of reward and reference together have the same throughput in every case, so more replicas stand
for larger models. The critical path is the duration of a step in which only the services take time: generation, scoring as soon
as a batch is complete and a replica is free, and the update. Writes the results below build/ and the table into
docs/evidence/performance.md. The exit status is 1 if a step at 1 or 64 replicas takes more than LIMIT times the critical path.
"""

from __future__ import annotations

import heapq
import json
import resource
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks import machine
from benchmarks.options import add_shared, parser_of, positive, publish
from benchmarks.simulated import VOCABULARY, Times, replicas, response_lengths
from quartet.buffer.embedded_redis import EmbeddedRedis
from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.contract.control import Alert
from quartet.contract.random_streams import prompt_order
from quartet.contract.status import Role
from quartet.errors import QuartetError
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.control.progress import ProgressBoard
from quartet.services.orchestrator.control.run_control import RunControl
from quartet.services.orchestrator.training_run import TrainingRun
from quartet.telemetry.logs import configure_logs

LIMIT = 1.05
"""Maximum wall time over the critical path."""
LIMITED = (1, 64)
"""Numbers of replicas to which the limit applies."""
REPLICAS = (1, 8, 64, 256)
GENERATORS = (256,)
"""Numbers of generators, with the largest step of TOKENS."""
TOKENS = (100_000, 1_000_000, 10_000_000)
"""Approximate response tokens per step, with 64 replicas."""
USUAL = 1_000_000
"""Approximate response tokens per step, for every number of replicas."""
PROMPT, MAX_RESPONSE = 100, 1_600
"""Tokens of each prompt, and of the longest response. The mean response has 1,000."""
SCORE_BATCH = 4
STEPS = 3
"""Steps per run. The first is left out, except in runs with more than USUAL tokens per step, which have one step."""
SEED = 0
STATED = Times(generate=10e-6, score=8e-6, values=8e-6, update=5e-6)
"""Seconds per token; ``score`` is for all replicas together."""


@dataclass(frozen=True)
class Case:
    """Number of replicas of reward and reference, size of a step, and number of generators; 0 if the actor generates."""

    replicas: int
    trajectories: int
    generators: int = 0

    @property
    def times(self) -> Times:
        """Return the seconds per token of each service. All generators together are as fast as the actor."""
        generate = STATED.generate * max(1, self.generators)
        return Times(generate, STATED.score * self.replicas, STATED.values, STATED.update)


@dataclass(frozen=True)
class Step:
    """Seconds from one commit to the next; ``cpu`` is the CPU time of the orchestrator."""

    wall: float
    critical: float
    cpu: float
    tokens: int

    @property
    def ratio(self) -> float:
        """Return the wall time over the critical path."""
        return self.wall / self.critical


@dataclass(frozen=True)
class Result:
    """The measured steps of one case, and the peak memory of the orchestrator in bytes."""

    case: Case
    steps: list[Step]
    memory: int

    @property
    def best(self) -> Step:
        """Return the step with the lowest ratio, which other work on the machine delayed the least."""
        return min(self.steps, key=lambda step: step.ratio)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("orchestration", __doc__)
    parser.add_argument("--replicas", type=positive, nargs="*", default=REPLICAS)
    parser.add_argument(
        "--tokens", type=positive, nargs="*", default=TOKENS, help="response tokens per step, with 64 replicas"
    )
    parser.add_argument(
        "--generators", type=positive, nargs="*", default=GENERATORS, help="numbers of generators, with 64 replicas"
    )
    parser.add_argument("--steps", type=positive, default=STEPS)
    add_shared(parser, "build/orchestration")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # As in the orchestrator.
    host = machine.describe()
    cases = [Case(count, USUAL // 1_000) for count in options.replicas]
    cases += [Case(64, tokens // 1_000) for tokens in options.tokens if tokens != USUAL or 64 not in options.replicas]
    cases += [Case(64, max(options.tokens, default=USUAL) // 1_000, count) for count in options.generators]
    results = []
    options.folder.mkdir(parents=True, exist_ok=True)
    configure_logs("orchestrator")
    try:
        for case in sorted(cases, key=lambda case: case.trajectories):
            steps = options.steps if case.trajectories * 1_000 <= USUAL else 1
            results.append(measure(case, steps, options.folder))
            print(results[-1].case, [f"{step.ratio:.3f}" for step in results[-1].steps], flush=True)
    except QuartetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = {"machine": host, "stated": asdict(STATED), "results": [asdict(result) for result in results]}
    publish(parser, options, report, table(results, host))
    limited = [result for result in results if result.case.replicas in LIMITED or result.case.generators]
    return 0 if all(result.best.ratio <= LIMIT for result in limited) else 1


def critical_path(
    lengths: Sequence[int], prompt: int, batch: int, count: int, times: Times, owners: Sequence[int] = ()
) -> float:
    """Return the seconds of a step in which only the services take time.

    ``lengths``: lengths of the responses in the order of their ids. ``owners``: the generator of each one; by default there is
    one. Each generator finishes its responses in this order. A batch has neighbours, and is scored when all of them are finished,
    by the replica that is free first. Reward and reference have ``count`` replicas each, the critic has one. The updates follow
    the last score.
    """
    tokens: Counter[int] = Counter()
    finished = []
    for index, length in enumerate(lengths):
        owner = owners[index] if owners else 0
        tokens[owner] += length
        finished.append(tokens[owner] * times.generate)
    batches = [range(first, min(first + batch, len(lengths))) for first in range(0, len(lengths), batch)]
    arrivals = sorted(
        (max(finished[index] for index in indices), sum(prompt + lengths[index] for index in indices))
        for indices in batches
    )
    scored = max(_last_end(arrivals, times.score, count), _last_end(arrivals, times.values, 1))
    return scored + tokens.total() * times.update


def _last_end(arrivals: Sequence[tuple[float, int]], seconds: float, count: int) -> float:
    """Return the time at which the last batch is scored. ``arrivals``: time and number of tokens of each batch."""
    free = [0.0] * count
    for arrival, tokens in arrivals:
        heapq.heappush(free, max(arrival, heapq.heappop(free)) + tokens * seconds)
    return max(free)


class Clock:
    """Board observer that reads wall and CPU time before the first step and at every commit."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def record(self) -> None:
        """Record wall time and CPU time."""
        self.times.append((time.perf_counter(), time.process_time()))

    def step(self, metrics: dict[str, float]) -> None:
        """Record the time of a committed step."""
        self.record()

    def alert(self, alert: Alert) -> None:
        """Ignore alerts."""


def measure(case: Case, steps: int, folder: Path) -> Result:
    """Run ``steps`` steps of a case. Raises the error of the run if it fails."""
    rollout = {"prompts_per_step": case.trajectories}
    times = train(rollout, steps, case.trajectories, case.replicas, case.generators, case.times, folder)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    measured = [_step(case, number, *pair) for number, pair in enumerate(pairwise(times), 1)]
    return Result(case, measured[1:] or measured, memory)


def train(
    rollout: Mapping[str, Any],
    steps: int,
    prompts: int,
    num_replicas: int,
    num_generators: int,
    times: Times,
    folder: Path,
    activity: Path | None = None,
    evaluation: Mapping[str, Any] | None = None,
) -> list[tuple[float, float]]:
    """Run ``steps`` steps with simulated services. Return wall and CPU time before the first step and at every commit.

    ``rollout``: settings of the section besides the shared ones. ``prompts``: number of prompts in the prompts file.
    ``num_replicas``: replicas of reward and of reference. ``activity``: see ``SimulatedModel``. ``evaluation``: settings of the
    section; its prompts are the first of the prompts file. Raises the error of the run if it fails.
    """
    root = prompts_of(folder).parent
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedRedis(root / "redis", root / "redis.log"))
        counts = {Role.ACTOR: 1, Role.CRITIC: 1, Role.REWARD: num_replicas, Role.REFERENCE: num_replicas}
        generators: list[str] = []
        if num_generators:
            running = replicas(Role.GENERATOR, num_generators, times, server.url, activity)
            generators = stack.enter_context(running)
        addresses = {
            role: stack.enter_context(replicas(role, count, times, server.url, activity))
            for role, count in counts.items()
        }
        config = addressed(_config(rollout, steps, prompts, root, server.url, generators, evaluation or {}), addresses)
        files = RunFiles(config.run_directory)
        files.write_config(config.to_yaml())
        board, clock = ProgressBoard(config.run.name, steps), Clock()
        board.observer = clock
        TrainingRun(config, server.url, board, RunControl(files, persist=False), clock.record).run()
    shutil.rmtree(root)
    return clock.times


def prompts_of(folder: Path) -> Path:
    """Return the prompts file of a run in ``folder``."""
    return folder / "run" / "prompts.jsonl"


def _step(case: Case, number: int, before: tuple[float, float], after: tuple[float, float]) -> Step:
    order = prompt_order(SEED, number - 1, case.trajectories).tolist()
    lengths = response_lengths(sorted(order), MAX_RESPONSE)
    # The prompts of a step go to the generators in turn, see ``split_by_rule``.
    turn = {prompt: index % max(1, case.generators) for index, prompt in enumerate(order)}
    owners = [turn[prompt] for prompt in sorted(order)]
    critical = critical_path(lengths, PROMPT, SCORE_BATCH, case.replicas, case.times, owners)
    return Step(after[0] - before[0], critical, after[1] - before[1], sum(lengths))


def _config(
    rollout: Mapping[str, Any],
    steps: int,
    prompts: int,
    root: Path,
    url: str,
    generators: Sequence[str],
    evaluation: Mapping[str, Any],
) -> Config:
    path = prompts_of(root.parent)
    line = json.dumps({"token_ids": list(range(PROMPT))}) + "\n"
    path.write_text(line * prompts)
    _tokenizer().save_pretrained(root / "policy")
    hour = 3600.0
    return parse_config(
        {
            "run": {"name": "orchestration", "steps": steps, "directory": str(root), "seed": SEED},
            "data": {
                "prompts": str(path),
                "max_prompt_tokens": PROMPT,
                "validation": str(path) if evaluation else None,
            },
            "rollout": {"max_response_tokens": MAX_RESPONSE, "score_batch_size": SCORE_BATCH, **rollout},
            "actor": {"model": str(root / "policy")},
            "reward": {"model": "simulated"},
            "checkpoint": {"every_steps": 0},
            "buffer": {"url": url},
            "services": {"generators": list(generators)},
            "evaluation": dict(evaluation),
            "timeouts": {"generate_seconds": hour, "score_seconds": hour, "update_seconds": hour},
        },
        "benchmarks.orchestration",
    )


def addressed(config: Config, addresses: Mapping[Role, Sequence[str]]) -> Config:
    """Return the config with the addresses of the services."""
    services = config.services
    for role, replica_addresses in addresses.items():
        service = getattr(services, role).model_copy(update={"address": tuple(replica_addresses)})
        services = services.model_copy(update={role: service})
    return config.model_copy(update={"services": services})


def _tokenizer() -> Any:
    """Return a tokenizer of VOCABULARY tokens with one to three letters, as large as that of a real model."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = islice(chain(letters, (a + b + c for a in letters for b in letters for c in letters)), VOCABULARY)
    backend = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)  # type: ignore[no-untyped-call]


def table(results: Sequence[Result], host: str) -> str:
    """Return the table for the page, with the best step of each case."""
    stated = {name: f"{1e6 * seconds:g} µs" for name, seconds in asdict(STATED).items()}
    lines = [
        f"{host}; the services run on it, too. Stated times: generation {stated['generate']} per response token, reward and "
        f"reference {stated['score']} per token for all replicas together, the critic {stated['values']} per token, each update "
        f"{stated['update']} per response token. Responses have {MAX_RESPONSE // 4} to {MAX_RESPONSE:,} tokens and are scored in "
        f"batches of {SCORE_BATCH}. Each row shows the best step of a run after its first, and the ratio of the worst one in "
        f"brackets. Runs with more than {USUAL:,} tokens per step have one step, whose commit does not overlap with the next "
        f"generation. At 1 and 64 replicas, and with generators, at most {LIMIT:g} times the critical path is allowed.",
        "",
        "| replicas | generators | response tokens | trajectories | critical path, s | wall, s | wall / critical path "
        "| overhead, s | orchestrator CPU s per 1,000 trajectories | memory, MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        case, step = result.case, result.best
        worst = max(each.ratio for each in result.steps)
        cpu = 1000 * step.cpu / case.trajectories
        lines.append(
            f"| {case.replicas} | {case.generators or 'actor'} | {step.tokens:,} | {case.trajectories:,} "
            f"| {step.critical:.2f} | {step.wall:.2f} "
            f"| **{step.ratio:.3f}** ({worst:.3f}) | {step.wall - step.critical:.2f} | {cpu:.2f} | {result.memory / 2**20:,.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
