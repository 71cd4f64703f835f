"""Create a tiny model that writes small functions with errors, and exercises with tests to train it on.

    python examples/code/prepare.py OUT

writes OUT/policy (a Llama of 2 layers that solves about 40 % of the exercises) and OUT/prompts.jsonl. Each line has a comment
that describes a function and the function's first line ("text" and "start"), and three tests. The same seed gives the same files.
It takes about ten seconds on one CPU core.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

from quartet.errors import DataError, QuartetError
from quartet.system.durable_files import staged_directory

OPERATIONS = {"plus": "+", "minus": "-", "times": "*", "modulo": "%"}
NUMBERS = range(1, 6)
RIGHT = 0.25
"""Share of right functions in the text that the model learns from. The others have a wrong part, or are not Python."""
SENTENCES = 10_000
OUTPUTS = frozenset({"policy", "prompts.jsonl"})


@dataclass(frozen=True, slots=True)
class Exercise:
    """A function of one number, such as x times 3 plus 2."""

    first: str
    factor: int
    second: str
    term: int

    @property
    def prompt(self) -> str:
        """Return the description and the first line."""
        return f"# x {self.first} {self.factor} {self.second} {self.term}\ndef f(x): return"

    @property
    def solution(self) -> str:
        """Return the rest of the line."""
        return f" (x {OPERATIONS[self.first]} {self.factor}) {OPERATIONS[self.second]} {self.term}"

    def tests(self) -> list[str]:
        """Return statements that are true for the function."""
        results = {x: eval(self.solution, {"x": x}) for x in (2, 7, 31)}  # noqa: S307 - the text is from this file
        return [f"assert f({x}) == {result}" for x, result in results.items()]


def exercises() -> list[Exercise]:
    """Return all exercises, in a fixed order."""
    return [
        Exercise(first, factor, second, term)
        for first in OPERATIONS
        for factor in NUMBERS
        for second in ("plus", "minus")
        for term in NUMBERS
    ]


def attempt(exercise: Exercise, draw: random.Random) -> str:
    """Return a solution that is right with the probability RIGHT."""
    if draw.random() < RIGHT:
        return exercise.solution
    parts = [exercise.first, exercise.factor, exercise.second, exercise.term]
    place = draw.randrange(5)
    if place == 4:
        return exercise.solution.replace(")", "", 1)
    parts[place] = draw.choice([part for part in (NUMBERS if place % 2 else OPERATIONS) if part != parts[place]])
    return Exercise(*parts).solution  # type: ignore[arg-type]


def prepare(directory: Path, seed: int, steps: int) -> None:
    """Write the policy and the prompts."""
    from quartet.demo import pretraining

    draw = random.Random(f"{seed}/functions")
    chosen = [draw.choice(exercises()) for _ in range(SENTENCES)]
    texts = [exercise.prompt + attempt(exercise, draw) for exercise in chosen]
    tokenizer = pretraining.train_tokenizer(texts, 400)
    shape = pretraining.Shape(hidden=64, layers=2, heads=4, positions=64)
    schedule = pretraining.Schedule(steps=steps, batch_sequences=32, learning_rate=5e-3, weight_decay=0.0)
    policy = pretraining.train_causal_lm(texts, tokenizer, shape, schedule, seed=seed)
    pretraining.save_checkpoint(policy, tokenizer, directory / "policy")
    lines = [{"text": each.prompt, "start": each.prompt, "tests": each.tests()} for each in exercises()]
    with (directory / "prompts.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the program. The exit status is 0, or 2 for invalid input, with one line on stderr."""
    parser = argparse.ArgumentParser(
        description="Create a tiny model that writes functions with errors, and exercises."
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the directory to create")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same files (default 0)")
    parser.add_argument("--steps", type=int, default=600, help="training steps of the model (default 600)")
    options = parser.parse_args(arguments)
    try:
        if options.out.exists() and (others := sorted({path.name for path in options.out.iterdir()} - OUTPUTS)):
            raise DataError(
                f"{options.out}: contains {others[0]!r}, which this program did not create; choose another directory"
            )
        with staged_directory(options.out) as staging:
            prepare(staging, options.seed, options.steps)
    except (QuartetError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.out}/policy and {options.out}/prompts.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
