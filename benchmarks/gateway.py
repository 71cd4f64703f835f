"""Load the gateway with 100 event streams and 50 requests per second while a run trains on the same cores.

The load is switched on and off alternately during one run. Measures lost events, the latency of requests, the slowdown of the
run, and the CPU shares of gateway and load. Writes the results below build/ and a table into docs/evidence/performance.md. The
exit status is 1 if an event is lost, a request fails, the 99th percentile of the latency is 500 ms or more, or the run slows
down by more than those shares.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil
import yaml

from benchmarks import page
from benchmarks.options import add_shared, page_of, parser_of, positive
from quartet.contract.status import MODEL_ROLES
from quartet.demo.toy_task import make_toy_task
from quartet.system.child_processes import tied_to_parent

RUN = "loaded"
STREAMS = 100
REQUESTS = 50
"""Requests per second."""
LIMIT = 0.5
"""Maximum 99th percentile of the latency, in seconds."""
STEPS = 100_000
"""More steps than the measurement needs; the run is stopped at its end."""


@dataclass
class Period:
    """A period with the load on or off: durations of its steps, and CPU seconds of gateway, run and load."""

    loaded: bool
    seconds: float
    steps: list[float]
    cpu: dict[str, float]


@dataclass
class Load:
    """Results of the load."""

    latencies: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    streams: list[list[int]] = field(default_factory=list)
    """The steps that each stream received, in order."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("gateway", __doc__)
    parser.add_argument("--periods", type=positive, default=6, help="number of periods, every second with load")
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of a period in seconds")
    add_shared(parser, "build/gateway-load", Path("docs/evidence/performance.md"), contents="run")
    options = parser.parse_args(arguments)
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    periods, load = _run(options.folder.absolute(), options.periods, options.seconds)
    report = _report(periods, load)
    (options.folder / "gateway.json").write_text(json.dumps(report, indent=1) + "\n")
    text = _table(report)
    print(text)
    page.write(page_of(parser, options), "gateway", text)
    problems = _problems(report)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _config(folder: Path) -> Path:
    toy_task = make_toy_task(folder / "toy-task")
    tree = {
        "run": {"name": RUN, "steps": STEPS, "directory": str(folder / "runs")},
        "data": {"prompts": str(toy_task.prompts), "max_prompt_tokens": 24},
        "rollout": {"prompts_per_step": 32, "max_response_tokens": 24},
        "actor": {"model": str(toy_task.policy), "learning_rate": 1e-6},
        "critic": {"learning_rate": 1e-6},
        "reward": {"model": str(toy_task.reward)},
        "services": {role.value: {"num_threads": 1} for role in MODEL_ROLES},
        "gateway": {"max_requests_per_second": 1000},
    }
    path = folder / "loaded.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def _run(folder: Path, periods: int, seconds: float) -> tuple[list[Period], Load]:
    command = [str(Path(sys.executable).with_name("quartet")), "train", str(_config(folder))]
    root = folder / "runs" / RUN
    with (folder / "train.log").open("wb") as output:
        process = subprocess.Popen(tied_to_parent(command), stdout=output, stderr=subprocess.STDOUT)
        try:
            _wait_until((root / "metrics.jsonl").exists, process, folder / "train.log")
            return asyncio.run(_measure(root, process.pid, periods, seconds))
        finally:
            process.terminate()
            process.wait(60)


def _wait_until(condition: Any, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run did not start: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)


async def _measure(root: Path, pid: int, periods: int, seconds: float) -> tuple[list[Period], Load]:
    gateway = json.loads((root / "gateway.json").read_text())
    headers = {"Authorization": f"Bearer {gateway['token']}"}
    limits = httpx2.Limits(max_connections=STREAMS + 64)
    results, load = [], Load()
    async with httpx2.AsyncClient(base_url=gateway["url"], headers=headers, limits=limits, timeout=60) as client:
        await asyncio.sleep(5)
        for number in range(periods):
            loaded = number % 2 == 1
            results.append(await _period(root, pid, loaded, seconds, client, load))
    return results, load


async def _period(root: Path, pid: int, loaded: bool, seconds: float, client: Any, load: Load) -> Period:
    streams: list[asyncio.Task[None]] = []
    if loaded:
        first = len(load.streams)
        for _ in range(STREAMS):
            received: list[int] = []
            load.streams.append(received)
            streams.append(asyncio.create_task(_stream(client, received)))
            await asyncio.sleep(0.02)
        await asyncio.sleep(1)
    cpu, began, steps = _cpu(pid), time.monotonic(), len(_steps(root))
    if loaded:
        await _requests(client, seconds, load)
    else:
        await asyncio.sleep(seconds)
    took, after = time.monotonic() - began, _cpu(pid)
    done = _steps(root)[steps:]
    if loaded:
        last = steps + len(done)
        await asyncio.sleep(2)  # Let pending events arrive.
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        for received in load.streams[first:]:
            expected = list(range(received[0] if received else 1, last + 1))
            if received[: len(expected)] != expected:
                load.failures["a stream lost an event"] += 1
    return Period(loaded, took, done[1:], {name: after[name] - cpu.get(name, 0.0) for name in after})


