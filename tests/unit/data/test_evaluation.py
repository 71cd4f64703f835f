"""Evaluation: metrics, compared with independent formulas, rows, and verdicts of the judge."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quartet.config.loading import parse_config
from quartet.config.rollout import RolloutConfig
from quartet.config.root import Config
from quartet.contract.generation import SamplingParameters, requests_of
from quartet.contract.trajectory import FinishReason, Prompt, Trajectory, TrajectoryId
from quartet.data.evaluation import (
    STEP,
    Comparison,
    Judge,
    PromptResponses,
    Response,
    compare,
    greedy_sampling,
    read_validation_prompts,
    responses_of,
    row,
    run_sampling,
    stream_name,
    summarize,
    win,
)
from quartet.errors import ComputationFailed, ConfigError, DataError
from tests.unit.models import tiny


def answers(number: int, generator: np.random.Generator) -> PromptResponses:
    """Return random responses. Two thirds of the scores are small integers, so that ties occur."""

    def response(kind: str, kl: float | None) -> Response:
        score = float(generator.integers(-1, 2)) if number % 3 else float(generator.normal())
        tokens = int(generator.integers(1, 30))
        return Response(f"{kind} {number}", score, tokens, bool(generator.integers(2)), kl)

    return PromptResponses(f"prompt {number}", response("greedy", None), response("sampled", float(generator.normal())))


def comparisons(count: int = 41, judged: bool = True) -> list[Comparison]:
    generator = np.random.default_rng(5)
    return [
        Comparison(
            number,
            answers(number, generator),
            answers(number, generator),
            float(generator.integers(0, 3)) / 2 if judged else None,
        )
        for number in range(count)
    ]


def test_metrics_are_means_over_the_prompts() -> None:
    result = comparisons()

    def column(kind: str, name: str, whose: str = "policy") -> Any:
        return np.array([getattr(getattr(getattr(item, whose), kind), name) for item in result], np.float64)

    def wins(kind: str) -> float:
        difference = column(kind, "score") - column(kind, "score", "initial")
        assert {-1.0, 0.0, 1.0} == set(np.sign(difference)), "there must be losses, ties and wins"
        return float((np.sign(difference) + 1).sum() / 2 / len(result))

    expected = {
        "eval_reward_greedy": column("greedy", "score").mean(),
        "eval_reward_sampled": column("sampled", "score").mean(),
        "eval_kl": column("sampled", "kl").mean(),
        "eval_tokens_greedy": column("greedy", "tokens").mean(),
        "eval_tokens_sampled": column("sampled", "tokens").mean(),
        "eval_eos_rate": column("sampled", "finished").mean(),
        "eval_win_rate_greedy": wins("greedy"),
        "eval_win_rate_sampled": wins("sampled"),
        "eval_judge_win_rate": np.mean([item.judge for item in result]),
    }
    assert summarize(result) == pytest.approx(expected, abs=1e-12)
    assert len({round(value, 6) for value in expected.values()}) == len(expected), (
        "the metrics must differ, so that a mix-up shows"
    )


def test_without_a_judge_there_is_no_judge_win_rate() -> None:
    assert "eval_judge_win_rate" not in summarize(comparisons(judged=False))


def unscored(responses: PromptResponses) -> PromptResponses:
    greedy, sampled = replace(responses.greedy, score=None), replace(responses.sampled, score=None)
    return replace(responses, greedy=greedy, sampled=sampled)


def test_without_scores_there_are_no_means_of_scores_and_records_can_be_read_back() -> None:
    items = [replace(item, policy=unscored(item.policy), initial=unscored(item.initial)) for item in comparisons()]
    names = {"eval_kl", "eval_tokens_greedy", "eval_tokens_sampled", "eval_eos_rate", "eval_judge_win_rate"}
    assert summarize(items).keys() == names
    rows = [json.loads(json.dumps(row(item))) for item in items]
    assert responses_of(rows, "test") == {item.index: item.policy for item in items}


@pytest.mark.parametrize(("score", "other", "expected"), [(1.0, 0.5, 1.0), (0.5, 0.5, 0.5), (-1.0, 0.5, 0.0)])
def test_a_tie_counts_as_half_a_win(score: float, other: float, expected: float) -> None:
    assert win(score, other) == expected


def test_a_non_finite_metric_is_an_error() -> None:
    damaged = comparisons(3)
    policy = damaged[1].policy
    damaged[1] = replace(damaged[1], policy=replace(policy, greedy=replace(policy.greedy, score=float("nan"))))
    with pytest.raises(ComputationFailed, match="eval_reward_greedy is nan"):
        summarize(damaged)


def trajectory(finish: FinishReason) -> Trajectory:
    log_probs = np.array([-0.5, -1e-3, -7.25], np.float32)
    return Trajectory.of_response(
        TrajectoryId("r", 0, 1, 0), 4, np.array([1], np.int32), np.array([5, 6, 1], np.int32), log_probs, finish
    )


def test_kl_is_a_sum_of_log_ratios_and_none_for_greedy_responses() -> None:
    reference = np.array([-0.25, -2.0, -7.0], np.float32)
    sampled = Response.of(trajectory(FinishReason.EOS), "text", 1.5, reference)
    expected = sum(float(ours) - float(theirs) for ours, theirs in zip((-0.5, -1e-3, -7.25), reference, strict=True))
    assert sampled == Response("text", 1.5, 3, True, pytest.approx(expected, rel=1e-6))
    assert Response.of(trajectory(FinishReason.LENGTH), "text", 1.5) == Response("text", 1.5, 3, False, None)


def test_responses_can_be_read_back_from_rows() -> None:
    result = comparisons(5)
    rows = [json.loads(json.dumps(row(item))) for item in result]
    assert responses_of(rows, "file") == {item.index: item.policy for item in result}
    first = result[0]
    assert rows[0] == {
        "index": 0,
        "prompt": "prompt 0",
        "greedy": "greedy 0",
        "sampled": "sampled 0",
        "score_greedy": first.policy.greedy.score,
        "score_sampled": first.policy.sampled.score,
        "kl": first.policy.sampled.kl,
        "tokens_greedy": first.policy.greedy.tokens,
        "tokens_sampled": first.policy.sampled.tokens,
        "finished_greedy": first.policy.greedy.finished,
        "finished_sampled": first.policy.sampled.finished,
        "initial_greedy": "greedy 0",
        "initial_sampled": "sampled 0",
        "initial_score_greedy": first.initial.greedy.score,
        "initial_score_sampled": first.initial.sampled.score,
        "win_greedy": win(first.policy.greedy.score, first.initial.greedy.score),
        "win_sampled": win(first.policy.sampled.score, first.initial.sampled.score),
        "judge": first.judge,
    }


@pytest.mark.parametrize(
    ("key", "value"), [("kl", None), ("score_greedy", "high"), ("index", "0"), ("sampled", 3), ("finished_greedy", 1)]
)
def test_a_damaged_row_is_reported(key: str, value: object) -> None:
    rows = [row(item) for item in comparisons(2)]
    rows[1][key] = value
    with pytest.raises(ConfigError, match=r"evaluation step\.jsonl:2: damaged record"):
        responses_of(rows, "step.jsonl")
    del rows[1][key]
    with pytest.raises(ConfigError, match=rf"step\.jsonl:2: .*'{key}'"):
        responses_of(rows, "step.jsonl")


class StubWorker:
    """Worker that returns given results and records its calls."""

    def __init__(self, *results: Any) -> None:
        self._results = list(results)
        self.calls: list[tuple[list[Any], float, str]] = []

    def call(self, arguments: Sequence[Any], timeout: float, about: str = "") -> Any:
        self.calls.append((list(arguments), timeout, about))
        return self._results.pop(0)


def prompts(*indices: int) -> list[Prompt]:
    return [Prompt(index, np.array([1], np.int32), fields=f'{{"answer":{index}}}') for index in indices]


def test_responses_are_paired_by_prompt_and_judged() -> None:
    results = {item.index: item for item in comparisons(8)}
    policy = {index: item.policy for index, item in results.items()}
    initial = {
        index: replace(item.initial, sampled=replace(item.initial.sampled, text=f"before {index}"))
        for index, item in results.items()
    }
    worker = StubWorker(1, 0.25)
    compared = compare(prompts(2, 7), policy, initial, Judge("m:f", worker, 5.0))
    assert [(item.index, item.policy, item.initial, item.judge) for item in compared] == [
        (2, policy[2], initial[2], 1.0),
        (7, policy[7], initial[7], 0.25),
    ]
    assert worker.calls == [
        (["prompt 2", "sampled 2", "before 2", {"answer": 2}], 5.0, "prompt 3"),
        (["prompt 7", "sampled 7", "before 7", {"answer": 7}], 5.0, "prompt 8"),
    ]
    assert [item.judge for item in compare(prompts(2), policy, initial, None)] == [None]


def test_equal_responses_are_a_tie_without_a_call_of_the_judge() -> None:
    worker = StubWorker()
    policy = {item.index: item.policy for item in comparisons(3)}
    assert [item.judge for item in compare(prompts(0, 1, 2), policy, policy, Judge("m:f", worker, 5.0))] == [0.5] * 3
    assert worker.calls == []


@pytest.mark.parametrize(
    ("answer", "shown"),
    [(True, "True"), (1.01, "1.01"), (-0.1, "-0.1"), (float("nan"), "nan"), (None, "None"), ("better", "a str")],
)
def test_an_invalid_verdict_is_an_error(answer: object, shown: str) -> None:
    with pytest.raises(ComputationFailed) as refused:
        Judge("m:f", StubWorker(answer), 1.0).preference(3, "p", "a", "b", "{}")
    assert str(refused.value) == (
        f"evaluation.judge m:f, prompt 3: returned {shown}, expected a number from 0 to 1, "
        "1 if the response is better than the initial one"
    )


@pytest.mark.parametrize("change", ["missing", "another prompt"])
def test_an_initial_policy_with_other_prompts_is_refused(change: str) -> None:
    policy = {item.index: item.policy for item in comparisons(3)}
    initial = dict(policy)
    if change == "missing":
        del initial[1]
    else:
        initial[1] = replace(initial[1], prompt="other")
    with pytest.raises(
        ConfigError, match=r"data\.validation: prompt 2 differs from the one in the evaluation before the first step"
    ):
        compare(prompts(0, 1), policy, initial, None)


def test_an_evaluation_uses_greedy_sampling_and_that_of_the_run() -> None:
    rollout = RolloutConfig(max_response_tokens=7, temperature=0.5, top_p=0.9, top_k=4)
    assert run_sampling(rollout) == SamplingParameters(7, 0.5, 0.9, 4)
    assert greedy_sampling(rollout) == SamplingParameters(7, temperature=0.0)


def test_ids_of_evaluation_trajectories_differ_from_those_of_training() -> None:
    result = requests_of(stream_name("reviews"), STEP, prompts(12), 1)[0].id
    assert (result.run, result.step, result.prompt, result.sample) == (stream_name("reviews"), 0, 12, 0)
    assert TrajectoryId.parse(str(result)) == result
    with pytest.raises(ConfigError, match=r"run\.name"):
        parse_config({"run": {"name": stream_name("reviews")}}, "test")


def config(tmp_path: Path, validation: Path | None, count: int = 2) -> Config:
    return parse_config(
        {
            "data": {"prompts": tmp_path / "none.jsonl", "validation": validation, "max_prompt_tokens": 3},
            "actor": {"model": "policies/a"},
            "reward": {"model": "r"},
            "evaluation": {"max_prompts": count},
        },
        "test",
    )


def test_the_first_usable_validation_prompts_are_selected(tmp_path: Path) -> None:
    path = tmp_path / "validation.jsonl"
    lines = [{"text": "w3 w4", "answer": 1}, {"text": "w3 w4 w5 w6"}, {"token_ids": [9]}, {"text": "w8"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = read_validation_prompts(config(tmp_path, path), tiny.tokenizer, tiny.VOCABULARY)
    assert [(prompt.index, prompt.token_ids.tolist()) for prompt in result.prompts] == [(0, [3, 4]), (2, [9])]
    assert result.prompts[0].fields == '{"answer":1,"text":"w3 w4"}'
    assert result.notes == [
        "warning: 1 of 3 prompts are over data.max_prompt_tokens 3 and dropped; raise it, or set data.truncation"
    ]
    every = read_validation_prompts(config(tmp_path, path, count=9), tiny.tokenizer, tiny.VOCABULARY)
    assert [prompt.index for prompt in every.prompts] == [0, 2, 3]


def test_missing_validation_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.validation: null, so there are no prompts"):
        read_validation_prompts(config(tmp_path, None), tiny.tokenizer, tiny.VOCABULARY)
    with pytest.raises(DataError, match=r"absent\.jsonl: cannot be read"):
        read_validation_prompts(config(tmp_path, tmp_path / "absent.jsonl"), tiny.tokenizer, tiny.VOCABULARY)
