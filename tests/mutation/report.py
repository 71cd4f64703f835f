"""Results of mutation testing, the explanations of survivors, and the page about both."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

EXPLANATIONS = Path(__file__).with_name("equivalent.toml")

INTRODUCTION = """\
# Mutation testing

Would a test fail if a formula were wrong? `make mutation` answers this for `quartet.ppo`, and writes this page. It makes one
small change at a time: another operator, another number, a negated condition, a removed decorator. It runs the unit tests of the
package and the [comparison of losses and estimators with other libraries](parity.md#losses-and-estimators) against each change.

A change that makes a test fail, or run without end, is killed. A change that survives needs a test, or a reason why it cannot
matter. The reasons are in `tests/mutation/equivalent.toml`; the command fails if one is missing, or no longer needed. Changes to
annotations, docstrings and texts are not made.

- `make mutation` continues where it was stopped, and tests again only what changed. All of it takes about an hour on two cores.
- `make mutation MUTATION_ARGS="losses kl"` tests two modules and leaves this page as it is.

| module | changes | killed | survived |
|---|---|---|---|
"""

SURVIVORS = """
## Survivors

No result differs under these changes, or only in a way that the reason names.

| module | function | code | change | reason |
|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A changed module: its ``source``, and the first changed line ``before`` and ``after``."""

    module: str
    operator: str
    function: str
    before: str
    after: str
    source: str

    def describe(self) -> str:
        return f"{self.module}.{self.function}: {self.before!r} -> {self.after!r}"


@dataclass(frozen=True, slots=True)
class Result:
    """``outcome``: killed or survived."""

    mutant: Mutant
    outcome: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The reason why changes of one line survive: those to the lines ``after``, or to any line if it is empty."""

    module: str
    before: str
    reason: str
    after: tuple[str, ...] = ()

    def covers(self, mutant: Mutant) -> bool:
        same = self.module == mutant.module and self.before == mutant.before
        return same and (not self.after or mutant.after in self.after)


def read_explanations(path: Path = EXPLANATIONS) -> list[Explanation]:
    """Return the entries of the file of explanations."""
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("equivalent", [])
    return [Explanation(**entry | {"after": tuple(entry.get("after", ()))}) for entry in entries]


def problems(results: Sequence[Result], explanations: Sequence[Explanation]) -> list[str]:
    """Return a line for each survivor without an explanation, and for each explanation without a survivor."""
    survivors = [result.mutant for result in results if result.outcome == "survived"]
    missing = [mutant for mutant in survivors if not any(entry.covers(mutant) for entry in explanations)]
    unused = [entry for entry in explanations if not any(entry.covers(mutant) for mutant in survivors)]
    return [
        *(f"{mutant.describe()} survives; add a test, or a reason to {EXPLANATIONS.name}" for mutant in missing),
        *(
            f"{EXPLANATIONS.name}: {entry.module}: {entry.before!r} has no survivor; remove the entry"
            for entry in unused
        ),
    ]


def page(results: Sequence[Result], explanations: Sequence[Explanation]) -> str:
    """Return the page in Markdown."""
    lines = [INTRODUCTION]
    names = sorted({result.mutant.module for result in results})
    for name in [*names, "all"]:
        outcomes = [result.outcome for result in results if name in (result.mutant.module, "all")]
        survived = outcomes.count("survived")
        lines.append(f"| {name} | {len(outcomes)} | {len(outcomes) - survived} | {survived} |\n")
    lines.append(SURVIVORS)
    survivors = [result.mutant for result in results if result.outcome == "survived"]
    for mutant in sorted(survivors, key=lambda m: (m.module, m.function, m.before, m.after)):
        reasons = [entry.reason for entry in explanations if entry.covers(mutant)]
        cells = (mutant.module, mutant.function, _code(mutant.before), _code(mutant.after), (*reasons, "**none**")[0])
        lines.append("| " + " | ".join(cells) + " |\n")
    return "".join(lines)


def _code(line: str) -> str:
    return f"`{line.replace('|', '¦')}`" if line else "removed"
