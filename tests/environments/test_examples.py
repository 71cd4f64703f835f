"""The example environments."""

from __future__ import annotations

import json
import time

import pytest

from quartet.environments.examples import Calculator, GuessingGame, WordPuzzle
from quartet.environments.tools import ToolEnvironment


def test_the_guessing_game_says_higher_or_lower() -> None:
    game = GuessingGame(1, 9, prompt="guess")
    assert game.reset(1, {"number": 5}) == "guess"
    assert game.step("3") == ("higher", 0.0, False)
    assert game.step("I say 8.") == ("lower", 0.0, False)
    assert game.step(" 5\n") == (None, 1.0, True)


def test_a_turn_without_a_number_ends_the_guessing_game() -> None:
    game = GuessingGame()
    game.reset(1, {})
    assert game.step("what") == (None, 0.0, True)


def test_the_seed_decides_the_number_of_the_guessing_game() -> None:
    def number(seed: int) -> int:
        game = GuessingGame(1, 9)
        game.reset(seed, {})
        return next(guess for guess in range(1, 10) if game.step(str(guess))[1])

    numbers = [number(seed) for seed in range(200)]
    assert numbers == [number(seed) for seed in range(200)]
    assert set(numbers) == set(range(1, 10))


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("17+25", "42"),
        ("2 * (3 - 10)", "-14"),
        ("7 / 2", "3.5"),
        ("7 // 2 + 7 % 2", "4"),
        ("-(1.5)", "-1.5"),
        ("9 / 3", "3"),
        ("1/0", "error: ZeroDivisionError: division by zero"),
        ("2**9999999", "error: ValueError: not an expression of numbers"),
        ("9" * 40, "error: ValueError: a number is too large"),
        ("__import__('os')", "error: ValueError: not an expression of numbers"),
        ("'a' * 1000000", "error: ValueError: not an expression of numbers"),
        ("(" * 900, "error: ValueError: not an expression of numbers"),
        ("1+" * 600 + "1", "error: ValueError: more than 1000 characters"),
        ("x", "error: ValueError: not an expression of numbers"),
        ("", "error: ValueError: not an expression of numbers"),
    ],
)
def test_the_calculator_computes_and_evaluates_no_code(expression: str, expected: str) -> None:
    start = time.monotonic()
    environment = ToolEnvironment("quartet.environments.examples:Calculator", messages=False)
    environment.reset(1, {"answer": 42})
    content = json.dumps({"name": "calculate", "arguments": {"expression": expression}})
    turn = f"<tool_call>{content}</tool_call>"
    assert environment.step(turn) == (expected, 0.0, False)
    assert time.monotonic() - start < 1


@pytest.mark.parametrize(("answer", "score"), [("42", 1.0), ("It is 42.", 1.0), ("42 or 43", 0.0), ("none", 0.0)])
def test_the_last_number_of_an_answer_counts(answer: str, score: float) -> None:
    calculator = Calculator()
    calculator.start(1, {"answer": 42})
    assert calculator.score(answer) == score


def test_the_word_puzzle_rewards_progress_once() -> None:
    puzzle = WordPuzzle(["cat"], turns=4)
    assert puzzle.reset(1, {}) == "___"
    assert puzzle.step("cot") == ("c_t", pytest.approx(2 / 3), False)
    assert puzzle.step("cut") == ("c_t", 0.0, False)
    assert puzzle.step("Cat!") == ("cat", pytest.approx(1 / 3), True)


def test_the_word_puzzle_ends_after_its_turns() -> None:
    puzzle = WordPuzzle(["cat"], turns=1)
    puzzle.reset(1, {})
    assert puzzle.step("dog") == ("___", 0.0, True)
