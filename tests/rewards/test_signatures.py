"""Functions written for TRL and verl, as they are, and keyword arguments of the config."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quartet.config.rewards import RewardSourceConfig
from quartet.contract.trajectory import Outcome, TokenBatch
from quartet.rewards.function import FunctionReward
from tests.unit.models import tiny

# Prompts "w5 w1 w6" and "w7", responses "w8 w1" and "w9 w10"; w1 is the EOS.
BATCH = TokenBatch(
    np.array([5, 1, 6, 8, 1, 7, 9, 10], np.int32), np.array([3, 1], np.int32), np.array([2, 2], np.int32)
)
ONE = TokenBatch(np.array([7, 9, 10], np.int32), np.array([1], np.int32), np.array([2], np.int32))
FUNCTIONS = """
import asyncio, json
from pathlib import Path

def note(**arguments):
    with Path("calls").open("a") as file:
        file.write(json.dumps(arguments, sort_keys=True) + "\\n")

# As in TRL's documentation: keyword arguments, columns of the data set as lists.
def reward_len(completions, **kwargs):
    assert callable(kwargs.pop("log_metric")) and callable(kwargs.pop("log_extra"))
    note(completions=completions, **{**kwargs, "trainer_state": kwargs["trainer_state"].global_step})
    return [float(len(completion)) for completion in completions]

def accuracy_reward(prompts, completions, answer, **kwargs):
    return [None if a is None else float(c.split()[-1] == a) for c, a in zip(completions, answer)]

def format_reward(completions, **kwargs):
    return [float(len(completion[0]["content"])) for completion in completions]

async def later(completions, **kwargs):
    await asyncio.sleep(0)
    return [1.0] * len(completions)

# As in verl: one response, by keyword.
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    note(data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info)
    return {"score": float(solution_str.split()[-1] == ground_truth) + bonus, "acc": True}

def plain(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth)

def own(prompt, response, fields, scale, words=()):
    return scale * len(response.split()) + len(words)
"""
Start = Callable[..., FunctionReward]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    (tmp_path / "scorers.py").write_text(FUNCTIONS)
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:

        def begin(name: str, **settings: Any) -> FunctionReward:
            config = RewardSourceConfig(source="function", function=f"scorers:{name}", **settings)
            reward = FunctionReward(config, str(tmp_path / "tokenizer"))
            stack.callback(reward.close)
            return reward

        yield begin


def calls() -> list[Any]:
    return [json.loads(line) for line in Path("calls").read_text().splitlines()]


def test_a_trl_function_gets_lists_by_keyword_and_every_column(start: Start) -> None:
    lines = ['{"prompt": "one", "answer": "w8", "level": 3}', '{"prompt": "two"}']
    assert start("reward_len", signature="trl").score(BATCH, lines).total.tolist() == [2.0, 6.0]
    [call] = calls()
    assert call == {
        "prompts": ["one", "two"],
        "completions": ["w8", "w9 w10"],
        "completion_ids": [[8, 1], [9, 10]],
        "answer": ["w8", None],
        "level": [3, None],
        "trainer_state": 0,
    }


def test_a_trl_function_of_a_conversation_gets_messages(start: Start) -> None:
    line = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
    assert start("format_reward", signature="trl").score(BATCH, [line, line]).total.tolist() == [2.0, 6.0]


def test_none_of_a_trl_function_is_a_refusal(start: Start) -> None:
    scores = start("accuracy_reward", signature="trl").score(BATCH, ['{"answer": null}', '{"answer": "w10"}'])
    assert scores.outcomes == (Outcome.REFUSED, Outcome.OK)
    assert np.isnan(scores.total[0])
    assert scores.total[1] == 1.0


def test_an_async_function_is_awaited(start: Start) -> None:
    assert start("later", signature="trl").score(BATCH).total.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "line",
    [
        {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "w10"}, "extra_info": {"index": 3}},
        {"data_source": "openai/gsm8k", "ground_truth": "w10", "extra_info": {"index": 3}},
    ],
)
def test_a_verl_function_gets_the_columns_of_its_data_sets(line: dict[str, Any], start: Start) -> None:
    scores = start("compute_score", signature="verl", arguments={"bonus": 0.25}).score(ONE, [json.dumps(line)])
    assert scores.total.tolist() == [1.25]
    assert calls() == [
        {
            "data_source": "openai/gsm8k",
            "solution_str": "w9 w10",
            "ground_truth": "w10",
            "extra_info": {"index": 3, "num_turns": 2, "rollout_reward_scores": {}},
        }
    ]


def test_a_verl_function_may_return_a_number(start: Start) -> None:
    assert start("plain", signature="verl").score(ONE, ['{"ground_truth": "w9 w10"}']).total.tolist() == [1.0]


def test_a_line_without_the_truth_is_no_score_of_0(start: Start) -> None:
    scores = start("compute_score", signature="verl").score(BATCH, ['{"ground_truth": "w8"}', "{}"])
    assert scores.outcomes == (Outcome.OK, Outcome.SCORER_ERROR)
    assert "neither ground_truth nor reward_model.ground_truth" in scores.details[1]


def test_arguments_of_the_config_are_passed_by_name(start: Start) -> None:
    reward = start("own", arguments={"scale": 0.5, "words": ["a", "b"]})
    assert reward.score(BATCH).total.tolist() == [2.5, 3.0]


def test_arguments_that_the_function_does_not_take_are_named(start: Start) -> None:
    scores = start("own", arguments={"scale": 1, "size": 2}, quote_texts=True).score(BATCH)
    assert set(scores.outcomes) == {Outcome.SCORER_ERROR}
    assert "unexpected keyword argument 'size', called with 3 arguments and scale, size by name" in scores.details[0]
