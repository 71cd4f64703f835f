"""Throughput of the sandbox in programs per second, for tests with input and for test statements.

Runs correct programs with one test each, by one worker and by as many as there are cores. Writes a table to
docs/evidence/performance.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import machine, page
from benchmarks.options import add_shared, page_of, parser_of, positive
from quartet.system.machine import available_cores
from quartet.verifiers.errors import SandboxFailed
from quartet.verifiers.programs import InputOutput, Program, Report, run_with_calls, run_with_input
from quartet.verifiers.sandbox.process import Limits, Sandbox
from quartet.verifiers.sandbox.selection import KINDS, open_sandbox

LIMITS = Limits(seconds=60.0, cpu_seconds=60)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("sandbox", __doc__)
    parser.add_argument("--programs", type=positive, default=200, help="programs per round")
    parser.add_argument("--sandbox", choices=KINDS, default="auto")
    add_shared(parser, "build/sandbox", Path("docs/evidence/performance.md"), rounds=3)
    options = parser.parse_args(arguments)
    try:
        sandbox = open_sandbox(options.sandbox)
    except SandboxFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    host = machine.describe()
    text = table(sandbox, options, host)
    print(text)
    page.write(page_of(parser, options), "sandbox", text)
    return 0


def with_input(sandbox: Sandbox) -> Report:
    """Run a program that reads a number and prints another."""
    return run_with_input(sandbox, Program("print(int(input()) + 1)"), [InputOutput("1", "2")], LIMITS)


def with_statement(sandbox: Sandbox) -> Report:
    """Run a program whose function a statement calls."""
    return run_with_calls(sandbox, Program("def f(x):\n    return x + 1\n"), ["assert f(1) == 2"], LIMITS)


def rate(run: Callable[[Sandbox], Report], sandbox: Sandbox, programs: int, workers: int) -> float:
    """Return programs per second. Raises RuntimeError if one does not pass."""
    with ThreadPoolExecutor(workers) as pool:
        begun = time.monotonic()
        passed = sum(report.passed for report in pool.map(run, [sandbox] * programs))
        seconds = time.monotonic() - begun
    if passed != programs:
        raise RuntimeError(f"{programs - passed} of {programs} programs failed")
    return programs / seconds


def table(sandbox: Sandbox, options: argparse.Namespace, host: str) -> str:
    """Measure and return the table for the page."""
    cores = available_cores()
    lines = [
        f"{host}. {sandbox.name}. {options.programs} programs with one test each; the best of {options.rounds} rounds.",
        "",
        "| test | workers | programs per second |",
        "|---|---|---|",
    ]
    for name, run in (("input and output", with_input), ("statement", with_statement)):
        for workers in sorted({1, cores, 2 * cores}):
            best = max(rate(run, sandbox, options.programs, workers) for _ in range(options.rounds))
            lines.append(f"| {name} | {workers} | {best:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
