"""Example environments: a guessing game, a calculator, and a word puzzle with partial rewards.

They show the three kinds: a game in plain text, tools, and rewards for progress. Each is deterministic for a seed.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from typing import Any

from quartet.environments.environment import Environment, Observation
from quartet.environments.tools import Toolset, tool


class GuessingGame(Environment):
    """The policy guesses a number and learns after each turn whether it is higher or lower."""

    def __init__(
        self, low: int = 1, high: int = 7, prompt: str = "", higher: str = "higher", lower: str = "lower"
    ) -> None:
        """The number is in low..high. ``prompt`` is the first observation, ``higher`` and ``lower`` are the answers."""
        if low > high:
            raise ValueError(f"low {low}: expected at most high {high}")
        self._low, self._high, self._prompt, self._answers = low, high, prompt, (higher, lower)
        self._number = low

    def reset(self, seed: int, fields: dict[str, Any]) -> Observation:
        """Choose the number by the seed, or take the field ``number``."""
        number = fields.get("number")
        self._number = number if isinstance(number, int) else random.Random(seed).randint(self._low, self._high)
        return self._prompt

    def step(self, text: str) -> tuple[Observation, float, bool]:
        """Reward 1 for the number. A turn without a number ends the game."""
        guess = re.search(r"-?\d{1,9}", text)
        if guess is None:
            return None, 0.0, True
        difference = self._number - int(guess.group())
        if difference == 0:
            return None, 1.0, True
        return self._answers[difference < 0], 0.0, False

    def snapshot(self) -> Any:
        """Return the number."""
        return self._number

    def restore(self, seed: int, fields: dict[str, Any], state: Any) -> None:
        """Take the number."""
        self._number = state


class Calculator(Toolset):
    """A calculator for ToolEnvironment. The prompt's field ``answer`` is the number that scores 1."""

    def __init__(self) -> None:
        self._answer = ""

    def start(self, seed: int, fields: dict[str, Any]) -> Observation:
        """Remember the answer."""
        self._answer = str(fields["answer"]).strip()
        return None

    @tool
    def calculate(self, expression: str) -> str:
        """Compute an expression of numbers with + - * / // % and parentheses."""
        return _shown(_value(expression))

    def snapshot(self) -> Any:
        """Return {}: the tool changes nothing."""
        return {}

    def score(self, answer: str) -> float:
        """Return 1 if the last number of the answer is the expected one, else 0."""
        numbers = re.findall(r"-?\d+(?:\.\d+)?", answer)
        return float(bool(numbers) and numbers[-1] == self._answer)


class WordPuzzle(Environment):
    """The policy guesses a word of the list, letter places are shown, and each newly placed letter is rewarded.

    The observation is the word with its known letters, such as "c_t". The rewards of an episode sum up to at most 1.
    """

    WORDS = ("cat", "cot", "dog", "dig", "hat", "hot", "pen", "pin", "sun", "son")

    def __init__(self, words: list[str] | None = None, turns: int = 4) -> None:
        """``words`` are of one length. The episode ends after ``turns`` turns."""
        self._words, self._turns = tuple(words or self.WORDS), turns
        if len({len(word) for word in self._words}) != 1 or not self._words[0]:
            raise ValueError("words: expected words of one length")
        self._word, self._known, self._turn = "", set[int](), 0

    def reset(self, seed: int, fields: dict[str, Any]) -> Observation:
        """Choose the word by the seed."""
        self._word = random.Random(seed).choice(self._words)
        return self._shown()

    def step(self, text: str) -> tuple[Observation, float, bool]:
        """Reward each letter that is placed for the first time."""
        self._turn += 1
        guess = "".join(re.findall(r"[a-z]", text.lower()))[: len(self._word)]
        placed = {index for index, letter in enumerate(guess) if letter == self._word[index]} - self._known
        self._known |= placed
        done = len(self._known) == len(self._word) or self._turn >= self._turns
        return self._shown(), len(placed) / len(self._word), done

    def snapshot(self) -> Any:
        """Return the word, the places of the known letters, and the number of turns."""
        return [self._word, sorted(self._known), self._turn]

    def restore(self, seed: int, fields: dict[str, Any], state: Any) -> None:
        """Take the word, the places of the known letters, and the number of turns."""
        self._word, known, self._turn = state
        self._known = set(known)

    def _shown(self) -> str:
        return "".join(letter if index in self._known else "_" for index, letter in enumerate(self._word))


_OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_MAX_NUMBER, _MAX_CHARACTERS = 10**30, 1000
"""Limits of numbers and of an expression, so that no expression takes long."""


def _value(expression: str) -> int | float:
    """Compute an expression without evaluating code. Raises ValueError for anything else than arithmetic."""
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"more than {_MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
        return _compute(tree)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("not an expression of numbers") from None


def _compute(node: ast.AST) -> int | float:
    result: int | float
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        result = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result = _OPERATORS[type(node.op)](_compute(node.left), _compute(node.right))
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        result = _OPERATORS[type(node.op)](_compute(node.operand))
    else:
        raise ValueError("not an expression of numbers")
    if not abs(result) <= _MAX_NUMBER:
        raise ValueError("a number is too large")
    return result


def _shown(value: int | float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else str(value)
