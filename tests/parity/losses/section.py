"""Writer of the section "Losses and estimators" of docs/evidence/parity.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.parity.losses.case import TOLERANCE, Row

PACKAGES = ("trl", "verl", "openrlhf", "torch")
START, END = "## Losses and estimators\n", "## Differences\n"

INTRODUCTION = """\
Does each loss, correction and estimator compute what its name means elsewhere? The same batch goes through Quartet's function and
through that of another library: TRL {trl}, verl {verl}, OpenRLHF {openrlhf}. `make parity` runs the libraries' own code and
writes these tables. The batch has {responses} responses of 1 to 10 tokens, {samples} per prompt, with masked tokens, advantages
of both signs, and ratios far enough from 1 that every clip acts.

- *result* is the loss; for arrays, such as advantages and weights, their root mean square.
- *difference* is the largest one of all results of the row, relative to the largest magnitude. For a loss this includes the
  gradient of every token's log-prob. It may be {tolerance:g}.
- Both sides compute in float64, unless the row says otherwise. A row with *transcribed* uses a formula that was written from
  the library's source, because the library cannot be imported on a plain machine.
- `make test` compares Quartet with the stored results of the libraries, without installing them.
"""


def write(rows: Mapping[str, Sequence[Row]], versions: Mapping[str, str]) -> str:
    """Return the section in Markdown, with ``rows`` by the title of their table."""
    from tests.parity.losses.batch import SAMPLES, make_batch

    plain = {name: version.partition("+")[0] for name, version in versions.items()}
    responses = len(make_batch().lengths)
    parts = [START, INTRODUCTION.format(responses=responses, samples=SAMPLES, tolerance=TOLERANCE, **plain)]
    for title, listed in rows.items():
        parts.append(f"### {title}\n")
        lines = ["| Quartet | peer | settings | result | peer's result | difference |", "|---|---|---|---|---|---|"]
        lines += [_line(row) for row in listed]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts) + "\n"


def replace(page: str, section: str) -> str:
    """Return the page with its section replaced, or inserted before the list of differences."""
    before, _, rest = page.partition(END)
    return before.partition(START)[0] + section + END + rest


def existing(page: str) -> str:
    """Return the section of the page, or an empty text if it has none."""
    before = page.partition(END)[0]
    return before[before.index(START) :] if START in before else ""


def _line(row: Row) -> str:
    case = row.case
    notes = [case.settings, case.remark, "" if case.precision == "float64" else case.precision]
    notes.append("transcribed" if case.transcribed else "")
    cells = (
        f"`{case.name}`" if " " not in case.name else case.name,
        f"{case.peer} `{case.theirs}`",
        "; ".join(note for note in notes if note),
        f"{row.ours:.9g}",
        f"{row.theirs:.9g}",
        f"{row.difference:.0e}" if row.holds else f"**{row.difference:.0e}**",
    )
    return "| " + " | ".join(cells) + " |"
