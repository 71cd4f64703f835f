"""The error names the setting that differs if a run is resumed with another config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quartet.config.loading import parse_config
from quartet.errors import ConfigError
from quartet.run_directory.identity import check_settings, fixed_settings


def settings(**sections: Any) -> dict[str, Any]:
    tree = {"data": {"prompts": "p"}, "actor": {"model": "a"}, "reward": {"model": "r"}, **sections}
    return fixed_settings(parse_config(tree, "test"))


def refusal(before: dict[str, Any], now: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        check_settings(before, now, Path("runs/tiny"))
    return str(refused.value)


def test_a_changed_setting_is_reported_before_keys_that_depend_on_it() -> None:
    one, other = settings(rollout={"max_off_policy_steps": 1}), settings()
    assert "checkpoint.every_steps" in one.keys() - other.keys()
    assert refusal(one, other).startswith("--resume: rollout.max_off_policy_steps is 0, the run in runs/tiny had 1;")
    assert refusal(other, one).startswith("--resume: rollout.max_off_policy_steps is 1, the run in runs/tiny had 0;")


def test_a_changed_setting_is_reported_with_both_values() -> None:
    one, other = (settings(rollout={"max_off_policy_steps": 1}, checkpoint={"every_steps": every}) for every in (10, 5))
    assert refusal(one, other).startswith("--resume: checkpoint.every_steps is 5, the run in runs/tiny had 10;")


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("run", "seed", 99),
        ("algorithm", "kl_coefficient", 0.9),
        ("actor", "learning_rate", 0.1),
        ("actor", "micro_batch_tokens", 48),
        ("rollout", "temperature", 0.5),
    ],
)
def test_a_setting_that_decides_what_a_step_learns_cannot_change(section: str, name: str, value: Any) -> None:
    model = {"model": "a"} if section == "actor" else {}
    before, now = settings(), settings(**{section: {**model, name: value}})
    assert refusal(before, now).startswith(f"--resume: {section}.{name} is {value}, the run in runs/tiny had ")
    assert refusal(now, before).startswith(f"--resume: {section}.{name} is ")


def test_an_added_or_removed_section_is_reported() -> None:
    adapted = settings(actor={"model": "a", "lora": {"rank": 4}})
    assert refusal(settings(), adapted).startswith("--resume: actor.lora.")
    assert refusal(adapted, settings()).startswith("--resume: actor.lora.")


def test_a_run_that_started_before_a_setting_existed_had_its_default() -> None:
    new = ("rollout.repetition_penalty", "evaluation.sets", "actor.optimizer.eps")
    before = {key: value for key, value in settings().items() if key not in new}
    assert len(before) == len(settings()) - len(new)
    check_settings(before, settings(), Path("runs/tiny"))
    changed = settings(rollout={"repetition_penalty": 1.5})
    assert refusal(before, changed).startswith(
        "--resume: rollout.repetition_penalty is 1.5, the run in runs/tiny had 1.0;"
    )


def test_a_run_may_resume_with_another_limit_of_rounds_but_not_with_another_sampling() -> None:
    groups: dict[str, Any] = {"samples_per_prompt": 2, "dynamic_sampling": True}
    one, other = settings(rollout=groups), settings(rollout={**groups, "max_sampling_rounds": 30})
    check_settings(one, other, Path("runs/tiny"))
    without = settings(rollout={"samples_per_prompt": 2})
    assert refusal(one, without).startswith(
        "--resume: rollout.dynamic_sampling is False, the run in runs/tiny had True;"
    )
