"""Turn a public preference data set into the prompts and pairs of a dialogue run.

    python examples/dialogue/prepare.py SOURCE OUT

SOURCE is a file (JSON Lines, also as .gz or .zst, or Parquet), a folder, or the id of a data set on the Hugging Face hub. See
preferences.py for the forms of a row. Writes to OUT

- prompts.jsonl and validation_prompts.jsonl: each conversation up to the user's last message, as ``data.prompts`` reads it;
- pairs.jsonl and validation_pairs.jsonl: ``prompt``, ``chosen`` and ``rejected`` in chat format, for quartet sft and
  quartet reward-model;
- summary.json: the source and the counts.

Conversations that begin with the same message of the user are either all for training or all for validation. Repeated pairs,
and pairs of equal answers, are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from quartet.data.preference_pairs import Pair, is_held_out, iterate_pairs, messages_of, write_json_lines
from quartet.data.prompt_datasets import rows_file
from quartet.data.prompt_files import iterate_rows
from quartet.data.prompt_settings import DatasetSource, PromptSettings, RowMapping
from quartet.errors import DataError, QuartetError
from quartet.model_files.hub_models import looks_local
from quartet.system.durable_files import staged_directory

SUMMARY = "summary.json"
SHOWN = 3
"""Number of malformed rows that are shown."""


@dataclass(frozen=True, slots=True)
class Source:
    """Origin of rows: a file, or a split of a data set in a folder or on the hub. ``take``: maximum number of rows."""

    name: str
    split: str
    config: str | None
    revision: str | None
    take: int | None

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the place and the columns of each row. Raises DataError, and ConfigError if a package is missing."""
        path = Path(self.name)
        settings = PromptSettings(path, model="", max_prompt_tokens=1, key="SOURCE")
        if path.is_dir() or not looks_local(self.name):
            dataset = DatasetSource(self.name, self.config, self.split, self.revision)
            mapping = RowMapping(take=self.take)
            settings = PromptSettings(path, "", 1, mapping=mapping, dataset=dataset, key="SOURCE")
            path = rows_file(settings, report=lambda line: print(line, flush=True)).path
        for number, row in islice(iterate_rows(path), self.take):
            yield settings.location(number).removeprefix("prompts "), row


@dataclass(slots=True)
class Counts:
    """Numbers of rows, and of those that are left out."""

    rows: int = 0
    malformed: int = 0
    equal: int = 0
    repeated: int = 0
    in_validation: int = 0
    examples: list[str] = field(default_factory=list)


