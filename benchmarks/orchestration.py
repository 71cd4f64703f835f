"""What the orchestrator adds to a step: its wall time over the critical path of model services that only sleep.

`make orchestration`, or python -m benchmarks.orchestration. A simulated cluster: the services take a stated time for each token
(`benchmarks/simulated.py`), everything else is real: gRPC, the embedded Redis, the orchestrator with all that it writes down. The
replicas of reward and reference are as fast together as one alone would have to be, so a larger cluster stands for larger models.
The critical path is the step's time if nothing but the services took any: generation, scoring as soon as a batch is complete and
a replica is free, update. Writes the results below build/, the table into docs/performance.md. Exits 1 when the orchestrator
adds more than it should.
"""

from __future__ import annotations

import heapq
import json
import resource
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks import machine, page
from benchmarks.options import add_shared, page_of, parser_of, positive
from benchmarks.simulated import VOCABULARY, Times, replicas, response_lengths
from quartet.buffer.embedded_redis import EmbeddedRedis
from quartet.config import Config, parse_config
from quartet.errors import QuartetError
from quartet.random_streams import prompt_order
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.control.progress import ProgressBoard
from quartet.services.orchestrator.control.run_control import RunControl
from quartet.services.orchestrator.run import TrainingRun
from quartet.telemetry.logs import configure_logs
from quartet.types import Alert, Role

LIMIT = 1.05
"""Of the critical path, at 1 and 64 replicas."""
LIMITED = (1, 64)
REPLICAS = (1, 8, 64, 256)
TOKENS = (100_000, 1_000_000, 10_000_000)
"""Response tokens of a step, about: those of the growth curve."""
USUAL = 1_000_000
PROMPT, LONGEST = 100, 1_600
"""Tokens of each prompt, and of the longest response; the mean is 1,000."""
SCORE_BATCH = 4
STEPS = 3
"""Of a run. The first is left out; a run of larger steps than usual has that one alone, with a commit that nothing hides."""
SEED = 0
STATED = Times(generate=10e-6, score=8e-6, values=8e-6, update=5e-6)
"""``score`` is of all replicas together."""


@dataclass(frozen=True)
class Case:
    """A cluster and a step on it."""

    replicas: int
    trajectories: int

    @property
    def times(self) -> Times:
        """Of each service."""
        return Times(STATED.generate, STATED.score * self.replicas, STATED.values, STATED.update)


@dataclass(frozen=True)
class Step:
    """Seconds from one commit to the next; ``cpu`` is the orchestrator's own processor time."""

    wall: float
    critical: float
    cpu: float
    tokens: int

    @property
    def ratio(self) -> float:
        """Wall time over the critical path."""
        return self.wall / self.critical


