"""Weighted sums of reward sources, compared with a sum in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.contract.trajectory import Outcome
from quartet.errors import ComputationFailed, ConfigError, InvalidRequest, MismatchError
from quartet.models.forward.scoring import sequence_scores
from quartet.rewards.factory import build_reward
from quartet.rewards.reward_source import RewardSource
from tests.rewards.processes import children
from tests.unit.models import tiny

BATCH = tiny.batch([3, 1, 9], [4, 7, 1], seed=5)
SCORERS = """
import time
from pathlib import Path

def length(prompt, response, fields):
    return len(response.split()) / 7

def lengths(prompts, responses, fields):
    return [-len(prompt.split()) for prompt in prompts]

def logs(solution_str, data_source, ground_truth, extra_info, **arguments):
    return {"score": 1, **arguments}

def large(prompt, response, fields):
    return 3e38

def first(prompts, responses, fields):
    return meet("first", "second", prompts)

def second(prompts, responses, fields):
    return meet("second", "first", prompts)

def meet(mine, other, prompts):
    Path(mine).touch()
    while not Path(other).exists():
        time.sleep(0.01)
    return [1.0] * len(prompts)

def fails(prompt, response, fields):
    raise ValueError("no")

class Refused(Exception):
    outcome = "refused"

def fails_at_second(prompt, response, fields):
    if len(prompt.split()) == 1:
        raise Refused("no")
    return 1
