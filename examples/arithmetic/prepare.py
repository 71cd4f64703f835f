"""Create a tiny model that adds with errors, and sums to train it on.

    python examples/arithmetic/prepare.py OUT

writes OUT/policy (a Llama of 2 layers that answers about a fifth of the sums right) and OUT/prompts.jsonl, lines such as
{"text": "7 + 5 =", "answer": 12}. The same seed gives the same files. It takes a few seconds on one CPU core.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from quartet.errors import DataError, QuartetError
from quartet.system.durable_files import staged_directory

LARGEST = 9
"""Both numbers of a sum are from 0 to this one."""
RIGHT = 0.4
"""Share of right answers in the text that the model learns from. The others are off by up to 3."""
SENTENCES = 10_000
OUTPUTS = frozenset({"policy", "prompts.jsonl"})


def problems() -> list[tuple[str, int]]:
    """Return each sum with its answer."""
    return [(f"{a} + {b} =", a + b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]


def sentences(seed: int) -> list[str]:
    """Return sums with answers, of which RIGHT are right."""
    draw = random.Random(f"{seed}/sums")
    texts = []
    for _ in range(SENTENCES):
        problem, answer = draw.choice(problems())
        if draw.random() >= RIGHT:
            answer = max(0, answer + draw.choice([-3, -2, -1, 1, 2, 3]))
        texts.append(f"{problem} {answer}")
    return texts


def prepare(directory: Path, seed: int, steps: int) -> None:
    """Write the policy and the prompts."""
    from quartet.demo import pretraining

    texts = sentences(seed)
    tokenizer = pretraining.train_tokenizer(texts, 400)
    shape = pretraining.Shape(hidden=64, layers=2, heads=4, positions=32)
    schedule = pretraining.Schedule(steps=steps, batch_sequences=32, learning_rate=5e-3, weight_decay=0.0)
    policy = pretraining.train_causal_lm(texts, tokenizer, shape, schedule, seed=seed)
    pretraining.save_checkpoint(policy, tokenizer, directory / "policy")
    with (directory / "prompts.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text, "answer": answer}) + "\n" for text, answer in problems())


def main(arguments: list[str] | None = None) -> int:
    """Run the program. The exit status is 0, or 2 for invalid input, with one line on stderr."""
    parser = argparse.ArgumentParser(description="Create a tiny model that adds with errors, and sums to train it on.")
    parser.add_argument("out", type=Path, metavar="OUT", help="the directory to create")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same files (default 0)")
    parser.add_argument("--steps", type=int, default=400, help="training steps of the model (default 400)")
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
