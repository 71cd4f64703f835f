"""Generated part of docs/durability.md: written from the results, and checked by a test."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from tests.chaos.cases import CASES, MOMENTS, PAIRS, Case
from tests.chaos.runs import Result

BEGIN, END = "<!-- chaos: what follows is written by make chaos -->", "<!-- chaos: end -->"


def rewritten(page: str, results: Mapping[str, Result], about: str) -> str:
    """Return ``page`` with new results between its marks. ``about``: duration and machine of the suite."""
    before, mark, rest = page.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not mark or not closed:
        raise ValueError(f"the page has lost a mark: expected {BEGIN} and then {END}")
    return f"{before}{BEGIN}\n\n{_tables(results, about)}\n{END}{after}"


def cells(page: str) -> dict[str, str]:
    """Return the table cell of each case on ``page``, by name."""
    rows = [line.strip("|").split("|") for line in page.partition(BEGIN)[2].partition(END)[0].splitlines()]
    table = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows if len(row) == 1 + len(PAIRS)}
    return {
        case.name: table[case.moment.name][PAIRS.index((case.process, case.fault))]
        for case in CASES
        if case.moment.name in table
    }


def _tables(results: Mapping[str, Result], about: str) -> str:
    failed = sum(bool(result.problems) for result in results.values())
    verdict = "every run is bit-identical to the undisturbed one" if not failed else f"**{failed} failed**"
    lines = [
        f"{len(results)} of {len(CASES)} cases, {about}: {verdict}.",
        "",
        "| process | fault | cases | recoveries | seconds to recover, median | maximum | bit-identical |",
        "|---|---|---|---|---|---|---|",
    ]
    for process, fault in PAIRS:
        cases = [case for case in CASES if (case.process, case.fault) == (process, fault)]
        chosen = [results[case.name] for case in cases if case.name in results]
        lines.append(f"| {process} | {fault} | {_summary(chosen)} |")
    lines += [
        "",
        "<details><summary>Every case: seconds to recover, and the seed</summary>",
        "",
        "| moment | " + " | ".join(f"{process} {fault.removeprefix('SIG')}" for process, fault in PAIRS) + " |",
        "|---" * (1 + len(PAIRS)) + "|",
    ]
    for moment in MOMENTS:
        row = [_cell(case, results.get(case.name)) for case in CASES if case.moment is moment]
        lines.append(f"| {moment.name} | " + " | ".join(row) + " |")
    return "\n".join([*lines, "", "</details>", ""])


def _summary(results: Sequence[Result]) -> str:
    seconds = [result.seconds for result in results if result.seconds is not None]
    same = sum(not result.problems for result in results)
    times = [f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}"] if seconds else ["", ""]
    count = f"{same} of {len(results)}"
    recoveries = str(sum(result.recoveries for result in results))
    return " | ".join([str(len(results)), recoveries, *times, count if same == len(results) else f"**{count}**"])


def _cell(case: Case, result: Result | None) -> str:
    if result is None:
        return "not run"
    if result.problems:
        return f"**failed** ({case.seed})"
    return f"{result.seconds:.1f} ({case.seed})"
