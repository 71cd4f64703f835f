"""Kill or suspend every process at every moment of a step: `make chaos`, or python -m tests.chaos.

Each case is one run of `quartet train` that must be bit-identical to an undisturbed run. Writes the table in
docs/evidence/durability.md after all cases have run. The exit status is 1 if a case fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.chaos import page
from tests.chaos.cases import CASES, PARTS, TURN_PARTS, Case, part_of
from tests.chaos.runs import ChaosSetup, Result, disturb
from tests.chaos.turns import Observer


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="run only this case; may be repeated")
    names = [part.name for part in PARTS]
    parser.add_argument("--part", action="append", choices=names, help="run only this part; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the names of all cases")
    parser.add_argument(
        "--resume", action="store_true", help="continue where the last call stopped; failed cases run again"
    )
    parser.add_argument(
        "--stale",
        action="store_true",
        help="run the cases one step off-policy, in a separate folder; no table is written",
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("build/chaos"), help="folder of results and undisturbed runs"
    )
    parser.add_argument("--page", type=Path, default=Path("docs/evidence/durability.md"), help="page of the table")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(case.name for case in CASES))
        return 0
    parts = [part for part in PARTS if part.name in (options.part or names)]
    if options.stale:
        parts = [part for part in parts if part not in TURN_PARTS]
    chosen = _chosen(options.only) if options.only else [case for part in parts for case in part.cases]
    if not (options.resume or options.only):
        shutil.rmtree(options.folder, ignore_errors=True)
    if options.stale:
        options.folder /= "stale"
    recorded = options.folder / "results.jsonl"
    results = _read(recorded) if options.resume else {}
    # The cases of long episodes start as forks, which is faster: the others show that a start as users do it is the same.
    setups = {
        part: ChaosSetup(
            options.folder / part.name,
            options.stale,
            part.ranks,
            fresh=part.episodes is None,
            episodes=part.episodes,
        )
        for part in {part_of(case): None for case in chosen}
    }
    for number, case in enumerate(chosen, 1):
        if case.name in results and not results[case.name].problems:
            continue
        part = part_of(case)
        observers = () if part.episodes is None else Observer(case, part.episodes).steps
        result = results[case.name] = disturb(case, setups[part], *observers)
        with recorded.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**asdict(result), "at": time.time()}) + "\n")
        _show(f"{number}/{len(chosen)}", result)
    failed = [case for case in chosen if results[case.name].problems]
    for part in PARTS:
        if options.stale or not results.keys() >= {case.name for case in part.cases}:
            continue
        minutes = sum(results[case.name].total_seconds for case in part.cases) / 60
        about = f"{minutes:.0f} minutes on {os.cpu_count()} CPU cores"
        text = page.rewritten(options.page.read_text(encoding="utf-8"), part, results, about)
        options.page.write_text(text, encoding="utf-8")
        print(f"wrote {options.page}")
    print(f"{len(chosen) - len(failed)} of {len(chosen)} cases are bit-identical to the undisturbed run")
    for case in failed:
        print(f"failed: python -m tests.chaos --only {case.name}", file=sys.stderr)
    return 1 if failed else 0


def _chosen(names: Sequence[str]) -> tuple[Case, ...]:
    known = {case.name: case for case in CASES}
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"error: unknown cases: {', '.join(unknown)}; see --list", file=sys.stderr)
        sys.exit(2)
    return tuple(known[name] for name in names)


def _read(path: Path) -> dict[str, Result]:
    """Return the last result of each existing case, by name."""
    known = {case.name for case in CASES}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    results = {}
    for line in lines:
        record = json.loads(line)
        if record["case"] in known:
            results[record["case"]] = Result(
                record["case"],
                record["recoveries"],
                record["seconds"],
                record["total_seconds"],
                tuple(record["problems"]),
            )
    return results


def _show(number: str, result: Result) -> None:
    seconds = "never" if result.seconds is None else f"{result.seconds:.1f} s"
    verdict = "FAILED" if result.problems else "bit-identical"
    print(
        f"{number} {result.case}: {verdict}, {result.recoveries} recoveries, recovered after {seconds}, "
        f"{result.total_seconds:.0f} s in total",
        flush=True,
    )
    for problem in result.problems:
        print(f"  {problem}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
