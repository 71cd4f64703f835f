"""Results and logs of functions that were written for other trainers, which mean what they mean there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet.config.rewards import RewardSourceConfig
from quartet.contract.trajectory import Outcome, Scores
from quartet.errors import ConfigError, FunctionFailed
from quartet.rewards.function import FunctionReward
from tests.rewards.test_signatures import BATCH, ONE
from tests.unit.models import tiny

FUNCTIONS = """
import decimal, fractions
import numpy as np

class Torch:  # Its import takes seconds, and few functions need it.
    def __getattr__(self, name):
        import torch
        return getattr(torch, name)

torch = Torch()
VALUES = {
    "bools": lambda n: [True] * n,
    "numpy bools": lambda n: np.array([True] * n),
    "numpy scalars": lambda n: [np.float16(1)] * n,
    "tensor": lambda n: torch.ones(n),
    "column": lambda n: torch.ones(n, 1),
    "tensors": lambda n: [torch.tensor(1.0)] * n,
    "tensors of one": lambda n: [torch.tensor([1.0])] * n,
    "decimals": lambda n: [decimal.Decimal(1)] * n,
    "fractions": lambda n: [fractions.Fraction(1)] * n,
    "tuple": lambda n: (1.0,) * n,
    "generator": lambda n: (1.0 for _ in range(n)),
    "none": lambda n: [None] * n,
    "nan": lambda n: [float("nan")] * n,
    "infinity": lambda n: [float("inf")] * n,
    "complex": lambda n: [1j] * n,
    "strings": lambda n: ["1.0"] * n,
    "nested": lambda n: [[1.0]] * n,
    "numpy column": lambda n: np.ones((n, 1)),
    "scalar": lambda n: 1.0,
    "nothing": lambda n: None,
    "set": lambda n: {float(i) for i in range(n)},
    "keys": lambda n: {float(i): 1 for i in range(n)},
    "one for all": lambda n: [1.0],
}

def trl(completions, kind, **kwargs):
    return VALUES[kind[0]](len(completions))

def columns(completions, answer, trainer_state, log_metric, log_extra, level=None, **kwargs):
    log_metric("length/mean", np.float32(sum(map(len, completions)) / len(completions)))
    log_metric("steps", trainer_state.max_steps)
    log_extra("first", [text.split()[0] for text in completions])
    log_extra("short", [1])
    return [trainer_state.global_step + (a is None) for a in answer]

def missing(completions, trainer_state, **kwargs):
    return [trainer_state.epoch] * len(completions)

def logs_a_text(completions, log_metric, **kwargs):
    log_metric("found", "the response")

def talks(prompts, completions, **kwargs):
    return [float(p[-1]["role"] == "user" and c[0]["role"] == "assistant") for p, c in zip(prompts, completions)]

def sees(prompts, **kwargs):
    return [float(len(prompt)) for prompt in prompts]

def verl(solution_str, ground_truth, extra_info, **kwargs):
    if extra_info["kind"] == "tensor":
        return torch.tensor([1.0])
    values = {
        "bool": True, "numpy": np.bool_(True), "decimal": decimal.Decimal(1),
        "rich": {"score": True, "acc": np.bool_(True), "pred": None, "seen": {1}, "object": object(), "text": "w",
                 "list": [1, 2], "a b/c": 2, 3: 4},
        "none": None, "list": [1.0], "tuple": (1.0, {}), "no score": {"acc": 1.0}, "text": {"score": "1"},
        "infinity": {"score": float("inf")}, "turns": extra_info["num_turns"] / 2,
    }
    return values[extra_info["kind"]]

def openrlhf(queries, prompts, labels):
    assert queries[0].startswith(prompts[0])
    reward = np.array([float(labels[0] in queries[0])])
    return {"rewards": reward, "scores": reward, "extra_logs": {"dummy": reward / 2}}

async def slime(args, sample, **kwargs):
    assert (sample.response_length, sample.tokens[-1]) == (2, 10)
    return {"reward": args.scale * sample.metadata["weight"] * (sample.label in sample.response), "found": True}
