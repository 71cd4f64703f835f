"""Tokens per second of 200 agents at once, with and without a slow one in ten, and what a step keeps if agents wait at random.

One run trains with an agent function. In every second step, one agent in ten waits in its tools. The rate counts the tokens of
all agents until the last one that is not slow has ended. Then runs with `rollout.extra_samples` are repeated, without waits and
with random ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.options import add_shared, parser_of, positive, publish
from quartet.system.child_processes import tied_to_parent

PAGE = Path("docs/evidence/openai-protocol.md")
SETTINGS = "AGENT_SESSIONS"
"""Environment variable of agents with the settings of a run, as JSON."""
AT_ONCE = 200
"""Agents that run at once."""
TURNS, TURN_TOKENS = 6, 12
SLOW_ONE_IN = 10
WAITS = (0.0, 0.1, 0.5)
"""Longest waits of the agents' tools, in seconds, of the runs that leave out episodes."""
KEPT, EXTRA, GROUPS, STEPS = 4, 4, 4, 3
"""Of these runs: samples that a step keeps of a prompt, further ones, prompts in a step, and steps."""


@dataclass(frozen=True)
class Answer:
    """One answer that an agent got. ``sent`` and ``received``: seconds of the monotonic clock, which all processes share."""

    step: int
    agent: int
    slow: bool
    sent: float
    received: float
    tokens: int


@dataclass(frozen=True)
class Load:
    """Answers of one step. ``seconds_per_turn``: median of the agents that are not slow."""

    slow: bool
    tokens_per_second: float
    seconds_per_turn: float
    agents_at_once: int


@cache
def client() -> Any:
    """Return the client that all agents of this process share."""
    import httpx2

    return httpx2.AsyncClient(timeout=None, limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None))


async def agent(fields: Mapping[str, Any], base_url: str, api_key: str, model: str, seed: int, session: str) -> float:
    """Take turns with the policy: the agent of all runs."""
    settings, draws = json.loads(os.environ[SETTINGS]), random.Random(seed)
    step = int(session.split("/")[1])
    slow = settings["wait"] > 0 and step % 2 == 0 and fields["number"] % SLOW_ONE_IN == 0
    messages = [{"role": "user", "content": fields["text"]}]
    for _ in range(draws.randint(1, TURNS) if settings["random_turns"] else TURNS):
        sent = time.monotonic()
        response = await client().post(
            f"{base_url}/chat/completions",
            json={"model": model, "messages": messages},
            headers={"authorization": f"Bearer {api_key}"},
        )
        answer = response.raise_for_status().json()
        with Path(settings["answers"], f"{os.getpid()}.jsonl").open("a") as file:
            line = Answer(step, fields["number"], slow, sent, time.monotonic(), answer["usage"]["completion_tokens"])
            file.write(json.dumps(asdict(line)) + "\n")
        messages += [answer["choices"][0]["message"], {"role": "user", "content": f" {draws.randrange(10)} "}]
        # Like a tool. Its time comes from the clock of the machine where it is random, and not from the seed.
        wait = random.SystemRandom().uniform(0, settings["random_wait"])
        await asyncio.sleep(settings["wait"] if slow else wait)
    return draws.random()


def train(folder: Path, name: str, steps: int, rollout: Mapping[str, Any], **settings: Any) -> Path:
    """Train a run with ``rollout`` and the ``settings`` of its agents. Return its directory."""
    # Loads torch, which the processes of agents do not need.
    from benchmarks.soak import RECIPE
    from quartet.demo.pretraining import Shape
    from quartet.demo.toy_task import make_toy_task

    shape = Shape(hidden=64, layers=2, heads=2, positions=256)
    toy_task = make_toy_task(folder / "toy-task", recipe=replace(RECIPE, shape=shape))
    template = folder / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    rows = ({"text": f"lunch {number}", "number": number} for number in range(rollout["prompts_per_step"]))
    prompts, answers = folder / f"{name}.jsonl", folder / f"{name}-answers"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers.mkdir(exist_ok=True)
    for path in answers.glob("*.jsonl"):
        path.unlink()
    config = {
        "run": {"name": name, "steps": steps, "directory": str(folder / "runs")},
        "data": {"prompts": str(prompts), "max_prompt_tokens": 24},
        "algorithm": {"estimator": "reinforce", "kl_coefficient": 0.0},
        "rollout": {
            "max_turns": TURNS,
            "max_turn_tokens": TURN_TOKENS,
            "max_response_tokens": 200,
            **rollout,
        },
        "environment": {
            "kind": "agent",
            "chat_template": str(template),
            "num_workers": 1,
            "agent": {
                "function": "benchmarks.agent_sessions:agent",
                "pass_variables": [SETTINGS],
                "max_concurrent": AT_ONCE,
            },
        },
        "actor": {"model": str(toy_task.policy), "learning_rate": 1e-5},
        "reward": {"source": "none"},
        "gateway": {"enabled": False},
        "services": {"actor": {"num_threads": 1}},
    }
    # JSON is YAML.
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(config))
    settings = {"random_turns": False, "wait": 0.0, "random_wait": 0.0, **settings, "answers": str(answers.absolute())}
    subprocess.run(
        tied_to_parent([str(Path(sys.executable).with_name("quartet")), "train", str(path), "--overwrite"]),
        env={**os.environ, SETTINGS: json.dumps(settings)},
        stdout=sys.stderr,
        check=True,
    )
    return folder / "runs" / name


def answers_of(folder: Path) -> list[Answer]:
    """Return the answers of a run."""
    return [Answer(**json.loads(line)) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]


