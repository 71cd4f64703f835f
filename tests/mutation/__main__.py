"""Change quartet.ppo in small ways, one at a time, and list the changes that no test notices: `make mutation`.

It writes docs/evidence/mutation.md. The exit status is 1 if a change survives that tests/mutation/equivalent.toml does not
explain, or if that file explains a change that does not survive. Results are kept in tests/mutation/results.jsonl, so that a
stopped command continues, and a repeated one tests only what changed: a mutant that failed a test is tested again only if the
file of that test has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from tests.mutation import execute
from tests.mutation.report import Mutant, Result, page, problems, read_explanations

FOLDER = Path("build/mutation")
ENVIRONMENT = Path("build/mutation-venv/bin/python")
RESULTS = Path(__file__).with_name("results.jsonl")
PAGE = Path("docs/evidence/mutation.md")
SLOWEST = 5
"""Seconds of the processor that a mutant may take, in multiples of the seconds with the unchanged module."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "modules", nargs="*", help="modules of quartet.ppo; all by default, and only then the page is written"
    )
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    options = parser.parse_args()
    if not ENVIRONMENT.exists():
        print(f"error: {ENVIRONMENT} is missing; make mutation creates the environment", file=sys.stderr)
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    names = options.modules or sorted(path.stem for path in execute.SOURCES.glob("*.py") if path.stem != "__init__")
    unknown = [name for name in names if not (execute.SOURCES / f"{name}.py").exists()]
    if unknown:
        print(f"error: {unknown[0]}: no module of {execute.PACKAGE}", file=sys.stderr)
        return 2

    mutants = [mutant for name in names for mutant in _mutants(name)]
    execute.preload()
    results = list(_results(names, mutants, options.jobs))
    explanations = [entry for entry in read_explanations() if entry.module in names]
    if not options.modules:
        PAGE.write_text(page(results, explanations), encoding="utf-8")
        print(f"wrote {PAGE}")
    unexplained = problems(results, explanations)
    for problem in unexplained:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if unexplained else 0


def _mutants(name: str) -> list[Mutant]:
    """Return the mutants of a module, from an earlier run if the module is the same."""
    module, generator = execute.SOURCES / f"{name}.py", Path(__file__).with_name("generate.py")
    kept = FOLDER / f"mutants-{name}-{_digest(module.read_bytes(), generator.read_bytes())}.jsonl"
    if not kept.exists():
        print(f"{name}: making mutants")
        done = subprocess.run([ENVIRONMENT, generator, module], check=True, stdout=subprocess.PIPE)
        kept.write_bytes(done.stdout)
    return [Mutant(**json.loads(line)) for line in kept.read_text(encoding="utf-8").splitlines()]


def _results(names: Sequence[str], mutants: Sequence[Mutant], jobs: int) -> Iterator[Result]:
    """Return the result of each mutant, in any order. Results of earlier runs with the same code and tests are taken over."""
    tests = {name: execute.tests_of(name) for name in names}
    digests = {test: _digest((execute.ROOT / test).read_bytes()) for test in sorted({*chain(*tests.values())})}
    # Also of the tests that failed for no mutant of the module, because a new one may notice what survived.
    all_tests = {name: _digest(*(digests[test].encode() for test in tests[name])) for name in names}
    state = _state()
    keys = {mutant: _digest(mutant.source.encode(), state.encode()) for mutant in mutants}
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    earlier = {record["key"]: record for record in map(json.loads, lines)}

    def is_valid(mutant: Mutant, record: dict[str, str]) -> bool:
        tested = digests.get(record["failed"]) if record["failed"] else all_tests[mutant.module]
        return record["tests"] == tested

    outcomes = {
        mutant: record["outcome"]
        for mutant, key in keys.items()
        if (record := earlier.get(key)) is not None and is_valid(mutant, record)
    }
    yield from (Result(mutant, outcome) for mutant, outcome in outcomes.items())
    waiting = [mutant for mutant in mutants if mutant not in outcomes]
    print(f"{len(mutants)} mutants, {len(waiting)} to test", flush=True)
    limits = {name: SLOWEST * _seconds(name, tests[name]) for name in {mutant.module for mutant in waiting}}

    started, done, running = time.monotonic(), 0, {}
    with RESULTS.open("a", encoding="utf-8") as log:
        while waiting or running:
            while waiting and len(running) < jobs:
                mutant = waiting.pop(0)
                name = mutant.module
                running[mutant] = execute.Child(name, mutant.source, tests[name], limits[name])
            for mutant, child in list(running.items()):
                outcome = child.outcome()
                if outcome is None:
                    continue
                del running[mutant]
                # A file that is no test may fail, too, such as a conftest.
                failed = child.failed if child.failed in digests else ""
                tested = digests[failed] if failed else all_tests[mutant.module]
                record = {"key": keys[mutant], "outcome": outcome, "failed": failed, "tests": tested}
                log.write(json.dumps(record) + "\n")
                log.flush()
                done += 1
                if outcome == "survived":
                    print(f"survived: {mutant.describe()}", flush=True)
                if done % 50 == 0:
                    print(f"{done} tested, {len(waiting)} left, {time.monotonic() - started:.0f} s", flush=True)
                yield Result(mutant, outcome)
            time.sleep(0.02)


def _seconds(name: str, tests: Sequence[str]) -> int:
    """Return the time of the tests with the unchanged module, rounded up. Raises RuntimeError if they fail."""
    started = time.monotonic()
    child = execute.Child(name, (execute.SOURCES / f"{name}.py").read_text(encoding="utf-8"), tests, 600)
    while (outcome := child.outcome()) is None:
        time.sleep(0.02)
    if outcome != "survived":
        raise RuntimeError(f"the tests of {name} fail without a change: pytest {' '.join(tests)}")
    return math.ceil(time.monotonic() - started)


def _state() -> str:
    """Return a digest of the package, and of the files beside the tests that tests use."""
    folders = (execute.SOURCES, *execute.TESTS)
    files = sorted(path for folder in folders for pattern in ("*.py", "*.json") for path in folder.rglob(pattern))
    return _digest(*(path.read_bytes() for path in files if not path.name.startswith("test_")))


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:24]


if __name__ == "__main__":
    sys.exit(main())