def main(arguments: list[str] | None = None) -> int:
    """Run the program. The exit status is 0, or 2 for invalid input, with one line on stderr."""
    options = parse(arguments)
    try:
        check_out(options.out, SUMMARY)
        with staged_directory(options.out) as folder:
            prepare(options, folder)
    except QuartetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or options.out}: {error.strerror or error}", file=sys.stderr)
        return 2
    print(f"wrote {options.out}")
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", metavar="SOURCE", help="a file, a folder, or the id of a data set on the hub")
    parser.add_argument("out", type=Path, metavar="OUT", help="the directory to create")
    parser.add_argument("--split", default="train", help="split of a data set (default train)")
    parser.add_argument("--config", help="configuration of a data set")
    parser.add_argument("--revision", help="commit, branch or tag of a data set on the hub (default the newest commit)")
    parser.add_argument("--take", type=positive, metavar="N", help="read only the first N rows")
    parser.add_argument(
        "--validation", metavar="SOURCE", help="source of the validation pairs (default a part of SOURCE)"
    )
    parser.add_argument("--validation-split", metavar="NAME", help="split of the validation pairs, such as test")
    parser.add_argument(
        "--validation-fraction",
        type=_fraction,
        default=0.02,
        metavar="X",
        help="fraction of the conversations for validation, without --validation and --validation-split (default 0.02)",
    )
    parser.add_argument(
        "--max-malformed",
        type=_fraction,
        default=0.05,
        metavar="X",
        help="fraction of malformed rows, which are left out, from which on nothing is written (default 0.05)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="decides which conversations are for validation (default 0)"
    )
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """Return an option's number. Raises argparse.ArgumentTypeError below 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: expected at least 1")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 0 or more, and less than 1")
    return value


def check_out(out: Path, marker: str) -> None:
    """Check that OUT is new, empty, or an earlier result, which is replaced. Raises DataError.

    ``marker`` is a file that every result has.
    """
    if out.exists() and not out.is_dir():
        raise DataError(f"{out}: is a file; expected a directory to create")
    if out.exists() and any(out.iterdir()) and not (out / marker).is_file():
        raise DataError(f"{out}: contains files, but no {marker} of an earlier result; choose an empty directory")


def prepare(options: argparse.Namespace, folder: Path) -> None:
    """Read, check and split the pairs, and write everything to ``folder``. Raises DataError."""
    source = Source(options.source, options.split, options.config, options.revision, options.take)
    counts, other = Counts(), None
    if options.validation is None and options.validation_split is None:
        everything = read(source, counts, options.max_malformed)
        openings, fraction = {pair.opening for pair in everything}, options.validation_fraction
        held_out = {opening for opening in openings if is_held_out(opening, fraction, options.seed)}
        training = [pair for pair in everything if pair.opening not in held_out]
        validation = [pair for pair in everything if pair.opening in held_out]
    else:
        is_same = options.validation in (None, options.source)
        path = Path(options.source if is_same else options.validation)
        if options.validation_split is not None and path.is_file():
            raise DataError(
                f"--validation-split {options.validation_split}: {path} is a file, which has no splits; give the validation "
                "pairs as --validation FILE"
            )
        other = Source(
            options.source if is_same else options.validation,
            options.validation_split or options.split,
            options.config if is_same else None,
            options.revision if is_same else None,
            options.take,
        )
        if other == source:
            raise DataError(
                f"{source.name}: SOURCE and --validation are the same; give another file, or --validation-split"
            )
        validation = read(other, Counts(), options.max_malformed)
        held_out = {pair.opening for pair in validation}
        pairs = read(source, counts, options.max_malformed)
        training = [pair for pair in pairs if pair.opening not in held_out]
        counts.in_validation = len(pairs) - len(training)
    for name, pairs in (("training", training), ("validation", validation)):
        if not pairs:
            advice = (
                "another --validation-fraction" if other is None else "a --validation file without these conversations"
            )
            raise DataError(f"{source.name}: no pairs are left for {name}; give more rows, or {advice}")
    numbers = {
        "pairs": write_pairs(folder / "pairs.jsonl", training),
        "prompts": write_prompts(folder / "prompts.jsonl", training),
        "validation_pairs": write_pairs(folder / "validation_pairs.jsonl", validation),
        "validation_prompts": write_prompts(folder / "validation_prompts.jsonl", validation),
    }
    summary = {"source": asdict(source), "counts": {**asdict(counts), **numbers}}
    (folder / SUMMARY).write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(
        f"{counts.rows:,} rows; left out: {counts.malformed:,} malformed, {counts.equal:,} with equal answers, "
        f"{counts.repeated:,} repeated, {counts.in_validation:,} whose conversation is in validation"
    )
    print(f"training: {numbers['pairs']:,} pairs, {numbers['prompts']:,} prompts")
    print(f"validation: {numbers['validation_pairs']:,} pairs, {numbers['validation_prompts']:,} prompts")


def read(source: Source, counts: Counts, max_malformed: float) -> list[Pair]:
    """Return the different pairs of a source, and count what is left out. Raises DataError if too many rows are malformed."""
    pairs: dict[tuple[Any, ...], Pair] = {}
    for pair in iterate_pairs(source.rows()):
        counts.rows += 1
        if isinstance(pair, DataError):
            counts.malformed += 1
            if counts.malformed <= SHOWN:
                counts.examples.append(str(pair))
        elif pair.chosen == pair.rejected:
            counts.equal += 1
        elif (key := (pair.prompt, pair.chosen, pair.rejected)) in pairs:
            counts.repeated += 1
        else:
            pairs[key] = pair
    if not counts.rows:
        raise DataError(f"{source.name}: empty; expected at least one row")
    if counts.malformed > max_malformed * counts.rows:
        raise DataError(
            f"{counts.examples[0]} ({counts.malformed:,} of {counts.rows:,} rows are malformed, more than --max-malformed "
            f"{max_malformed:g}; correct them, or raise it to leave them out)"
        )
    for example in counts.examples:
        print(f"left out: {example}")
    return list(pairs.values())


def write_pairs(path: Path, pairs: list[Pair]) -> int:
    """Write pairs, and return their number."""
    write_json_lines(path, (pair.to_json() for pair in pairs))
    return len(pairs)


def write_prompts(path: Path, pairs: Iterable[Pair]) -> int:
    """Write each prompt once, and return their number."""
    prompts = list(dict.fromkeys(pair.prompt for pair in pairs))
    lines: list[Mapping[str, Any]] = [{"prompt": messages_of(prompt)} for prompt in prompts]
    write_json_lines(path, lines)
    return len(prompts)


if __name__ == "__main__":
    sys.exit(main())