def load_of(answers: Sequence[Answer]) -> Load:
    """Return the load of a step from its answers."""
    ordinary = [answer for answer in answers if not answer.slow]
    start, end = min(answer.sent for answer in answers), max(answer.received for answer in ordinary)
    tokens = sum(answer.tokens for answer in answers if answer.received <= end)
    return Load(
        len(ordinary) < len(answers),
        tokens / (end - start),
        statistics.median(answer.received - answer.sent for answer in ordinary),
        _agents_at_once(answers),
    )


def _agents_at_once(answers: Iterable[Answer]) -> int:
    """Return the maximum number of agents between their first request and their last answer."""
    spans: dict[int, tuple[float, float]] = {}
    for answer in answers:
        first, last = spans.get(answer.agent, (answer.sent, answer.received))
        spans[answer.agent] = min(first, answer.sent), max(last, answer.received)
    changes = sorted(change for first, last in spans.values() for change in ((first, 1), (last, -1)))
    count = most = 0
    for _, change in changes:
        count += change
        most = max(most, count)
    return most


def loads(folder: Path, rounds: int, episodes: int, wait: float) -> list[tuple[Load, Load]]:
    """Return the loads of each round of a run, without and with slow agents. The first step is to warm up."""
    train(folder, "load", 1 + 2 * rounds, {"prompts_per_step": episodes}, wait=wait)
    answers = answers_of(folder / "load-answers")

    def load(step: int) -> Load:
        return load_of([answer for answer in answers if answer.step == step])

    return [(load(step + 1), load(step)) for step in range(2, 2 + 2 * rounds, 2)]


@dataclass(frozen=True)
class Kept:
    """What a run with extra samples has kept: SHA-256 of its policy and of its trajectories, and how many it has left out."""

    policy: str
    trajectories: str
    left_out: int
    seconds: float


def kept(folder: Path, longest_wait: float) -> Kept:
    """Return what a run keeps whose agents wait for random times up to ``longest_wait``."""
    rollout = {"prompts_per_step": GROUPS, "samples_per_prompt": KEPT, "extra_samples": EXTRA}
    start = time.monotonic()
    run = train(folder, "kept", STEPS, rollout, random_turns=True, random_wait=longest_wait)
    seconds = time.monotonic() - start
    lines = [
        {name: value for name, value in json.loads(line).items() if name != "generator"}
        for path in sorted((run / "trajectories").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return Kept(
        hashlib.sha256((run / "policy/model.safetensors").read_bytes()).hexdigest(),
        hashlib.sha256(json.dumps(lines, sort_keys=True).encode()).hexdigest(),
        len((run / "left_out.jsonl").read_text().splitlines()),
        seconds,
    )


def table(host: str, pairs: Sequence[tuple[Load, Load]], wait: float, episodes: int, kept: Mapping[float, Kept]) -> str:
    """Return the results as Markdown."""
    ratios = [slow.tokens_per_second / ordinary.tokens_per_second for ordinary, slow in pairs]
    lines = [
        f"{host}. {episodes} episodes of {TURNS} turns in a step, {AT_ONCE} agents at once. A slow agent waits for {wait:g} s "
        f"after each turn.",
        "",
        f"With slow agents, the rate is **{statistics.median(ratios):.2f}** of that without (median of {len(ratios)} rounds, "
        f"{min(ratios):.2f} to {max(ratios):.2f}).",
        "",
        "| round | agents at once | tokens/s without slow agents | with | ratio | seconds per turn of others, without | with |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {number} | {ordinary.agents_at_once}, {slow.agents_at_once} | {ordinary.tokens_per_second:.0f} | "
            f"{slow.tokens_per_second:.0f} | {ratio:.2f} | {ordinary.seconds_per_turn:.2f} | {slow.seconds_per_turn:.2f} |"
            for number, ((ordinary, slow), ratio) in enumerate(zip(pairs, ratios, strict=True), 1)
        ),
        "",
        f"Extra samples: each of {STEPS} steps keeps {KEPT} of {KEPT + EXTRA} episodes of {GROUPS} prompts. Episodes have 1 to "
        f"{TURNS} turns.",
        "",
        "| waits of tools, at random | seconds | left out | SHA-256 of the policy | of the trajectories |",
        "|---|---|---|---|---|",
        *(
            f"| {f'up to {longest:g} s' if longest else 'none'} | {each.seconds:.0f} | {each.left_out} | "
            f"{each.policy[:16]} | {each.trajectories[:16]} |"
            for longest, each in kept.items()
        ),
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("agent_sessions", __doc__)
    parser.add_argument("--episodes", type=positive, default=300, help="episodes in a step")
    parser.add_argument("--wait", type=float, default=10.0, help="seconds that a slow agent waits after each turn")
    add_shared(parser, "build/agent-sessions", PAGE, rounds=3)
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    from benchmarks import machine

    host = machine.describe()
    measured = loads(options.folder, options.rounds, options.episodes, options.wait)
    runs = {longest: kept(options.folder, longest) for longest in WAITS}
    report = {
        "machine": host,
        "loads": [asdict(load) for pair in measured for load in pair],
        "kept": [{"longest_wait": longest, **asdict(each)} for longest, each in runs.items()],
    }
    publish(parser, options, report, table(host, measured, options.wait, options.episodes, runs))
    first = runs[WAITS[0]]
    if any(replace(each, seconds=first.seconds) != first for each in runs.values()):
        print("error: runs with other waits have other results", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