"""
LENGTH = {"name": "length", "weight": 0.3, "source": "function", "function": "scorers:length"}
LENGTHS = {"name": "lengths", "weight": -1.7, "source": "function", "function": "scorers:lengths", "batched": True}
Build = Callable[..., RewardSource]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save three reward models: ``two`` has fewer positions and more ids than ``one``, ``other`` has another tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoints")
    tiny.saved(tiny.classifier("llama", seed=4), folder / "one")
    tiny.saved(tiny.classifier("gpt2", seed=5, max_position_embeddings=32, vocab_size=70), folder / "two")
    tiny.saved(tiny.classifier("llama", seed=6, vocab_size=70), folder / "other")
    other = tiny.tokenizer()
    other.add_tokens(["another"])
    for name in ("one", "two", "other"):
        (other if name == "other" else tiny.tokenizer()).save_pretrained(folder / name)
    return folder


@pytest.fixture
def build(checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """Return a function that builds reward sources. Check at the end that no process is left."""
    (tmp_path / "scorers.py").write_text(SCORERS)
    monkeypatch.chdir(tmp_path)
    before = children()
    with ExitStack() as stack:

        def build(*parts: dict[str, Any], **reward: Any) -> RewardSource:
            section = {"source": "ensemble", "parts": list(parts)} if parts else {}
            source = build_reward(config(checkpoints, {**section, **reward}), "cpu")
            stack.callback(source.close)
            return source

        yield build
    assert children() <= before


def config(checkpoints: Path, reward: dict[str, Any]) -> Config:
    tree = {"data": {"prompts": "none.jsonl"}, "actor": {"model": str(checkpoints / "one")}, "reward": reward}
    return parse_config(tree, "test")


def model(checkpoints: Path, name: str, weight: float) -> dict[str, Any]:
    return {"name": f"model-{name}", "weight": weight, "model": str(checkpoints / name)}


def test_the_score_is_the_weighted_sum_of_the_unweighted_parts(build: Build, checkpoints: Path) -> None:
    parts = [LENGTH, model(checkpoints, "one", 2.5), LENGTHS, model(checkpoints, "two", -0.25)]
    scores = build(*parts).score(BATCH)
    expected = {
        "length": BATCH.response_lengths - [sum(ids == 1) for ids in responses()],
        "model-one": sequence_scores(tiny.classifier("llama", seed=4), BATCH, 10_000),
        "lengths": -BATCH.prompt_lengths,
        "model-two": sequence_scores(
            tiny.classifier("gpt2", seed=5, max_position_embeddings=32, vocab_size=70), BATCH, 10_000
        ),
    }
    expected["length"] = np.float32(expected["length"] / 7)
    assert list(scores.parts) == list(expected)
    for name, values in expected.items():
        assert scores.parts[name].dtype == np.float32
        np.testing.assert_allclose(scores.parts[name], values, atol=1e-6, rtol=0)
    total = sum(part["weight"] * np.float64(expected[part["name"]]) for part in parts)
    assert scores.total.dtype == np.float32
    np.testing.assert_allclose(scores.total, total, atol=1e-5, rtol=0)
    assert np.ptp(total) > 1


def responses() -> list[np.ndarray]:
    pairs = zip(BATCH.sequences(), BATCH.prompt_lengths, strict=True)
    return [sequence[prompt:] for sequence, prompt in pairs]


def test_what_the_parts_log_is_merged(build: Build) -> None:
    part = {"source": "function", "function": "scorers:logs", "signature": "verl"}
    reward = build(
        {"name": "a", **part, "arguments": {"x": 1, "only_a": "text"}}, {"name": "b", **part, "arguments": {"x": 4}}
    )
    scores = reward.score(BATCH, ['{"ground_truth": 1}'] * 3)
    assert scores.logged == ({"x": 2.5, "only_a": "text"},) * 3


def test_functions_of_an_ensemble_run_concurrently(build: Build) -> None:
    parts = [
        {"name": name, "source": "function", "function": f"scorers:{name}", "batched": True, "timeout_seconds": 30}
        for name in ("first", "second")
    ]
    assert build(*parts).score(BATCH).total.tolist() == [2.0, 2.0, 2.0]


def test_a_sum_beyond_float32_is_an_error(build: Build) -> None:
    part = {"name": "large", "weight": 2.0, "source": "function", "function": "scorers:large"}
    with pytest.raises(ComputationFailed, match=r"reward\.parts: the weighted sum of sequence index 0 is 6e"):
        build(part).score(BATCH)


def test_the_failure_of_one_part_fails_the_ensemble(build: Build, checkpoints: Path) -> None:
    failing = {"name": "failing", "source": "function", "function": "scorers:fails"}
    source = build(LENGTHS, model(checkpoints, "one", 1.0), failing)
    scores = source.score(BATCH)
    assert scores.outcomes == (Outcome.SCORER_ERROR,) * 3
    assert np.isnan(scores.total).all()
    assert np.isnan(scores.parts["failing"]).all()
    assert np.isfinite(scores.parts["lengths"]).all(), "the curves of the other parts have lost their scores"
    assert scores.details[0].startswith("reward.parts.failing.function scorers:fails raised ValueError at")


def test_one_failed_response_does_not_fail_the_others_of_an_ensemble(build: Build) -> None:
    failing = {"name": "failing", "weight": 2.0, "source": "function", "function": "scorers:fails_at_second"}
    scores = build(LENGTHS, failing).score(BATCH)
    assert scores.outcomes == (Outcome.OK, Outcome.REFUSED, Outcome.OK)
    np.testing.assert_array_equal(np.isnan(scores.total), [False, True, False])
    lengths = build(LENGTHS).score(BATCH).total
    np.testing.assert_array_equal(scores.total[[0, 2]], lengths[[0, 2]] + 2)


def test_malformed_fields_are_refused_by_every_source(build: Build, checkpoints: Path) -> None:
    ensemble = build(LENGTHS, model(checkpoints, "one", 1.0))
    single = build(source="model", model=str(checkpoints / "one"))
    for source in (ensemble, single):
        with pytest.raises(InvalidRequest, match=r"fields\[2\]: found int"):
            source.score(BATCH, ["{}", "{}", "3"])


def test_the_status_has_the_strictest_limits_of_the_parts(build: Build, checkpoints: Path) -> None:
    models = [build(model=str(checkpoints / name)).status() for name in ("one", "two")]
    both = build(LENGTH, model(checkpoints, "two", 2.0), model(checkpoints, "one", 1.0)).status()
    assert both.model == "0.3*length + 2*model-two + 1*model-one"
    assert both.parameters == models[0].parameters + models[1].parameters > 20_000
    assert (both.vocabulary_size, both.max_sequence_tokens) == (61, 32)
    assert (both.device, both.dtype) == ("cpu", "float32")
    assert build(LENGTH, model(checkpoints, "two", 1.0)).status().vocabulary_size == 70
    functions = build(LENGTH, LENGTHS).status()
    assert (functions.parameters, functions.vocabulary_size, functions.max_sequence_tokens) == (0, 61, 0)
    assert both.tokenizer_fingerprint == functions.tokenizer_fingerprint == models[0].tokenizer_fingerprint


def test_a_function_uses_the_configured_tokenizer(build: Build, checkpoints: Path) -> None:
    function = {"source": "function", "function": "scorers:length"}
    prints = [build(**function, tokenizer=name and str(checkpoints / name)).status() for name in (None, "one", "other")]
    fingerprints = [status.tokenizer_fingerprint for status in prints]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    assert [status.vocabulary_size for status in prints] == [61, 61, 62]


def test_a_model_with_another_tokenizer_is_refused_in_an_ensemble(build: Build, checkpoints: Path) -> None:
    other, one = checkpoints / "other", checkpoints / "one"
    with pytest.raises(MismatchError) as refused:
        build(LENGTH, model(checkpoints, "other", 1.0))
    assert f"reward.parts.model-other.model {other}: its vocabulary is not that of {one}" in str(refused.value)
    build(model(checkpoints, "other", 1.0), tokenizer=str(other))


def test_sources_built_before_a_failure_are_closed(build: Build) -> None:
    before = children()
    with pytest.raises(
        ConfigError, match=r"reward.parts.missing.function scorers:missing: module scorers has no missing"
    ):
        build(LENGTH, {"name": "missing", "source": "function", "function": "scorers:missing"})
    assert children() == before
