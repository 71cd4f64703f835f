"""Arguments and return values of reward functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quartet.config.rewards import RewardSourceConfig
from quartet.contract.status import Role
from quartet.contract.trajectory import Outcome, TokenBatch
from quartet.errors import Cancelled, ComputationFailed, ConfigError, InvalidRequest, ModelError
from quartet.rewards.function import FunctionReward
from tests.rewards.processes import children
from tests.unit.models import tiny

# Prompts "w5 w1 w6" and "w7", responses "w8 w1" and "w9 w10"; w1 is the EOS.
BATCH = TokenBatch(
    np.array([5, 1, 6, 8, 1, 7, 9, 10], np.int32), np.array([3, 1], np.int32), np.array([2, 2], np.int32)
)
SCORERS = """
import json, time
from pathlib import Path

def note(*arguments):
    with Path("calls").open("a") as file:
        file.write(json.dumps(arguments) + "\\n")

def words(prompt, response, fields):
    note(prompt, response, fields)
    return len(response.split()) + fields.get("bonus", 0)

def together(prompts, responses, fields):
    note(prompts, responses, fields)
    return [len(response.split()) for response in responses]

def given(prompt, response, fields):
    return {"nan": float("nan"), "infinity": float("-inf")}.get(str(fields["value"]), fields["value"])

def given_together(prompts, responses, fields):
    return fields[0]["value"]

def fails_at_w7(prompt, response, fields):
    if prompt == "w7":
        raise KeyError("answer")
    return 1

class WithOutcome(Exception):
    def __init__(self, outcome):
        self.outcome = outcome

def has_outcome(prompt, response, fields):
    raise WithOutcome((fields[0] if isinstance(fields, list) else fields)["outcome"])

def sleeps_at_w7(prompt, response, fields):
    if prompt == "w7" and not fields.get("awake"):
        time.sleep(60)
    return 1
"""
Start = Callable[..., FunctionReward]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return a function that starts function rewards. Check at the end that no process is left."""
    (tmp_path / "scorers.py").write_text(SCORERS)
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    monkeypatch.chdir(tmp_path)
    before = children()
    with ExitStack() as stack:

        def start(name: str, **settings: Any) -> FunctionReward:
            config = RewardSourceConfig(source="function", function=f"scorers:{name}", **settings)
            reward = FunctionReward(config, "./tokenizer")
            stack.callback(reward.close)
            return reward

        yield start
    assert children() <= before


def calls() -> list[Any]:
    return [json.loads(line) for line in Path("calls").read_text().splitlines()]


def test_a_function_gets_prompt_with_special_tokens_response_and_fields(start: Start) -> None:
    fields = ['{"bonus": 0.5, "answer": ["x", {"y": null}]}', "{}"]
    scores = start("words").score(BATCH, fields)
    assert (scores.total.dtype, scores.total.tolist(), scores.parts) == (np.float32, [1.5, 2.0], {})
    assert calls() == [["w5 w1 w6", "w8", json.loads(fields[0])], ["w7", "w9 w10", {}]]


def test_a_batched_function_is_called_once_with_lists(start: Start) -> None:
    assert start("together", batched=True).score(BATCH).total.tolist() == [1.0, 2.0]
    assert calls() == [[["w5 w1 w6", "w7"], ["w8", "w9 w10"], [{}, {}]]]


def test_without_fields_a_function_gets_empty_objects(start: Start) -> None:
    start("words").score(BATCH)
    assert [fields for _, _, fields in calls()] == [{}, {}]


def test_unknown_token_ids_have_no_text_and_negative_ids_are_refused(start: Start) -> None:
    reward = start("words")
    ids = np.array([5, 61, 8, 2**31 - 1, 9], np.int32)
    lengths = np.array([2], np.int32), np.array([3], np.int32)
    reward.score(TokenBatch(ids, *lengths))
    assert calls() == [["w5", "w8 w9", {}]]
    with pytest.raises(InvalidRequest, match="token_ids: found -1"):
        reward.score(TokenBatch(np.array([5, 6, 8, -1, 9], np.int32), *lengths))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "None"),
        (True, "True"),
        ("the response", "a string of 12 characters"),
        ([1.0], "a list of 1"),
        ({}, "a dict of 0"),
        ("nan", "nan"),
        ("infinity", "-inf"),
        (1e39, "1e+39, beyond float32"),
        (10**400, "an integer beyond float32"),
    ],
)
def test_a_score_that_is_not_a_finite_number_is_a_scorer_error(value: Any, expected: str, start: Start) -> None:
    reward = start("given")
    scores = reward.score(BATCH, ['{"value": 2}', json.dumps({"value": value})])
    assert scores.outcomes == (Outcome.OK, Outcome.SCORER_ERROR)
    assert scores.details == (
        "",
        f"reward.function scorers:given, sequence index 1: returned {expected}, expected a finite number; "
        "return a number, for example 0.0",
    )
    np.testing.assert_array_equal(scores.total, np.array([2, np.nan], np.float32))
    assert reward.score(BATCH, ['{"value": 2}', '{"value": -0.25}']).total.tolist() == [2.0, -0.25]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0, "a batch of 2: returned 1, expected a list of 2 finite numbers"),
        ({"a": 1, "b": 2}, "a batch of 2: returned a dict of 2, expected a list of 2 finite numbers"),
        ([1.0, None], "a batch of 2: at index 1 returned None, expected a finite number"),
        ([False, 1.0], "a batch of 2: at index 0 returned False, expected a finite number"),
    ],
)
def test_a_batched_function_must_return_a_finite_number_per_sequence(value: Any, expected: str, start: Start) -> None:
    reward = start("given_together", batched=True)
    with pytest.raises(ComputationFailed) as failed:
        reward.score(BATCH, [json.dumps({"value": value}), "{}"])
    assert str(failed.value).startswith(f"reward.function scorers:given_together, {expected}; ")
    assert reward.score(BATCH, ['{"value": [1, 2.5]}', "{}"]).total.tolist() == [1.0, 2.5]


