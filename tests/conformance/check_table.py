"""The page docs/reference/conformance-checks.md: every check, where the contract says it, and the mutants that fail it.

Without arguments, compares the committed page and exits with status 1 if it differs. With --write, writes it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from quartet.conformance.batch_checks import batch_checks
from quartet.conformance.check import Check
from quartet.conformance.model_checks import SCORE, VALUES
from quartet.conformance.process_checks import process_checks
from quartet.conformance.runner import ROLES, checks_of
from tests.conformance.mutants import MUTANTS
from tests.conformance.server_mutants import ACCESS_MUTANTS

PAGE = Path(__file__).parents[2] / "docs/reference/conformance-checks.md"
BATCH_AREAS = ("score", "values", "log_probs")
"""Areas of the checks that the methods with a batch share."""
SHARED = {check.id.partition(".")[2] for method in (SCORE, VALUES) for check in batch_checks(method)}
"""Names of these checks, without their area."""
HEADER = """# Checks of conformance

Which checks does `quartet conformance` make, and which faults of a service fail each? A fault is a mutant of a correct service
in `tests/conformance`; its test requires that the check fails. `BATCH` is `score` for a reward, `values` for a critic, and
`log_probs` for a reference and an actor. This page is generated from the code by `make generate`.
"""


def check_name(check: str) -> str:
    """Return the id of a check, with BATCH in the place of the areas that share their checks."""
    area, _, name = check.partition(".")
    return f"BATCH.{name}" if area in BATCH_AREAS and name in SHARED else check


def _rows() -> dict[str, tuple[Check, list[str]]]:
    """Return each check with the roles that have it, by its name on the page."""
    rows: dict[str, tuple[Check, list[str]]] = {}
    for role in ROLES:
        for check in checks_of(role):
            rows.setdefault(check_name(check.id), (check, []))[1].append(str(role))
    return rows


def _lines() -> Iterator[str]:
    faults: dict[str, list[str]] = {}
    for name, check in [(each.name, each.check) for each in MUTANTS] + [(name, id_) for name, id_, _ in ACCESS_MUTANTS]:
        faults.setdefault(check_name(check), []).append(name)
    every = {check.id for check in process_checks()}
    sections: dict[str, list[str]] = {}
    for name, (check, roles) in _rows().items():
        title = "Every role" if name in every else ", ".join(roles).capitalize()
        requirement = check.requirement.replace("|", "\\|")
        source = f"`{check.source.partition(':')[0]}`"
        sections.setdefault(title, []).append(
            f"| `{name}` | {requirement} | {source} | {'; '.join(faults.get(name, []))} |"
        )
    yield HEADER
    count = sum(map(len, faults.values()))
    yield f"{len(_rows())} checks, {count} mutants.\n"
    for title, rows in sections.items():
        yield f"## {title}\n"
        yield "| check | the contract requires | in | faults that fail it |\n|---|---|---|---|"
        yield "\n".join(rows) + "\n"


def page() -> str:
    """Return the page."""
    return "\n".join(_lines())


def main(arguments: list[str]) -> int:
    """Write or compare the page."""
    if "--write" in arguments:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        print(f"{PAGE.name} does not match the checks; run make generate and commit", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
