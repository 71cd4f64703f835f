"""Dynamic sampling: groups whose scores are all equal are replaced, reproducibly after failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quartet.buffer.connection import Redis
from quartet.config.root import Config
from tests.training.conftest import MakeConfig
from tests.training.generator_runs import run_with_generators
from tests.training.runs import Run, active_run, assert_same, run_to_completion, services, step_metrics, weights
from tests.training.test_resume import crash_run, delete_run_data

STEPS, PROMPTS, SAMPLES = 5, 3, 2
FUNCTIONS = """
from zlib import crc32

def some_equal(prompt, response, fields):
    \"\"\"Score all responses to one prompt in two alike, and the others by their text.\"\"\"
    return 1.0 if crc32(prompt.encode()) % 2 else crc32(response.encode()) % 4 / 4

def all_equal(prompt, response, fields):
    return 0.25

def never_equal(prompt, response, fields):
    return crc32((prompt + "|" + response).encode()) / 2**32
"""


@pytest.fixture(autouse=True)
def _functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)


def config(make: MakeConfig, function: str = "some_equal", **changes: Any) -> Config:
    rollout = {"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES, "dynamic_sampling": True}
    sections: dict[str, Any] = {
        "run": {"steps": STEPS},
        "algorithm": {"estimator": "grpo", "score": {"normalize": "running"}},
        "reward": {"source": "function", "function": f"mine:{function}", "model": None},
        "critic": {"model": None},
        "checkpoint": {"every_steps": 2, "keep_last": 9},
        "recovery": {"backoff_seconds": 0.01},
        **changes,
        "rollout": rollout | changes.get("rollout", {}),
    }
    return make(**sections)


def prompts_of(run: Run, step: int) -> list[int]:
    return sorted({int(item["id"].split("/")[2]) for item in run.trajectories(step)})


@pytest.fixture(scope="module")
def cache() -> dict[str, Run]:
    """A cache of the uninterrupted run."""
    return {}


@pytest.fixture
def uninterrupted(cache: dict[str, Run], make: MakeConfig) -> Run:
    if not cache:
        cache["run"] = run_to_completion(config(make))
    return cache["run"]


def test_a_step_has_all_its_groups_and_the_scores_of_each_differ(uninterrupted: Run) -> None:
    assert sum(step["equal_groups"] for step in uninterrupted.metrics) > STEPS, "the test needs replaced groups"
    assert max(step["sampling_rounds"] for step in uninterrupted.metrics) > 2, "the test needs a third round"
    for step, metrics in enumerate(uninterrupted.metrics, 1):
        rows = uninterrupted.trajectories(step)
        groups = [
            [row["score"] for row in rows if row["id"].split("/")[2] == str(p)] for p in prompts_of(uninterrupted, step)
        ]
        assert [len(group) for group in groups] == [SAMPLES] * PROMPTS
        assert all(len(set(group)) > 1 for group in groups)
        assert metrics["prompts_consumed"] >= PROMPTS + metrics["equal_groups"]
        assert metrics["sampling_rounds"] >= 1 + (metrics["equal_groups"] > 0)


@pytest.mark.parametrize("max_off_policy_steps", [0, 2])
def test_without_equal_groups_a_run_has_the_bits_of_one_without_dynamic_sampling(
    make: MakeConfig, max_off_policy_steps: int
) -> None:
    rollout = {"max_off_policy_steps": max_off_policy_steps}
    plain = run_to_completion(config(make, "never_equal", rollout={**rollout, "dynamic_sampling": False}))
    run = run_to_completion(config(make, "never_equal", rollout=rollout))
    own = {"sampling_rounds": 1, "equal_groups": 0, "prompts_consumed": PROMPTS}
    for metrics, expected in zip(step_metrics(run), step_metrics(plain), strict=True):
        assert metrics.pop("generated_reward_mean") == pytest.approx(metrics["reward_mean"])
        assert metrics == {**expected, **own}
    assert weights(run) == weights(plain)


def test_steps_that_are_generated_ahead_take_each_prompt_once(make: MakeConfig) -> None:
    """Of a data set that is large enough for all rounds. Later rounds are by the newest policy."""
    run = run_to_completion(config(make, rollout={"max_off_policy_steps": 1}))
    assert sum(step["equal_groups"] for step in run.metrics) > STEPS, "the test needs replaced groups"
    used = [prompt for step in range(1, STEPS + 1) for prompt in prompts_of(run, step)]
    assert len(used) == len(set(used)) == STEPS * PROMPTS
    versions = [{row["policy_version"] for row in run.trajectories(step)} for step in range(1, STEPS + 1)]
    assert versions[0] == {0}
    assert any(len(each) == 2 for each in versions)
    for step, each in enumerate(versions[1:], 2):
        assert each <= {step - 2, step - 1}


@pytest.mark.slow
@pytest.mark.parametrize("max_off_policy_steps", [0, 1])
def test_crashes_and_generators_that_are_lost_change_no_prompt(
    make: MakeConfig, max_off_policy_steps: int, monkeypatch: pytest.MonkeyPatch, redis_client: Redis
) -> None:
    """Step 3 is replayed. Step 4 is taken again after its data in Redis is lost, by generators."""
    rollout = {"max_off_policy_steps": max_off_policy_steps}
    crashed, uninterrupted = config(make, rollout=rollout), run_to_completion(config(make, rollout=rollout))
    with services(crashed) as addressed:
        for crash_point, step in [
            *((point, 3) for point in ("generate", "sealed", "updated", "committed")),
            ("sealed", 4),
        ]:
            crash_run(addressed, crash_point, step, monkeypatch)
    delete_run_data(redis_client, crashed.run.name)
    run = run_with_generators(crashed, 2, lambda running, step: running.replace(running.addresses[step % 2]))
    assert_same(run, uninterrupted)


def test_too_many_equal_groups_end_the_run_which_resumes_with_a_higher_limit(
    make: MakeConfig, uninterrupted: Run
) -> None:
    limited = config(make, rollout={"max_sampling_rounds": 2})
    with active_run(limited) as active:
        failed = active.finish()
    assert failed.code == 1
    first = next(index for index, step in enumerate(uninterrupted.metrics, 1) if step["sampling_rounds"] > 2)
    assert failed.progress.error.startswith(f"step {first}: after 2 rounds with ")
    assert "rollout.max_sampling_rounds is 2" in failed.progress.error
    assert [step["step"] for step in failed.metrics] == list(range(1, first)) if first > 1 else True
    tree = limited.model_dump(mode="json")
    tree["rollout"]["max_sampling_rounds"] = 10
    assert_same(run_to_completion(type(limited)(**tree)), uninterrupted)


def test_a_reward_that_scores_all_alike_ends_the_run_with_the_score(make: MakeConfig) -> None:
    with active_run(config(make, "all_equal", rollout={"max_sampling_rounds": 3})) as active:
        run = active.finish()
    assert run.code == 1
    assert run.progress.error.startswith(
        "step 1: after 3 rounds with 9 groups, 0 of 3 have scores that differ; in 9 groups all scores are equal, most often 0.25 "
        "(9 groups); rollout.max_sampling_rounds is 3; "
    )
    assert not run.files.metrics.exists()


def test_nothing_of_a_replaced_group_stays_in_the_buffer(uninterrupted: Run, redis_client: Redis) -> None:
    assert sum(step["equal_groups"] for step in uninterrupted.metrics) > 0
    for key in redis_client.scan_iter(match=f"quartet:{uninterrupted.files.root.name}:rollouts*"):
        assert redis_client.xlen(key) == 0