@pytest.mark.parametrize("value", [[], [1.0], [1.0, 2.0, 3.0]])
def test_a_list_of_the_wrong_length_ends_the_run(value: Any, start: Start) -> None:
    """One by one, a function that returns one value for all would pass."""
    reward = start("given_together", batched=True)
    with pytest.raises(ConfigError) as failed:
        reward.score(BATCH, [json.dumps({"value": value}), "{}"])
    assert str(failed.value) == (
        f"reward.function scorers:given_together, a batch of 2: returned a list of {len(value)}, expected a list of 2 finite "
        "numbers; return exactly one number for each response"
    )


def test_an_exception_is_reported_with_function_and_sequence_but_without_its_text(start: Start) -> None:
    scores = start("fails_at_w7").score(BATCH)
    [detail] = filter(None, scores.details)
    assert detail.startswith("reward.function scorers:fails_at_w7 raised KeyError at scorers.py:")
    assert "w7" not in detail.replace("fails_at_w7", "")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sandbox_error", Outcome.SANDBOX_ERROR),
        ("refused", Outcome.REFUSED),
        ("timeout", Outcome.TIMEOUT),
        ("ok", Outcome.SCORER_ERROR),
        ("unknown", Outcome.SCORER_ERROR),
        (3, Outcome.SCORER_ERROR),
    ],
)
@pytest.mark.parametrize("batched", [False, True])
def test_an_exception_may_name_its_outcome(name: Any, expected: Outcome, batched: bool, start: Start) -> None:
    reward = start("has_outcome", batched=batched)
    one = TokenBatch(np.array([5, 6], np.int32), np.array([1], np.int32), np.array([1], np.int32))
    scores = reward.score(one, [json.dumps({"outcome": name})])
    assert scores.outcomes == (expected,)
    assert np.isnan(scores.total).all()


def test_a_batched_function_that_fails_for_one_sequence_has_its_outcome(start: Start) -> None:
    one = TokenBatch(np.array([5, 6], np.int32), np.array([1], np.int32), np.array([1], np.int32))
    scores = start("given_together", batched=True).score(one, ['{"value": [true]}'])
    assert scores.outcomes == (Outcome.SCORER_ERROR,)


def test_the_timeout_applies_to_each_call_and_the_next_batch_is_scored(start: Start) -> None:
    reward = start("sleeps_at_w7", timeout_seconds=0.5)
    scores = reward.score(BATCH)
    assert scores.outcomes == (Outcome.OK, Outcome.TIMEOUT)
    assert "sequence index 1: took longer than 0.5 s" in scores.details[1]
    assert reward.score(BATCH, ['{"awake": 1}'] * 2).total.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (["{}"], r"fields: expected none, or one for each of the 2 sequences, got 1"),
        (["{}"] * 3, r"got 3"),
        (["{}", "[1]"], r"fields\[1\]: found list, expected a JSON object"),
        (["", "{}"], r"fields\[0\]: not JSON"),
        (["{}", '{"a": secret}'], r"fields\[1\]: not JSON \(Expecting value\), expected a JSON object$"),
        (["{}", '{"a": NaN}'], r"fields\[1\]: not JSON \(NaN is not a number\)"),
        (["[" * 100_000, "{}"], r"fields\[0\]: not JSON"),
    ],
)
def test_malformed_fields_are_refused_before_the_function_is_called(
    fields: list[str], expected: str, start: Start
) -> None:
    with pytest.raises(InvalidRequest, match=expected):
        start("words").score(BATCH, fields)
    assert not Path("calls").exists()


def test_a_cancelled_batch_makes_no_further_calls(start: Start) -> None:
    with pytest.raises(Cancelled, match="scorers:words: cancelled by its caller"):
        start("words").score(BATCH, cancelled=lambda: Path("calls").exists())
    assert len(calls()) == 1


def test_the_status_names_the_function_and_its_tokenizer(start: Start) -> None:
    status = start("words").status()
    assert (status.role, status.model, status.device) == (Role.REWARD, "scorers:words", "cpu")
    assert (status.parameters, status.vocabulary_size, status.max_sequence_tokens) == (0, tiny.VOCABULARY, 0)
    assert len(status.tokenizer_fingerprint) == 64


def test_a_missing_function_or_tokenizer_is_an_error_that_the_user_can_fix(start: Start) -> None:
    with pytest.raises(
        ConfigError, match=r"reward.function scorers:word: module scorers has no word; did you mean words"
    ):
        start("word")
    config = RewardSourceConfig(source="function", function="scorers:words")
    with pytest.raises(ModelError, match="no such directory"):
        FunctionReward(config, "./elsewhere")