@dataclass(frozen=True)
class Result:
    """The steps of one case after the first, or that one alone, and the most memory that the orchestrator has had, in bytes."""

    case: Case
    steps: list[Step]
    memory: int

    @property
    def best(self) -> Step:
        """The step that other work on the machine held up the least."""
        return min(self.steps, key=lambda step: step.ratio)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("orchestration", __doc__)
    parser.add_argument("--replicas", type=positive, nargs="*", default=REPLICAS)
    parser.add_argument(
        "--tokens", type=positive, nargs="*", default=TOKENS, help="of the growth curve, with 64 replicas"
    )
    parser.add_argument("--steps", type=positive, default=STEPS)
    add_shared(parser, "build/orchestration")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # As the orchestrator has it.
    where = machine.describe()
    cases = [Case(count, USUAL // 1_000) for count in options.replicas]
    cases += [Case(64, tokens // 1_000) for tokens in options.tokens if tokens != USUAL or 64 not in options.replicas]
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
    report = {"machine": where, "stated": asdict(STATED), "results": [asdict(result) for result in results]}
    (options.folder / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    text = table(results, where)
    print(text)
    page.write(page_of(parser, options), "orchestration", text)
    limited = [result for result in results if result.case.replicas in LIMITED]
    return 0 if all(result.best.ratio <= LIMIT for result in limited) else 1


def critical_path(lengths: Sequence[int], prompt: int, batch: int, count: int, times: Times) -> float:
    """Seconds of a step in which nothing takes time but the services.

    ``lengths`` of the responses in the order in which they finish. Batches are scored in that order, each by the replica that is
    free first; reward and reference have ``count`` each, the critic is one. The updates come after the last score.
    """
    finished, total = [], 0
    for length in lengths:
        total += length
        finished.append(total * times.generate)
    batches = [range(first, min(first + batch, len(lengths))) for first in range(0, len(lengths), batch)]
    arrivals = [(finished[places[-1]], sum(prompt + lengths[place] for place in places)) for places in batches]
    scored = max(_last_end(arrivals, times.score, count), _last_end(arrivals, times.values, 1))
    return scored + total * times.update


def _last_end(arrivals: Sequence[tuple[float, int]], seconds: float, count: int) -> float:
    """Return when the last of (when it comes, tokens) is through."""
    free = [0.0] * count
    for arrival, tokens in arrivals:
        heapq.heappush(free, max(arrival, heapq.heappop(free)) + tokens * seconds)
    return max(free)


class Clock:
    """Read the clocks before the first step and at every commit."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def look(self) -> None:
        """Notes wall and processor time."""
        self.times.append((time.perf_counter(), time.process_time()))

    def step(self, metrics: dict[str, float]) -> None:
        """A step was committed."""
        self.look()

    def alert(self, alert: Alert) -> None:
        """Return what the guards think of it does not matter."""


def measure(case: Case, steps: int, folder: Path) -> Result:
    """Run so many steps. Raises what the run fails with."""
    root = folder / "run"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedRedis(root / "redis", root / "redis.log"))
        counts = {Role.ACTOR: 1, Role.CRITIC: 1, Role.REWARD: case.replicas, Role.REFERENCE: case.replicas}
        addresses = {
            role: stack.enter_context(replicas(role, count, case.times, server.url)) for role, count in counts.items()
        }
        config = addressed(_config(case, steps, root, server.url), addresses)
        files = RunFiles(config.run_directory)
        files.write_config(config.to_yaml())
        board, clock = ProgressBoard(config.run.name, steps), Clock()
        board.observer = clock
        TrainingRun(config, server.url, board, RunControl(files, persist=False), clock.look).run()
    shutil.rmtree(root)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pairs = zip(clock.times, clock.times[1:], strict=False)
    actual = [_step(case, number, *pair) for number, pair in enumerate(pairs, 1)]
    return Result(case, actual[1:] or actual, memory)


def _step(case: Case, number: int, before: tuple[float, float], after: tuple[float, float]) -> Step:
    lengths = response_lengths(prompt_order(SEED, number - 1, case.trajectories), LONGEST)
    critical = critical_path(lengths, PROMPT, SCORE_BATCH, case.replicas, case.times)
    return Step(after[0] - before[0], critical, after[1] - before[1], sum(lengths))


def _config(case: Case, steps: int, root: Path, url: str) -> Config:
    prompts = root / "prompts.jsonl"
    line = json.dumps({"token_ids": list(range(PROMPT))}) + "\n"
    prompts.write_text(line * case.trajectories)
    _tokenizer().save_pretrained(root / "policy")
    hour = 3600.0
    return parse_config(
        {
            "run": {"name": "orchestration", "steps": steps, "directory": str(root), "seed": SEED},
            "data": {"prompts": str(prompts), "max_prompt_tokens": PROMPT},
            "rollout": {
                "prompts_per_step": case.trajectories,
                "max_response_tokens": LONGEST,
                "score_batch_size": SCORE_BATCH,
            },
            "actor": {"model": str(root / "policy")},
            "reward": {"model": "simulated"},
            "checkpoint": {"every_steps": 0},
            "buffer": {"url": url},
            "timeouts": {"generate_seconds": hour, "score_seconds": hour, "update_seconds": hour},
        },
        "benchmarks.orchestration",
    )


def addressed(config: Config, addresses: Mapping[Role, Sequence[str]]) -> Config:
    """The config with the addresses of the services. Several are as a name that stands for them all."""
    services = config.services
    for role, places in addresses.items():
        address = places[0] if len(places) == 1 else f"ipv4:{','.join(places)}"
        service = getattr(services, role).model_copy(update={"address": address})
        services = services.model_copy(update={role: service})
    return config.model_copy(update={"services": services})


def _tokenizer() -> Any:
    """Of VOCABULARY tokens, each of one to three letters: a model's is as large."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = islice(chain(letters, (a + b + c for a in letters for b in letters for c in letters)), VOCABULARY)
    backend = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)  # type: ignore[no-untyped-call]


def table(results: Sequence[Result], where: str) -> str:
    """Return what the page says: of each case its best step."""
    stated = {name: f"{1e6 * seconds:g} µs" for name, seconds in asdict(STATED).items()}
    lines = [
        f"{where}; the services are on it, too. Stated times: generation {stated['generate']} a response token, reward and "
        f"reference {stated['score']} a token with all replicas together, the critic {stated['values']} a token, each update "
        f"{stated['update']} a response token. Responses of {LONGEST // 4} to {LONGEST:,} tokens, scored by {SCORE_BATCH}. The "
        f"best step of each run after its first, in brackets the worst; above {USUAL:,} tokens the first, with its commit, which "
        f"others have beside the next generation. At most {LIMIT:g} times the critical path is allowed at 1 and 64 replicas.",
        "",
        "| replicas | response tokens | trajectories | critical path, s | wall, s | times | added, s "
        "| own CPU s per 1,000 trajectories | memory, MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        case, step = result.case, result.best
        worst = max(each.ratio for each in result.steps)
        own = 1000 * step.cpu / case.trajectories
        lines.append(
            f"| {case.replicas} | {step.tokens:,} | {case.trajectories:,} | {step.critical:.2f} | {step.wall:.2f} "
            f"| **{step.ratio:.3f}** ({worst:.3f}) | {step.wall - step.critical:.2f} | {own:.2f} | {result.memory / 2**20:,.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
