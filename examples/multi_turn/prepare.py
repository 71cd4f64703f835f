"""Create the models and prompts of the multi-turn examples, from nothing, in about a minute on one core.

    python examples/multi_turn/prepare.py runs/multi-turn

writes policy and prompts.jsonl to OUT/guessing, OUT/calculator and OUT/puzzle, or to those named by --games. Each policy is a
small Llama that has learned episodes with errors: it often guesses without regard to the answers, and calls the calculator
wrongly.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quartet.demo import pretraining
from quartet.demo.pretraining import Schedule, Shape
from quartet.environments.examples import WordPuzzle
from quartet.errors import QuartetError
from quartet.system.durable_files import staged_directory

EPISODES = 4000
SHAPE = Shape(hidden=64, layers=2, heads=4, positions=160)
HIGH, TURNS = 7, 3
HIGHER, LOWER = " higher :", " lower :"
"""Limits and answers of the game, as in guessing.yaml."""
PROMPT = f"guess a number from 1 to {HIGH} :"
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "%s"}}</tool_call>'
PUZZLE_PROMPT, PUZZLE_TURNS = "find the word :", 3
ATTENTIVE = 0.3
"""Fraction of guesses that regard the answers so far."""
NUMBERS = (2, 12)
"""Range of the numbers that the calculator multiplies."""
DIRECT, CORRECT = 0.15, 0.8
"""Fraction of episodes that answer without the tool, and of calls and copies without an error."""


@dataclass(frozen=True, slots=True)
class Episode:
    """Texts of one episode: the prompt, then turns of the policy, each with the observation after it, empty at the end.

    ``opening`` is the observation before the first turn.
    """

    prompt: str
    turns: tuple[tuple[str, str], ...]
    opening: str = ""


def guessing(draw: random.Random) -> Episode:
    """Return an episode of random guesses with true answers. ATTENTIVE of the guesses are possible numbers."""
    number, turns = draw.randint(1, HIGH), []
    low, high = 1, HIGH
    for turn in range(TURNS):
        guess = draw.randint(low, high) if draw.random() < ATTENTIVE else draw.randint(1, HIGH)
        ends = guess == number or turn == TURNS - 1
        turns.append((f" {guess}", "" if ends else HIGHER if number > guess else LOWER))
        if ends:
            break
        low, high = (max(low, guess + 1), high) if number > guess else (low, min(high, guess - 1))
    return Episode(PROMPT, tuple(turns))


def calculation(draw: random.Random) -> tuple[str, str, int]:
    """Return a prompt, its expression and its answer."""
    one, other = draw.randint(*NUMBERS), draw.randint(*NUMBERS)
    return f"{one} * {other} =", f"{one} * {other}", one * other


def calculating(draw: random.Random) -> Episode:
    """Return an episode that guesses the answer, or calls the calculator, with errors."""
    prompt, expression, answer = calculation(draw)
    if draw.random() < DIRECT:
        return Episode(prompt, ((f" {calculation(draw)[2]}", ""),))
    if draw.random() > CORRECT:
        _, expression, answer = calculation(draw)
    copied = answer if draw.random() < CORRECT else calculation(draw)[2]
    return Episode(prompt, ((CALL % expression, f" {answer}"), (f" {copied}", "")))


def puzzling(draw: random.Random) -> Episode:
    """Return an episode of random words. ATTENTIVE of them fit the letters that are shown."""
    puzzle = WordPuzzle(turns=PUZZLE_TURNS)
    opening = shown = puzzle.reset(draw.getrandbits(32), {})
    turns, done = [], False
    while not done:
        fits = [word for word in puzzle.WORDS if all(s in ("_", c) for s, c in zip(str(shown), word, strict=True))]
        word = draw.choice(fits if draw.random() < ATTENTIVE else puzzle.WORDS)
        shown, _, done = puzzle.step(word)
        turns.append((f" {word}", "" if done else str(shown)))
    return Episode(PUZZLE_PROMPT, tuple(turns), str(opening))


def prepare(
    folder: Path, play: Callable[[random.Random], Episode], prompts: list[dict[str, object]], steps: int
) -> None:
    """Write a policy that has learned episodes of ``play``, and prompts."""
    draw = random.Random(0)
    episodes = [play(draw) for _ in range(EPISODES)]
    texts = [
        text
        for episode in episodes
        for text in (episode.prompt, episode.opening, *(part for turn in episode.turns for part in turn))
    ]
    tokenizer = pretraining.train_tokenizer([text for text in texts if text], 512)

    def ids(episode: Episode) -> list[int]:
        # Each part is encoded separately, as in a run. A turn ends with EOS.
        result = list(pretraining.encode(tokenizer, [episode.prompt], eos=False)[0])
        if episode.opening:
            result += pretraining.encode(tokenizer, [episode.opening], eos=False)[0]
        for turn, observation in episode.turns:
            result += pretraining.encode(tokenizer, [turn], eos=True)[0]
            if observation:
                result += pretraining.encode(tokenizer, [observation], eos=False)[0]
        return result

    schedule = Schedule(steps=steps, batch_sequences=32, learning_rate=5e-3, weight_decay=0.0)
    policy = pretraining.train_causal_lm([ids(episode) for episode in episodes], tokenizer, SHAPE, schedule, seed=0)
    pretraining.save_checkpoint(policy, tokenizer, folder / "policy")
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(prompt) + "\n" for prompt in prompts)


def calculator_prompts() -> list[dict[str, object]]:
    """Return 512 prompts with their answers."""
    draw = random.Random(1)
    return [{"text": prompt, "answer": answer} for prompt, _, answer in (calculation(draw) for _ in range(512))]


GAMES: dict[str, tuple[Callable[[random.Random], Episode], Callable[[], list[dict[str, object]]]]] = {
    "guessing": (guessing, lambda: [{"text": PROMPT}] * 256),
    "calculator": (calculating, calculator_prompts),
    "puzzle": (puzzling, lambda: [{"text": PUZZLE_PROMPT}] * 256),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the program. The exit status is 0, or 2 for invalid input, with one line on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--games", nargs="+", choices=GAMES, default=list(GAMES), help="what to create (default all)")
    parser.add_argument("--steps", type=int, default=600, help="training steps of each policy")
    options = parser.parse_args(arguments)
    try:
        for name in options.games:
            play, prompts = GAMES[name]
            options.out.mkdir(parents=True, exist_ok=True)
            with staged_directory(options.out / name) as folder:
                prepare(folder, play, prompts(), options.steps)
            print(f"{options.out / name}: policy and prompts.jsonl")
    except QuartetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
