"""Make a tiny base model with a chat template, and pairs for it, to go from pairs to a policy on a laptop.

    python examples/dialogue/tiny.py DATA BASE

DATA is the directory that prepare.py has written. If it does not exist, it is made with generated pairs: an answer has a
greeting, a body and an end, each polite or rude, and the better answer has more polite parts. So supervised fine-tuning on the
better answers gives a policy of mixed manners, which a reward can improve. BASE is a Llama with random weights, and a tokenizer
that was trained on the pairs.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from prepare import check_out, positive, write_pairs, write_prompts

from quartet.data.preference_pairs import Pair, is_held_out, read_pairs
from quartet.demo.pretraining import Schedule, Shape, save_checkpoint, train_causal_lm, train_tokenizer
from quartet.errors import QuartetError
from quartet.system.durable_files import staged_directory

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ bos_token + message['role'] + '\n' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token + 'assistant\n' }}{% endif %}"
)
"""The beginning-of-sequence token opens a message, and the end-of-sequence token closes it."""
TOPICS = [
    *("rice", "bread", "soup", "tea", "bikes", "roses", "cats", "boats", "maps", "songs"),
    *("stars", "snow", "chess", "paint", "glass", "trains", "shoes", "bees", "salt", "wool"),
]
QUESTIONS = (
    "how do i start with {} ?",
    "tell me about {}",
    "what is good about {} ?",
    "where do i find {} ?",
    "who knows {} ?",
    "why do people like {} ?",
    "is {} hard ?",
    "i want to try {}",
)
POLITE = (
    ("gladly ,", "of course ,", "happy to help ,"),
    ("{} is fun", "try {} slowly", "{} is easy to like"),
    (". good luck", ". enjoy it", ". ask me more"),
)
RUDE = (
    ("whatever ,", "go away ,", "not you again ,"),
    ("{} is dull", "stop with {}", "{} is not for you"),
    (". that 's it", ". bye now", ". leave me alone"),
)
"""Parts of answers, in their order. A polite part and a rude one have the same numbers of words."""


def main(arguments: list[str] | None = None) -> int:
    """Run the program. The exit status is 0, or 2 for invalid input, with one line on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "data", type=Path, metavar="DATA", help="the directory of the pairs, which is generated if missing"
    )
    parser.add_argument("base", type=Path, metavar="BASE", help="the directory to create")
    parser.add_argument("--pairs", type=positive, default=4000, help="pairs to generate (default 4000)")
    parser.add_argument(
        "--positions", type=positive, default=384, help="maximum tokens of a conversation (default 384)"
    )
    parser.add_argument("--vocabulary", type=positive, default=2048, help="tokens (default 2048)")
    parser.add_argument("--hidden", type=positive, default=128, help="width (default 128)")
    parser.add_argument("--layers", type=positive, default=2, help="layers (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same files (default 0)")
    options = parser.parse_args(arguments)
    try:
        check_out(options.base, "chat_template.jinja")
        if not options.data.exists():
            with staged_directory(options.data) as folder:
                generate_data(folder, options.pairs, options.seed)
        with staged_directory(options.base) as folder:
            make_base(read_pairs(options.data / "pairs.jsonl"), options, folder)
    except QuartetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.base}")
    return 0


def generate_data(folder: Path, count: int, seed: int) -> None:
    """Write pairs and prompts in the files of prepare.py. A tenth of the questions are for validation."""
    pairs = generate(count, seed)
    held_out = [is_held_out(pair.opening, 0.1, seed) for pair in pairs]
    for prefix, side in (("", False), ("validation_", True)):
        part = [pair for pair, held in zip(pairs, held_out, strict=True) if held is side]
        write_pairs(folder / f"{prefix}pairs.jsonl", part)
        write_prompts(folder / f"{prefix}prompts.jsonl", part)


def generate(count: int, seed: int) -> list[Pair]:
    """Return pairs whose better answer has more polite parts."""
    draw, pairs = random.Random(seed), list[Pair]()
    while len(pairs) < count:
        topic = draw.choice(TOPICS)
        manners = sorted(([draw.random() < 0.5 for _ in POLITE] for _ in range(2)), key=sum, reverse=True)
        if sum(manners[0]) == sum(manners[1]):
            continue
        chosen, rejected = (
            " ".join(
                draw.choice((POLITE if polite else RUDE)[part]).format(topic) for part, polite in enumerate(manner)
            )
            for manner in manners
        )
        pairs.append(Pair((("user", draw.choice(QUESTIONS).format(topic)),), chosen, rejected))
    return pairs


def make_base(pairs: list[Pair], options: argparse.Namespace, folder: Path) -> None:
    """Save the tokenizer and a model with random weights to ``folder``."""
    texts = [text for pair in pairs for text in (*(content for _, content in pair.prompt), pair.chosen, pair.rejected)]
    tokenizer = train_tokenizer(["\n".join(["system", "user", "assistant"]), *texts], options.vocabulary)
    tokenizer.chat_template = CHAT_TEMPLATE
    shape = Shape(options.hidden, options.layers, heads=4, positions=options.positions)
    save_checkpoint(train_causal_lm(texts[:1], tokenizer, shape, Schedule(0), seed=options.seed), tokenizer, folder)


if __name__ == "__main__":
    sys.exit(main())
