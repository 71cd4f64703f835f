"""Create the teacher, the student and the prompts of the distillation example, from nothing, in about a minute on one core.

    python examples/distillation/prepare.py runs/distillation

writes OUT/{teacher,student} and OUT/prompts.jsonl. Both models are small Llamas with one tokenizer. The student has learned
restaurant reviews, most of them unfavourable. The teacher is larger and has learned the favourable ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from quartet.demo import corpus, pretraining
from quartet.demo.pretraining import Schedule, Shape
from quartet.errors import QuartetError
from quartet.system.durable_files import staged_directory

REVIEWS = 24_000
MIN_FAVOURABLE = 3
"""Number of favourable clauses, of six, from which on the teacher learns a review."""
STUDENT = Shape(hidden=64, layers=2, heads=4, positions=96)
TEACHER = Shape(hidden=96, layers=3, heads=4, positions=96)


def prepare(folder: Path, steps: int) -> None:
    """Write both models, trained for ``steps`` steps each, and the prompts."""
    reviews = corpus.reviews(REVIEWS, seed=0)
    tokenizer = pretraining.train_tokenizer([review.text for review in reviews[:6000]], 512)
    schedule = Schedule(steps=steps, learning_rate=5e-3, weight_decay=0.0)
    favourable = [review.text for review in reviews if review.favourable >= MIN_FAVOURABLE]
    for name, texts, shape in (
        ("student", [review.text for review in reviews], STUDENT),
        ("teacher", favourable, TEACHER),
    ):
        model = pretraining.train_causal_lm(texts, tokenizer, shape, schedule, seed=0, stage=name)
        pretraining.save_checkpoint(model, tokenizer, folder / name)
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": prompt}) + "\n" for prompt in corpus.prompts())


def main(arguments: list[str] | None = None) -> int:
    """Run the program. The exit status is 0, or 2 for invalid input, with one line on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=400, help="training steps of each model")
    options = parser.parse_args(arguments)
    try:
        with staged_directory(options.out) as folder:
            prepare(folder, options.steps)
    except QuartetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: teacher, student and prompts.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
