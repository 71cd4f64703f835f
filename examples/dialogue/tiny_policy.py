"""Train a small chat policy from scratch on the pairs of prepare.py, to try the example on a laptop.

    python examples/dialogue/tiny_policy.py DATA OUT

The policy is a Llama with its own tokenizer and chat template. It learns both answers of each pair, so that its responses are as
often bad as good, and a reward can improve them. It does not replace an instruct model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from preferences import ASSISTANT, Pair, messages_of, read_pairs
from prepare import check_out

from quartet.demo import pretraining
from quartet.demo.pretraining import PretrainingProgress, Schedule, Shape
from quartet.errors import DataError, QuartetError
from quartet.system.durable_files import staged_directory

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ bos_token + message['role'] + '\n' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token + 'assistant\n' }}{% endif %}"
)
"""The beginning-of-sequence token opens a message, and the end-of-sequence token closes it."""
MIN_CONVERSATIONS = 50
MARKER = "chat_template.jinja"


def main(arguments: list[str] | None = None) -> int:
    """Run the program. The exit status is 0, or 2 for invalid input, with one line on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, metavar="DATA", help="the directory that prepare.py has written")
    parser.add_argument("out", type=Path, metavar="OUT", help="the directory to create")
    parser.add_argument("--steps", type=int, default=1000, help="training steps (default 1000)")
    parser.add_argument("--max-tokens", type=int, default=192, help="longer conversations are left out (default 192)")
    parser.add_argument("--vocabulary", type=int, default=2048, help="tokens (default 2048)")
    parser.add_argument("--hidden", type=int, default=128, help="width (default 128)")
    parser.add_argument("--layers", type=int, default=2, help="layers (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same files (default 0)")
    options = parser.parse_args(arguments)
    try:
        check_out(options.out, MARKER)
        with staged_directory(options.out) as folder:
            train(options, folder)
    except QuartetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.out}")
    return 0


def train(options: argparse.Namespace, folder: Path) -> None:
    """Train tokenizer and policy, and save them to ``folder``. Raises DataError if too few conversations are short enough."""
    pairs = read_pairs(options.data / "pairs.jsonl")
    texts = [text for pair in pairs for text in (*(content for _, content in pair.prompt), pair.chosen, pair.rejected)]
    tokenizer = pretraining.train_tokenizer(["\n".join(["system", "user", "assistant"]), *texts], options.vocabulary)
    tokenizer.chat_template = CHAT_TEMPLATE
    conversations = [str(tokenizer.apply_chat_template(each, tokenize=False)) for each in conversations_of(pairs)]
    rows = [row for row in pretraining.encode(tokenizer, conversations, eos=False) if len(row) <= options.max_tokens]
    if len(rows) < MIN_CONVERSATIONS:
        raise DataError(
            f"{options.data}/pairs.jsonl: {len(rows)} of {len(conversations)} conversations have at most {options.max_tokens} "
            f"tokens; expected at least {MIN_CONVERSATIONS}: give more pairs, or raise --max-tokens"
        )
    print(
        f"{len(rows):,} of {len(conversations):,} conversations, {len(tokenizer):,} tokens in the vocabulary",
        flush=True,
    )
    policy = pretraining.train_causal_lm(
        rows,
        tokenizer,
        Shape(options.hidden, options.layers, heads=4, positions=2 * options.max_tokens),
        Schedule(options.steps, batch_sequences=32, learning_rate=3e-3),
        seed=options.seed,
        progress=report,
    )
    pretraining.save_checkpoint(policy, tokenizer, folder)


def conversations_of(pairs: list[Pair]) -> Iterator[list[dict[str, str]]]:
    """Yield the messages of each prompt with each answer."""
    for pair in pairs:
        for answer in (pair.chosen, pair.rejected):
            yield messages_of([*pair.prompt, (ASSISTANT, answer)])


def report(progress: PretrainingProgress) -> None:
    if progress.step % 100 == 0 or progress.step == progress.steps:
        print(f"step {progress.step}/{progress.steps}, loss {progress.loss:.3f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
