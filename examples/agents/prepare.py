"""Create the policies and prompts of the agents' examples, from nothing, in about two minutes on one core.

    python examples/agents/prepare.py runs/agents

writes policy and prompts.jsonl to OUT/shop and OUT/compaction, or to those named by --tasks. Each policy is a small Llama with a
chat template of its own. It has learned episodes with errors: it looks up other items, adds other numbers, and forgets totals.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quartet.demo import pretraining
from quartet.demo.pretraining import Schedule, Shape
from quartet.errors import QuartetError
from quartet.system.durable_files import staged_directory

EPISODES = 6000
SHAPE = Shape(hidden=64, layers=2, heads=2, positions=256)
ITEMS = ("apple", "pear", "plum", "fig", "kiwi", "lime", "melon", "grape")
CORRECT = 0.75
"""Fraction of calls, sums and copies without an error."""
NUMBERS, HIGH = 3, 5
"""Length of a list that an agent with little context reads number by number, and the highest of them."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ bos_token + message['role'] + '\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% set called = {'name': call['function']['name'], 'arguments': call['function']['arguments']} %}"
    "{{ '<tool_call>' + (called | tojson) + '</tool_call>' }}"
    "{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token + 'assistant\n' }}{% endif %}"
)
"""The beginning-of-sequence token opens a message, and the end-of-sequence token closes it. Tools are not shown."""
Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str = "", *calls: tuple[str, dict[str, str]]) -> Message:
    tool_calls = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": tool_calls} if calls else {})}


def result(value: object) -> Message:
    return {"role": "tool", "content": str(value)}


def purchase(draw: random.Random) -> dict[str, Any]:
    """Return a row of prompts.jsonl: a question, the prices that the tools know, and the answer."""
    one, other = draw.sample(ITEMS, 2)
    prices = {item: draw.randint(1, 9) for item in ITEMS}
    return {"text": f"{one} plus {other} ?", "prices": prices, "answer": prices[one] + prices[other]}


def shopping(draw: random.Random) -> list[list[Message]]:
    """Return an episode with a lookup of two prices, a calculation and an answer, with errors."""
    row = purchase(draw)
    wanted = row["text"].removesuffix(" ?").split(" plus ")
    looked_up = [item if draw.random() < CORRECT else draw.choice(ITEMS) for item in wanted]
    numbers = [row["prices"][item] for item in looked_up]
    added = [number if draw.random() < CORRECT else draw.randint(1, 9) for number in numbers]
    answer = sum(added) if draw.random() < CORRECT else draw.randint(2, 18)
    return [
        [
            user(row["text"]),
            assistant("", *(("lookup", {"item": item}) for item in looked_up)),
            *map(result, numbers),
            assistant("", ("calculate", {"expression": "+".join(map(str, added))})),
            result(sum(added)),
            assistant(str(answer)),
        ]
    ]


def shopping_list(draw: random.Random) -> dict[str, Any]:
    """Return a row of prompts.jsonl: numbers, and their sum."""
    numbers = [draw.randint(0, HIGH) for _ in range(NUMBERS)]
    return {"text": "add the numbers", "numbers": numbers, "answer": sum(numbers)}


def compacting(draw: random.Random) -> list[list[Message]]:
    """Return the branches of an episode: each begins with the total that the one before has summarized, with errors."""
    total, branches = 0, list[list[Message]]()
    for number in shopping_list(draw)["numbers"]:
        branch = [user(f"total {total} , then {number} . summarize")]
        total = total + number if draw.random() < CORRECT else draw.randint(0, NUMBERS * HIGH)
        branch.append(assistant(f"total {total}"))
        branches.append(branch)
    branches[-1] += [
        user("how much ?"),
        assistant(str(total if draw.random() < CORRECT else draw.randint(0, NUMBERS * HIGH))),
    ]
    return branches


Play, Row = Callable[[random.Random], list[list[Message]]], Callable[[random.Random], dict[str, Any]]
TASKS: dict[str, tuple[Play, Row, int]] = {
    "shop": (shopping, purchase, 800),
    "compaction": (compacting, shopping_list, 1600),
}
"""Episodes, rows of prompts, and training steps of the policy, by task."""


def parts(tokenizer: Any, messages: list[Message]) -> Iterator[tuple[str, bool]]:
    """Yield the text of a branch in the parts that a run encodes one by one, and whether each is the policy's."""
    written = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(messages[:number], tokenize=False, add_generation_prompt=True)
        after = tokenizer.apply_chat_template(messages[: number + 1], tokenize=False)
        yield before[len(written) :], False
        yield after[len(before) :].removesuffix(tokenizer.eos_token), True
        written = after


def prepare(
    folder: Path,
    play: Play,
    row: Row,
    steps: int,
) -> None:
    """Write a policy that has learned episodes of ``play``, and prompts."""
    draw = random.Random(0)
    branches = [branch for _ in range(EPISODES) for branch in play(draw)]
    texts = [message["content"] for branch in branches for message in branch]
    calls = [json.dumps(call["function"]) for branch in branches for m in branch for call in m.get("tool_calls", ())]
    roles = ["user\n", "assistant\n", "tool\n", "<tool_call>", "</tool_call>"]
    tokenizer = pretraining.train_tokenizer([*roles, *texts, *calls], 512)
    tokenizer.chat_template = CHAT_TEMPLATE
    sequences = [
        [
            id
            for text, is_turn in parts(tokenizer, branch)
            for id in pretraining.encode(tokenizer, [text], eos=is_turn)[0]
        ]
        for branch in branches
    ]
    schedule = Schedule(steps=steps, batch_sequences=32, learning_rate=5e-3, weight_decay=0.0)
    policy = pretraining.train_causal_lm(sequences, tokenizer, SHAPE, schedule, seed=0)
    pretraining.save_checkpoint(policy, tokenizer, folder / "policy")
    draw = random.Random(1)
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row(draw)) + "\n" for _ in range(512))


def main(arguments: list[str] | None = None) -> int:
    """Run the program. The exit status is 0, or 2 for invalid input, with one line on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="what to create (default all)")
    parser.add_argument("--steps", type=int, help="training steps of each policy (default: enough for its task)")
    options = parser.parse_args(arguments)
    try:
        for name in options.tasks:
            play, row, steps = TASKS[name]
            options.out.mkdir(parents=True, exist_ok=True)
            with staged_directory(options.out / name) as folder:
                prepare(folder, play, row, steps if options.steps is None else options.steps)
            print(f"{options.out / name}: policy and prompts.jsonl")
    except QuartetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
