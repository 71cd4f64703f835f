"""`quartet profile RUN`: profile the next steps of an active run, and print where their time went."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from quartet.cli.console import make_console
from quartet.errors import ServiceFailed, ServiceUnavailable
from quartet.gateway.client import Api, Target, connect

console = make_console()
POLL_SECONDS = 1.0
SAVE_SECONDS = 600.0
"""Time that a profile has to be saved once a step after its last one is taken. A profile that takes longer is lost."""
MAX_ROWS = 10
"""Largest number of operators, and of kernels, that are printed."""


def profile(target: Target, steps: int) -> None:
    """Request a profile, wait until it is saved, and print its summary."""
    with connect(target) as api:
        known = [_key(each) for each in api.get("/profiles")]
        at = int(api.get()["step"])
        api.post("/profile", {"steps": steps})
        console.print(f"{target.given}: profiles the next {steps} step{'s' if steps > 1 else ''}", soft_wrap=True)
        found = _wait(api, target, known, at + steps + 1)
    for line in summary_lines(found):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    folder = f"step-{found['step']:06d}"
    if target.files is not None:
        console.print(f"traces: {target.files.profiles / folder}; open them in https://ui.perfetto.dev", soft_wrap=True)


def _key(found: dict[str, Any]) -> tuple[int, float]:
    return found["step"], found["created"]


def _wait(api: Api, target: Target, known: Sequence[tuple[int, float]], last: int) -> dict[str, Any]:
    """Return the new profile. Raises ServiceFailed if the run ends without it, or goes on for long after the step ``last``."""
    taken = 0.0
    while True:
        # Read before the profiles: one that is saved between both is not missed.
        try:
            run = api.get()
            for each in api.get("/profiles"):
                if _key(each) not in known:
                    return dict(each)
        except ServiceUnavailable:
            if target.files is None or target.files.gateway.exists():
                raise
            run = {"live": False, "step": 0}
        if not run["live"]:
            raise ServiceFailed(
                f"{target.given}: the run has ended; a profile that was complete is in its folder profiles"
            )
        taken = taken or (time.monotonic() if run["step"] > last else 0.0)
        if taken and time.monotonic() - taken > SAVE_SECONDS:
            raise ServiceFailed(
                f"{target.given}: the profile is not complete at step {run['step']}: the orchestrator was restarted, or a "
                "service works without a pause; see its log, or try again"
            )
        time.sleep(POLL_SECONDS)


def summary_lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a profile, as the REST API returns it."""
    times = ", ".join(f"step {step} {seconds:.2f} s" for step, seconds in found["step_seconds"].items())
    yield f"profile of steps {found['step']} to {found['last_step']}: {times}"
    for service in found["services"]:
        yield ""
        yield from _service_lines(service)


def _service_lines(service: dict[str, Any]) -> Iterator[str]:
    summary = service["summary"]
    if service["problem"]:
        yield f"{service['service']}: incomplete: {service['problem']}"
    if summary is None:
        return
    seconds = summary["seconds"]

    def share(part: float) -> str:
        return f"{part:.2f} s ({part / seconds:.0%})" if seconds else f"{part:.2f} s"

    work = summary["work_seconds"]
    busy = sum(work.values())
    yield f"{service['service']} ({summary['device']}): {seconds:.2f} s; waits for calls {share(max(0.0, seconds - busy))}"
    yield "  " + ", ".join(f"{kind} {share(time)}" for kind, time in work.items())
    yield (
        f"  computes {share(summary['compute_seconds'])}, gaps in calls {share(summary['gap_seconds'])}, communication "
        f"{share(summary['communication_seconds'])}, exposed {share(summary['exposed_communication_seconds'])}"
    )
    for title, rows in (("kernels", summary["kernels"]), ("operators by self time", summary["operators"])):
        if rows:
            yield f"  {title:<58} {'calls':>8} {'seconds':>9}"
            yield from (
                f"    {row['name'][:56]:<56} {row['calls']:>8} {row['seconds']:>9.3f}" for row in rows[:MAX_ROWS]
            )
    for gap in summary["gaps"]:
        yield f"  gap of {gap['seconds'] * 1000:.1f} ms {_between(gap['after'], gap['before'])}"


def _between(after: str, before: str) -> str:
    return f"after {after[:40] or 'the start of the call'}, before {before[:40] or 'its end'}"
