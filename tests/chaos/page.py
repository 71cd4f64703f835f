"""Generated part of docs/evidence/durability.md: written from the results, and checked by a test."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from tests.chaos.cases import PARTS, Case, Part
from tests.chaos.runs import Result


def begin(part: Part) -> str:
    """Return the mark before the tables of a part."""
    return f"<!-- chaos of {part.name}: what follows is written by make chaos -->"


def end(part: Part) -> str:
    """Return the mark after the tables of a part."""
    return f"<!-- chaos of {part.name}: end -->"


def rewritten(page: str, part: Part, results: Mapping[str, Result], about: str) -> str:
    """Return ``page`` with new results of a part between its marks. ``about``: duration and machine of the suite."""
    before, mark, rest = page.partition(begin(part))
    _, closed, after = rest.partition(end(part))
    if not mark or not closed:
        raise ValueError(f"the page has lost a mark: expected {begin(part)} and then {end(part)}")
    return f"{before}{begin(part)}\n\n{_tables(part, results, about)}\n{end(part)}{after}"


def cells(page: str) -> dict[str, str]:
    """Return the table cell of each case on ``page``, by name."""
    result = {}
    for part in PARTS:
        text = page.partition(begin(part))[2].partition(end(part))[0]
        rows = [line.strip("|").split("|") for line in text.splitlines()]
        table = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows if len(row) == 1 + len(part.pairs)}
        for case in part.cases:
            if case.moment.name in table:
                result[case.name] = table[case.moment.name][part.pairs.index((case.process, case.fault))]
    return result


def _tables(part: Part, results: Mapping[str, Result], about: str) -> str:
    results = {case.name: results[case.name] for case in part.cases if case.name in results}
    failed = sum(bool(result.problems) for result in results.values())
    verdict = "every run is bit-identical to the undisturbed one" if not failed else f"**{failed} failed**"
    if part.episodes is not None and not failed:
        verdict += ", and no turn was generated twice"
    lines = [
        f"{len(results)} of {len(part.cases)} cases, {about}: {verdict}.",
        "",
        "| process | fault | cases | recoveries | seconds to recover, median | maximum | bit-identical |",
        "|---|---|---|---|---|---|---|",
    ]
    for process, fault in part.pairs:
        cases = [case for case in part.cases if (case.process, case.fault) == (process, fault)]
        chosen = [results[case.name] for case in cases if case.name in results]
        lines.append(f"| {process} | {fault} | {_summary(chosen)} |")
    lines += [
        "",
        "<details><summary>Every case: seconds to recover, and the seed</summary>",
        "",
        "| moment | " + " | ".join(f"{process} {fault.removeprefix('SIG')}" for process, fault in part.pairs) + " |",
        "|---" * (1 + len(part.pairs)) + "|",
    ]
    for moment in part.moments:
        row = [_cell(case, results.get(case.name)) for case in part.cases if case.moment is moment]
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