async def _stream(client: Any, received: list[int]) -> None:
    async with client.stream("GET", f"/api/v1/runs/{RUN}/events", timeout=None) as response:
        response.raise_for_status()
        event = ""
        async for line in response.aiter_lines():
            if line.startswith("event:"):
                event = line.removeprefix("event:").strip()
            elif line.startswith("data:") and event == "step":
                received.append(int(json.loads(line.removeprefix("data:"))["step"]))


async def _requests(client: Any, seconds: float, load: Load) -> None:
    began, tasks, number = time.monotonic(), [], 0
    paths = [
        "",
        "/metrics?names=reward_mean,kl_mean,entropy&points=600",
        "/steps?limit=20",
        "/trajectories?limit=20&sort=-score",
        "/services",
        "/guards",
    ]
    while (now := time.monotonic() - began) < seconds:
        if number / REQUESTS > now:
            await asyncio.sleep(number / REQUESTS - now)
        tasks.append(asyncio.create_task(_request(client, f"/api/v1/runs/{RUN}{paths[number % len(paths)]}", load)))
        number += 1
    await asyncio.gather(*tasks)


async def _request(client: Any, path: str, load: Load) -> None:
    began = time.monotonic()
    try:
        response = await client.get(path)
    except httpx2.HTTPError as error:
        load.failures[type(error).__name__] += 1
        return
    load.latencies.append(time.monotonic() - began)
    if response.status_code != 200:
        load.failures[f"{path.partition('?')[0]}: status {response.status_code}"] += 1


def _steps(root: Path) -> list[float]:
    return [json.loads(line)["seconds"] for line in (root / "metrics.jsonl").read_bytes().split(b"\n")[:-1]]


def _cpu(pid: int) -> dict[str, float]:
    """Return the CPU seconds so far of the gateway, the other processes of the run, and this process."""
    results = {"gateway": 0.0, "run": 0.0}
    parent = psutil.Process(pid)
    for process in [parent, *parent.children(recursive=True)]:
        try:
            times, command = process.cpu_times(), process.cmdline()
        except psutil.NoSuchProcess:
            continue
        name = "gateway" if "quartet.gateway" in command else "run"
        results[name] += times.user + times.system
    own = os.times()
    return {**results, "load": own.user + own.system}


def _report(periods: list[Period], load: Load) -> dict[str, Any]:
    def of(loaded: bool) -> list[Period]:
        return [period for period in periods if period.loaded is loaded]

    def rate(part: list[Period]) -> float:
        """Return the steps per second over whole periods, including the time between steps."""
        return sum(len(period.steps) + 1 for period in part) / sum(period.seconds for period in part)

    def share(name: str, part: list[Period]) -> float:
        return sum(period.cpu[name] for period in part) / sum(period.seconds for period in part) / (os.cpu_count() or 1)

    ordered = sorted(load.latencies)
    return {
        "cores": os.cpu_count(),
        "streams": STREAMS,
        "requests": len(ordered),
        "events": sum(len(steps) for steps in load.streams),
        "failures": dict(load.failures),
        "p50": statistics.median(ordered),
        "p99": ordered[int(len(ordered) * 0.99)],
        "slowest": ordered[-1],
        "slowdown": 1 - rate(of(True)) / rate(of(False)),
        "gateway_share": share("gateway", of(True)),
        "gateway_share_idle": share("gateway", of(False)),
        "load_share": share("load", of(True)),
    }


def _table(report: dict[str, Any]) -> str:
    rows = [
        ("event streams, requests per second", f"{report['streams']}, {REQUESTS}"),
        (
            "delivered events, streams that lost an event",
            f"{report['events']}, {report['failures'].get('a stream lost an event', 0)}",
        ),
        ("requests, failed requests", f"{report['requests']}, {sum(report['failures'].values())}"),
        (
            "latency: median, 99th percentile, maximum",
            f"{report['p50'] * 1000:.0f}, {report['p99'] * 1000:.0f}, {report['slowest'] * 1000:.0f} ms",
        ),
        ("slowdown of the run", f"{report['slowdown']:.1%}"),
        (
            "CPU share of the gateway",
            f"{report['gateway_share']:.1%} (without load {report['gateway_share_idle']:.1%})",
        ),
        ("CPU share of the load", f"{report['load_share']:.1%}"),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]) + (
        f"\n\nRun, gateway and load share {report['cores']} cores. The load is switched on and off alternately."
    )


def _problems(report: dict[str, Any]) -> list[str]:
    results = [f"{failure}: {count} times" for failure, count in report["failures"].items()]
    if report["p99"] >= LIMIT:
        results.append(f"the 99th percentile of the latency is {report['p99']:.3f} s; expected less than {LIMIT} s")
    if report["slowdown"] > report["gateway_share"] + report["load_share"] + 0.02:
        results.append(
            f"the run slowed down by {report['slowdown']:.1%}, more than the CPU shares of gateway "
            f"({report['gateway_share']:.1%}) and load ({report['load_share']:.1%})"
        )
    return results


if __name__ == "__main__":
    sys.exit(main())