"""
Start = Callable[..., FunctionReward]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    (tmp_path / "neighbours.py").write_text(FUNCTIONS)
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:

        def begin(name: str, signature: str, has_environment: bool = False, **settings: Any) -> FunctionReward:
            config = RewardSourceConfig(
                source="function", function=f"neighbours:{name}", signature=signature, **settings
            )
            reward = FunctionReward(config, str(tmp_path / "tokenizer"), "reward", 9, has_environment)
            stack.callback(reward.close)
            return reward

        yield begin


def test_the_values_of_a_trl_function_mean_what_they_mean_there(start: Start) -> None:
    """TRL calls torch.tensor(values, dtype=torch.float32), with NaN for None."""
    reward = start("trl", "trl")

    def scored(kind: str) -> Scores:
        return reward.score(BATCH, [json.dumps({"kind": kind})] * 2)

    for kind in (
        *("bools", "numpy bools", "numpy scalars", "tensor", "column", "tensors", "tensors of one", "decimals"),
        *("fractions", "tuple", "generator"),
    ):
        assert scored(kind).total.tolist() == [1.0, 1.0], kind
    for kind in ("none", "nan"):
        assert scored(kind).outcomes == (Outcome.REFUSED,) * 2
    remedy = "; return one number per completion, or None for one that it does not score"
    for kind, problem in {
        "infinity": "at index 0 returned inf, expected a finite number",
        "complex": "returned a list with a value of type complex at index 0, expected a list of 2 finite numbers",
        "strings": "at index 0 returned a string of 3 characters, expected a finite number",
        "nested": "at index 0 returned a list of 1, expected a finite number",
        "numpy column": "at index 0 returned a list of 1, expected a finite number",
        "scalar": "returned 1, expected a list of 2 finite numbers",
        "nothing": "returned None, expected a list of 2 finite numbers",
        "set": "returned a value of type set, expected a list of 2 finite numbers",
        "keys": "returned a dict of 2, expected a list of 2 finite numbers",
    }.items():
        with pytest.raises(FunctionFailed) as failed:
            scored(kind)
        assert str(failed.value).endswith(f"{problem}{remedy}"), kind
    with pytest.raises(ConfigError, match=r"returned a list of 1, .* return exactly one number for each response"):
        scored("one for all")


def test_a_trl_function_gets_columns_the_state_of_the_trainer_and_logs(start: Start) -> None:
    reward = start("columns", "trl")
    scores = reward.score(replace(BATCH, updates=4), ['{"answer": "w8"}', "{}"])
    assert scores.total.tolist() == [4.0, 5.0]
    assert scores.logged == (
        {"length_mean": 4.0, "steps": 9.0, "first": "w8"},
        {"length_mean": 4.0, "steps": 9.0, "first": "w9"},
    )


def test_a_column_of_other_lines_is_null_whatever_lines_are_in_the_batch(start: Start) -> None:
    assert start("columns", "trl").score(BATCH).total.tolist() == [1.0, 1.0]


def test_what_a_trl_function_cannot_have_or_log_is_named(start: Start) -> None:
    with pytest.raises(FunctionFailed, match="trainer_state has no epoch here; it has global_step, "):
        start("missing", "trl").score(BATCH)
    with pytest.raises(FunctionFailed, match=r"log_metric\('found'\): the value is a value of type str, expected a nu"):
        start("logs_a_text", "trl").score(BATCH)


def test_a_prompt_that_is_a_list_is_a_conversation(start: Start) -> None:
    line = json.dumps({"prompt": [{"role": "user", "content": "hi"}]})
    assert start("talks", "trl").score(BATCH, [line] * 2).total.tolist() == [1.0, 1.0]


def test_a_trl_function_sees_the_prompt_of_the_data(start: Start) -> None:
    assert start("sees", "trl").score(BATCH, ['{"text": "seven"}', '{"prompt": "four"}']).total.tolist() == [5.0, 4.0]


def test_the_values_of_a_verl_function_mean_what_they_mean_there(start: Start) -> None:
    reward = start("verl", "verl")

    def scored(kind: str) -> Scores:
        return reward.score(ONE, [json.dumps({"ground_truth": None, "extra_info": {"kind": kind}})])

    for kind in ("bool", "numpy", "tensor", "decimal", "rich", "turns"):
        assert scored(kind).total.tolist() == [1.0], kind
    assert scored("rich").logged == ({"acc": True, "text": "w", "list": "[1, 2]", "a_b_c": 2},)
    for kind, problem in {
        "none": "returned None",
        "list": "returned a list of 1",
        "tuple": "returned a list of 2",
        "no score": "returned a dict of 1 without 'score'",
        "text": "returned score a string of 1 characters",
        "infinity": "returned score inf",
    }.items():
        scores = scored(kind)
        assert scores.outcomes == (Outcome.SCORER_ERROR,)
        assert f"{problem}, expected a finite number or an object with score; return a number, or " in scores.details[0]


def test_a_verl_function_knows_no_number_of_turns_with_an_environment(start: Start) -> None:
    fields = [json.dumps({"ground_truth": 1, "extra_info": {"kind": "turns"}})]
    scores = start("verl", "verl", has_environment=True, quote_texts=True).score(ONE, fields)
    assert "NoneType" in scores.details[0]


def test_a_reward_func_of_openrlhf_is_called_as_there(start: Start) -> None:
    scores = start("openrlhf", "openrlhf").score(BATCH, ['{"label": "w8"}', '{"label": "w1 w1"}'])
    assert scores.total.tolist() == [1.0, 0.0]
    assert scores.logged == ({"scores": 1.0, "dummy": 0.5}, {"scores": 0.0, "dummy": 0.0})


def test_a_custom_rm_of_slime_is_called_as_there(start: Start) -> None:
    reward = start("slime", "slime", arguments={"scale": 0.5, "reward_key": "reward"})
    scores = reward.score(ONE, [json.dumps({"label": "w10", "metadata": {"weight": 4}})])
    assert scores.total.tolist() == [2.0]
    assert scores.logged == ({"found": True},)
