"""Create the models and prompts for a PPO run on review sentences, from two files with one sentence per line.

    python examples/reviews/prepare.py POSITIVE NEGATIVE OUT

writes OUT/policy (a small Llama that continues sentences), OUT/reward (a sentiment classifier of the same size, one
logit, above 0 for favourable) and OUT/prompts.jsonl (the first five words of each sentence). Both checkpoints are in
Hugging Face format with their tokenizer.

The policy learns only from sentences of at most 48 tokens, because a longer one cannot end within a response of 48
tokens. The reward model starts from the policy's weights. It learns the labels of all sentences with at most 128
tokens, except a tenth that is held out to measure it. (The policy has seen their text, but not their labels.) The
training continues beyond the best calibration on purpose. The final norm of the model bounds its logit, and after a
short training this bound is about 2.5, too low for PPO to improve much.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quartet.errors import DataError, QuartetError
from quartet.system.durable_files import staged_directory

PROMPT_WORDS = 5
MIN_SENTENCES = 50
POLICY_TOKENS = 48
RESPONSE_TOKENS = 48
POSITIONS = 128
OUTPUTS = frozenset({"policy", "reward", "prompts.jsonl"})


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    positive: Path
    negative: Path
    out: Path
    seed: int
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    policy_steps: int
    reward_steps: int
    samples: int


def main(arguments: list[str] | None = None) -> int:
    """Run the program. The exit status is 0, or 2 for invalid input, with one line on stderr."""
    options = parse(arguments)
    try:
        check_out(options.out)
        positive, negative = read_sentences(options.positive), read_sentences(options.negative)
        with staged_directory(options.out) as staging:
            prepare(options, positive, negative, staging)
    except QuartetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or options.out}: {error.strerror or error}", file=sys.stderr)
        return 2
    print(f"wrote {options.out}/policy, {options.out}/reward and {options.out}/prompts.jsonl")
    return 0


def parse(arguments: list[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        description="Create a policy, a reward model and prompts from two files with one sentence per line.",
    )
    parser.add_argument("positive", type=Path, metavar="POSITIVE", help="favourable sentences, one per line, UTF-8")
    parser.add_argument("negative", type=Path, metavar="NEGATIVE", help="unfavourable sentences, one per line, UTF-8")
    parser.add_argument("out", type=Path, metavar="OUT", help="the directory to create")
    advanced = parser.add_argument_group("advanced")
    defaults: dict[str, tuple[int, int, str]] = {
        "seed": (0, 0, "the same seed gives the same files"),
        "vocabulary": (2048, 259, "tokens"),
        "hidden": (128, 8, "width of both models"),
        "layers": (2, 1, "layers of both models"),
        "heads": (4, 1, "attention heads of both models"),
        "policy-steps": (1300, 1, "training steps of the policy"),
        "reward-steps": (900, 1, "training steps of the reward model"),
        "samples": (1000, 1, "policy samples to evaluate"),
    }
    for name, (default, minimum, text) in defaults.items():
        advanced.add_argument(f"--{name}", type=_at_least(minimum), default=default, help=f"{text} (default {default})")
    options = Options(**vars(parser.parse_args(arguments)))
    if options.hidden % (2 * options.heads):
        parser.error(f"--hidden {options.hidden}: expected a multiple of twice --heads {options.heads}")
    return options


def _at_least(minimum: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value}: expected at least {minimum}")
        return value

    return number


def check_out(out: Path) -> None:
    """Check that OUT is empty or the result of an earlier run, which is replaced. Raises DataError."""
    for path in (out, *out.parents):
        if path.exists() and not path.is_dir():
            raise DataError(f"{path}: is a file, expected a directory")
    if not out.exists():
        return
    others = sorted({entry.name for entry in out.iterdir()} - OUTPUTS)
    if others:
        raise DataError(f"{out}: contains {others[0]!r}, which this program did not create; choose an empty directory")


def read_sentences(path: Path) -> list[str]:
    """Return the non-blank lines of ``path``, stripped. Raises DataError that names file and line."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; expected one sentence per line") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    sentences = []
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{number}: not UTF-8 (byte {error.start + 1} of the line)") from None
        if "\0" in text:
            raise DataError(f"{path}:{number}: contains a NUL character; expected text")
        if text:
            sentences.append(text)
    if not sentences:
        raise DataError(f"{path}: empty; expected one sentence per line")
    if len(sentences) < MIN_SENTENCES:
        raise DataError(f"{path}: {len(sentences)} sentences; expected at least {MIN_SENTENCES}")
    return sentences


