"""The example functions of quartet.rewards.examples, called as in the README of examples/rewards."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.system.user_function import FunctionWorker

ROOT = Path(__file__).parents[2]
README = (ROOT / "examples/rewards/README.md").read_text(encoding="utf-8")


def configs() -> list[Config]:
    """Return the configs of the README."""
    common = {"data": {"prompts": "none.jsonl"}, "actor": {"model": "policy"}, "reward": {"model": "reward"}}
    blocks = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    return [parse_config({**common, **yaml.safe_load(block)}, "README") for block in blocks]


def call(name: str, arguments: list[Any]) -> Any:
    with closing(FunctionWorker(f"quartet.rewards.examples:{name}", "reward.function")) as worker:
        return worker.call(arguments, 30)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run outside the checkout, as a user of the wheel does."""
    monkeypatch.chdir(tmp_path)


def test_every_function_in_the_readme_can_be_imported() -> None:
    sources = [source for config in configs() for source in config.reward.sources.values()]
    judges = [config.evaluation.judge for config in configs() if config.evaluation.judge]
    functions = [source.function for source in sources if source.function] + judges
    ours = [function for function in functions if function.startswith("quartet.")]
    assert len(ours) == 4
    for function in ours:
        FunctionWorker(function, "reward.function").close()


@pytest.mark.parametrize(
    ("response", "expected"),
    [("6 times 7 is 42.", 1.0), ("It is 42, or 43", 0.0), ("1,042.0", 0.0), ("who knows", -0.5), ("42.0!", 1.0)],
)
def test_the_last_number_of_a_response_is_compared_with_the_answer(response: str, expected: float) -> None:
    assert call("final_number", ["What is 6 times 7?", response, {"answer": 42}]) == expected


def test_a_length_near_the_target_scores_higher() -> None:
    scores = [call("length_target", ["", "word " * words, {"words": 4}]) for words in (4, 5, 3, 8)]
    assert scores[0] == 1
    assert scores[0] > scores[1] == scores[2] > scores[3] > 0


def test_keywords_are_counted_in_a_batch() -> None:
    fields = [{"keywords": ["Sea", "ship"]}, {"keywords": ["sea", "ship"]}, {}]
    assert call("keywords", [["", "", ""], ["A ship at sea", "The SEA", "x"], fields]) == [1.0, 0.5, 0.0]


@pytest.mark.parametrize(("response", "verdict"), [("a", 1.0), ("a b c", 0.0), ("c d", 0.5)])
def test_the_judge_prefers_the_shorter_response(response: str, verdict: float) -> None:
    assert call("shorter", ["", response, "a b", {}]) == verdict


def test_no_message_or_page_names_a_function_that_is_not_installed() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    code = [path for folder in ("src", "services", "gateway") for path in (ROOT / folder).rglob("*.py")]
    named = re.compile(r"(?<![\w.])(?:examples|tests|benchmarks)(?:\.\w+)+:\w+")
    assert [path.name for path in pages + code if named.search(path.read_text(encoding="utf-8"))] == []
