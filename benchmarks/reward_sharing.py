"""Latency of a run at a reward service that another run floods, with and without quotas.

A real service process scores over TCP. This process is the normal run: it sends one batch at a time. Another process is the
flooding run: it keeps many batches in flight. Rounds with and without the flood alternate. Writes a table to
docs/evidence/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine, page
from benchmarks.options import add_shared, page_of, parser_of, positive
from quartet.config.deployment import TimeoutsConfig
from quartet.contract.status import Role
from quartet.contract.trajectory import Scores, TokenBatch
from quartet.errors import Cancelled, QuartetError, ServiceBusy
from quartet.rpc import replica_set
from quartet.rpc.clients import RewardClient
from quartet.rpc.replica_set import FrozenReplicas
from quartet.rpc.security.credentials import OPERATOR, Credentials

VOCABULARY, PROMPT_TOKENS, RESPONSE_TOKENS = 1000, 64, 64
MICRO_BATCH_TOKENS = 512
FUNCTION_SECONDS = 0.003
"""CPU time of the function for one response."""
SETTLE_SECONDS = 0.5
"""Time from the start of a flood to the first measured call."""
FLOOD_FRACTIONS = {"flood": 1.0, "impatient flood": 0.0}
"""Kinds of flood, with the part of the named time after which a refused call is sent again."""


@dataclass
class Latencies:
    """Seconds of the calls of one run, without and with the flood."""

    undisturbed: list[float] = field(default_factory=list)
    flooded: list[float] = field(default_factory=list)

    def quantile(self, q: float, flooded: bool) -> float:
        """Return a quantile in seconds."""
        return float(np.quantile(self.flooded if flooded else self.undisturbed, q))

    def ratio(self, q: float) -> float:
        """Return the quantile with the flood, relative to that without."""
        return self.quantile(q, True) / self.quantile(q, False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("reward_sharing", __doc__)
    parser.add_argument("--calls", type=positive, default=10, help="calls per round, with and without the flood each")
    parser.add_argument("--sequences", type=positive, default=32, help="responses in a call")
    parser.add_argument("--in-flight", type=positive, default=64, help="calls of the flooding run in flight")
    parser.add_argument("--flood", nargs=2, metavar=("ADDRESS", "KIND"), help=argparse.SUPPRESS)
    add_shared(parser, "build/reward-sharing", Path("docs/evidence/performance.md"), rounds=6)
    options = parser.parse_args(arguments)
    if options.flood:
        flood(options.flood[0], FLOOD_FRACTIONS[options.flood[1]], options)
        return 0
    host = machine.describe()
    text = table(options, host)
    print(text)
    page.write(page_of(parser, options), "reward_sharing", text)
    return 0


def busy(prompt: str, response: str, fields: dict[str, Any]) -> float:
    """Compute for a while. The reward function of the benchmark."""
    end = time.process_time() + FUNCTION_SECONDS
    while time.process_time() < end:
        pass
    return float(len(response))


def table(options: argparse.Namespace, host: str) -> str:
    """Measure and return the table for the page."""
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    model = write_model(folder / "reward")
    model_source = {"source": "model", "model": str(model), "micro_batch_tokens": MICRO_BATCH_TOKENS}
    function_source = {"source": "function", "function": "benchmarks.reward_sharing:busy", "tokenizer": str(model)}
    cases = [
        ("model", model_source, True, "flood"),
        ("model", model_source, True, "impatient flood"),
        ("function", function_source, True, "flood"),
        ("model", model_source, False, "flood"),
    ]
    lines = [
        f"{host}. One thread. {options.sequences} responses of "
        f"{PROMPT_TOKENS} + {RESPONSE_TOKENS} tokens in a call, micro-batches of {MICRO_BATCH_TOKENS} tokens, "
        f"{FUNCTION_SECONDS * 1000:g} ms per response for the function. {options.rounds} rounds of {options.calls} calls without "
        f"and with the flood, which keeps {options.in_flight} calls in flight. An impatient flood ignores the time "
        "after which it should try again.",
        "",
        "| source | quotas | other run | p50 without | p50 | p95 without | p95 | ratio of p95 | responses/s of the flood |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, reward, quotas, kind in cases:
        latencies, rate = measure(options, model, reward, quotas, kind)
        cells = [f"{1000 * latencies.quantile(q, flooded):.0f} ms" for q in (0.5, 0.95) for flooded in (False, True)]
        lines.append(
            f"| {name} | {'yes' if quotas else 'no'} | {kind} | {' | '.join(cells)} | {latencies.ratio(0.95):.2f} | {rate:.0f} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    lines[0] += f" Load {os.getloadavg()[0]:.1f} after."
    return "\n".join(lines)


def measure(
    options: argparse.Namespace, model: Path, reward: dict[str, Any], quotas: bool, kind: str
) -> tuple[Latencies, float]:
    """Return the latencies of the normal run, and the responses per second of the flooding run while both send."""
    latencies, flooded, seconds = Latencies(), 0, 0.0
    with service(options.folder, model, reward, quotas) as address, flooding(address, kind, options) as command:
        client = client_of(address, "normal")
        batch = batch_of(options.sequences)
        for _ in range(5):
            client.score(batch).result()
        # Without quotas each call takes long.
        for _ in range(options.rounds if quotas else -(-options.rounds // 3)):
            latencies.undisturbed += timed(client, batch, options.calls)
            command("start")
            time.sleep(SETTLE_SECONDS)
            before, start = command("count"), time.perf_counter()
            latencies.flooded += timed(client, batch, options.calls)
            flooded, seconds = flooded + command("count") - before, seconds + time.perf_counter() - start
            command("stop")
        client.close()
    return latencies, flooded / seconds


def timed(client: RewardClient, batch: TokenBatch, calls: int) -> list[float]:
    """Return the seconds of each of several calls, one after the other. A busy service is asked again."""
    seconds, replicas = [], replicas_of(client)
    for _ in range(calls):
        start = time.perf_counter()
        while True:
            try:
                replicas.start(lambda each: each.score(batch)).result()
                break
            except ServiceBusy:
                time.sleep(0.05)
        seconds.append(time.perf_counter() - start)
    return seconds


def client_of(address: str, run: str) -> RewardClient:
    """Return a client with the name of its run."""
    client = RewardClient(address, TimeoutsConfig(load_seconds=60, score_seconds=120), Credentials(OPERATOR, run=run))
    client.wait_until_ready()
    return client


def replicas_of(client: RewardClient) -> FrozenReplicas[RewardClient]:
    """Return the service of a client as the only replica, whose refused calls are repeated."""
    return FrozenReplicas(Role.REWARD, [client.channel.address], lambda _: client, lambda note: None)


def batch_of(sequences: int) -> TokenBatch:
    """Return random sequences."""
    ids = np.random.default_rng(0).integers(2, VOCABULARY, sequences * (PROMPT_TOKENS + RESPONSE_TOKENS), np.int32)
    prompts, responses = np.full(sequences, PROMPT_TOKENS, np.int32), np.full(sequences, RESPONSE_TOKENS, np.int32)
    return TokenBatch(ids, prompts, responses)


def flood(address: str, fraction: float, options: argparse.Namespace) -> None:
    """Flood a service by the commands start, stop and count on standard input. Answers with the number of scored responses."""
    client, batch = client_of(address, "flood"), batch_of(options.sequences)
    replicas, calls = replicas_of(client), list[Future[Scores]]()
    replica_set.QUOTA_JITTER = (fraction, fraction)
    active, scored, failures = False, 0, list[str]()

    def begin() -> None:
        call = replicas.start(lambda each: each.score(batch))
        calls.append(call)
        call.add_done_callback(ended)

    def ended(call: Future[Scores]) -> None:
        nonlocal scored
        try:
            scored += len(call.result().total)
        except ServiceBusy:
            time.sleep(0.05)
        except Cancelled:
            return
        if active:
            begin()

    for line in sys.stdin:
        if line.strip() == "start":
            active = True
            for _ in range(options.in_flight):
                begin()
        elif line.strip() == "stop":
            active = False
            for call in calls:
                call.cancel()
            while not all(call.done() for call in calls):
                time.sleep(0.01)
            failures += [error for call in calls if (error := failure_of(call))]
            calls.clear()
            # The last unit of work ends at the service.
            time.sleep(SETTLE_SECONDS)
        print(json.dumps({"scored": scored, "failures": failures}), flush=True)


def failure_of(call: Future[Scores]) -> str:
    """Return the error of a call that has ended; "" if it has none, was cancelled or met a busy service."""
    try:
        call.result()
    except (Cancelled, ServiceBusy):
        return ""
    except QuartetError as error:
        return str(error)
    return ""


@contextmanager
def flooding(address: str, kind: str, options: argparse.Namespace) -> Iterator[Any]:
    """Start the process of the flooding run. Yield a function that gives it a command and returns its answer."""
    arguments = ["--flood", address, kind, "--in-flight", str(options.in_flight), "--sequences", str(options.sequences)]
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.reward_sharing", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def command(text: str) -> int:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{text}\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            if answer["failures"]:
                raise RuntimeError(f"calls of the flood failed: {answer['failures'][:3]}")
            return int(answer["scored"])

        try:
            command("count")
            yield command
        finally:
            process.stdin.close()
            process.terminate()


@contextmanager
def service(folder: Path, model: Path, reward: dict[str, Any], quotas: bool) -> Iterator[str]:
    """Start a reward service. Yield its address."""
    config = folder / "config.yaml"
    sharing = {"sharing": {"over_quota_share": 0.1}} if quotas else {}
    tree = {
        "run": {"name": "shared"},
        "data": {"prompts": "prompts.jsonl"},
        "actor": {"model": str(model)},
        "reward": reward,
        "services": {"reward": {"num_threads": 1, **sharing}},
    }
    config.write_text(json.dumps(tree))
    reader, writer = os.pipe()
    arguments = ["reward", "--config", str(config), "--listen", "127.0.0.1:0", "--ready-fd", str(writer)]
    with (
        (folder / "service.log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-m", "quartet.services", *arguments], pass_fds=[writer], stdout=log, stderr=log
        ) as process,
    ):
        os.close(writer)
        try:
            with os.fdopen(reader) as pipe:
                message = json.loads(pipe.readline() or "{}")
                if "address" not in message:
                    raise RuntimeError(f"the service did not start: {message}; see {log.name}")
                yield message["address"]
        finally:
            process.terminate()


def write_model(folder: Path) -> Path:
    """Write a reward model with random weights and a tokenizer."""
    import torch
    import transformers

    from benchmarks.random_models import tokenizer

    if not folder.exists():
        torch.manual_seed(0)
        config = transformers.Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_labels=1,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
        transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
        tokenizer(VOCABULARY).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    sys.exit(main())