def prompts_of(sentences: list[str], seed: int) -> list[str]:
    """Return the first words of every longer sentence, without duplicates, shuffled by ``seed``."""
    words = [sentence.split() for sentence in sentences]
    prompts = list(dict.fromkeys(" ".join(w[:PROMPT_WORDS]) for w in words if len(w) > PROMPT_WORDS))
    random.Random(f"{seed}/prompts").shuffle(prompts)
    return prompts


def prepare(options: Options, positive: list[str], negative: list[str], directory: Path) -> None:
    """Train, evaluate, and write everything to ``directory``. Raises DataError for unusable sentences."""
    from quartet.demo import pretraining

    sentences = positive + negative
    labels = [1.0] * len(positive) + [0.0] * len(negative)
    prompts = prompts_of(sentences, options.seed)
    if not prompts:
        raise DataError(f"{options.positive}, {options.negative}: no sentence has more than {PROMPT_WORDS} words")
    shape = pretraining.Shape(options.hidden, options.layers, options.heads, POSITIONS)

    tokenizer = pretraining.train_tokenizer(sentences, options.vocabulary)
    rows = pretraining.encode(tokenizer, sentences, eos=True)
    short = [row for row in rows if len(row) <= POLICY_TOKENS]
    labelled = [(row, label) for row, label in zip(rows, labels, strict=True) if len(row) <= POSITIONS]
    if len(short) < MIN_SENTENCES:
        raise DataError(
            f"{options.positive}, {options.negative}: {len(short)} sentences of at most {POLICY_TOKENS} tokens; "
            f"expected at least {MIN_SENTENCES}"
        )
    print(f"{len(rows)} sentences, {len(tokenizer)} tokens in the vocabulary, {len(prompts)} prompts")

    policy = pretraining.train_causal_lm(
        short,
        tokenizer,
        shape,
        pretraining.Schedule(options.policy_steps, learning_rate=2e-3),
        seed=options.seed,
        progress=_reporter(),
    )
    print(f"policy: trained on the {len(short)} sentences of at most {POLICY_TOKENS} tokens")

    random.Random(f"{options.seed}/held-out").shuffle(labelled)
    held_out, training = labelled[: len(labelled) // 10], labelled[len(labelled) // 10 :]
    reward = pretraining.train_reward_classifier(
        [row for row, _ in training],
        [label for _, label in training],
        tokenizer,
        shape,
        pretraining.Schedule(options.reward_steps, learning_rate=2e-3),
        body=policy,
        seed=options.seed,
        progress=_reporter(),
    )
    logits = pretraining.score_all(reward, [row for row, _ in held_out]).tolist()
    right = sum((logit > 0) == (label > 0.5) for logit, (_, label) in zip(logits, held_out, strict=True))
    print(f"reward: accuracy {right / len(held_out):.3f} on {len(held_out)} held-out sentences")

    openings = pretraining.encode(tokenizer, prompts[: options.samples], eos=False)
    responses = pretraining.sample(policy, openings, RESPONSE_TOKENS, seed=options.seed)
    scores = pretraining.score_all(reward, [p + r for p, r in zip(openings, responses, strict=True)])
    ended = sum(response[-1] == tokenizer.eos_token_id for response in responses)
    print(
        f"policy samples: {ended / len(responses):.3f} end within {RESPONSE_TOKENS} tokens, "
        f"reward mean {float(scores.mean()):.2f}, standard deviation {float(scores.std(correction=0)):.2f}"
    )

    pretraining.save_checkpoint(policy, tokenizer, directory / "policy")
    pretraining.save_checkpoint(reward, tokenizer, directory / "reward")
    with (directory / "prompts.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": prompt}, ensure_ascii=False) + "\n" for prompt in prompts)


def _reporter(every: int = 100) -> Callable[..., None]:
    """Print a line every ``every`` steps and at the last step."""
    from quartet.demo.pretraining import PretrainingProgress

    start = time.monotonic()

    def report(progress: PretrainingProgress) -> None:
        if progress.step % every == 0 or progress.step == progress.steps:
            seconds = time.monotonic() - start
            print(
                f"{progress.stage}: step {progress.step}/{progress.steps}, loss {progress.loss:.3f}, {seconds:.0f} s",
                flush=True,
            )

    return report


if __name__ == "__main__":
    sys.exit(main())
