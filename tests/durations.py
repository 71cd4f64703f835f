"""Plugin of pytest that starts the longest test files first, and prints which folders went over their budgets of seconds.

``durations.json`` holds the budget of each folder, and the seconds of each test file that takes at least one: the sum over its
tests, fixtures included, with the workers of ``make test`` on an idle machine of two cores. ``--update-durations`` writes the
seconds again, of the files that ran.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

FILE = Path(__file__).with_suffix(".json")
ROOT = FILE.parents[1]
SLOWEST_FILES = 5


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-durations", action="store_true", help=f"write tests/{FILE.name} again")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest files first in the processes that run the tests in parallel, so that none of them is the last to end."""
    if hasattr(config, "workerinput"):
        seconds = json.loads(FILE.read_text(encoding="utf-8"))["seconds"]
        items.sort(key=lambda item: -seconds.get(_file(item.nodeid), 0.0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[_file(report.nodeid)] += report.duration
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    if terminalreporter.config.getoption("update_durations"):
        FILE.write_text(json.dumps(updated(stored, seconds), indent=2) + "\n", encoding="utf-8")
    lines = over_budget(stored["budgets"], seconds)
    if lines:
        terminalreporter.section("folders over their budget in tests/durations.json")
        for line in lines:
            terminalreporter.write_line(line)


def updated(stored: dict[str, dict[str, float]], seconds: Counter[str]) -> dict[str, dict[str, float]]:
    """Return what ``durations.json`` must contain after a run whose files took ``seconds``."""
    merged = {**stored["seconds"], **{file: round(value, 1) for file, value in seconds.items()}}
    kept = {file: merged[file] for file in sorted(merged) if merged[file] >= 1 and (ROOT / file).exists()}
    return {**stored, "seconds": kept}


def over_budget(budgets: dict[str, float], seconds: Counter[str]) -> list[str]:
    """Describe each folder over its budget, with its slowest files. A file belongs to the innermost folder that has one."""
    folders: dict[str, Counter[str]] = {}
    for file, value in seconds.items():
        folder = next((str(parent) for parent in Path(file).parents if str(parent) in budgets), None)
        if folder:
            folders.setdefault(folder, Counter())[file] = value
    lines = []
    for folder, files in sorted(folders.items()):
        if files.total() > budgets[folder]:
            lines.append(f"{files.total():7.1f} s  {folder}, budget {budgets[folder]:g} s")
            lines += [f"{value:7.1f} s    {file}" for file, value in files.most_common(SLOWEST_FILES)]
    return lines


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
